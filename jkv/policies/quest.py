"""Quest: reads the pages whose keys may match the query best."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

import pallas_kernels
from jkv.cache import Bounds, Prompt, Slots, Token, View
from jkv.config import CacheSpec
from jkv.policies.base import Policy, require
from jkv.policies.full import Full
from jkv.policies.registry import preset, register
from pallas_kernels import Pages


@dataclass(frozen=True, kw_only=True)
class PagedReading(Policy):
    """Reads a few pages of whatever slots the policy behind it in the inheritance order keeps.

    Each page of slots has the smallest and the largest number of its keys in every channel. They bound what a query's
    product with any key of the page can be, and the pages with the highest bounds are read.

    Attributes:
        page: slots of a page.
        share: "group": one choice for the query heads of a kv head, by the largest bound among them; "head": each
            query head has its own.
        last: always read the page that is being filled, within the budget; otherwise it is chosen as all others are.
    """

    page: int = 16
    share: Literal["group", "head"] = "group"
    last: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        whole = 1 <= self.page <= 64 and self.page & (self.page - 1) == 0
        require(self, whole, "page", "a power of two from 1 to 64 slots")
        if self.needs_probs:
            raise ValueError(f"policy {type(self).__name__}: a sum of attention needs all slots; read no pages of it")

    @property
    def pages(self) -> int:
        """Pages that a step reads."""
        raise TypeError(f"policy {type(self).__name__} does not say how many pages it reads")

    def tokens_read(self, spec: CacheSpec, length: int) -> dict[str, int]:
        """Whole pages, one of which is being filled."""
        held = sum(super().tokens_read(spec, length).values())
        return {"selected pages": min(held, self.pages * self.page)}

    def bytes_read(self, spec: CacheSpec, length: int) -> int:
        """The pages, and the bounds of all."""
        held = sum(super().tokens_read(spec, length).values())
        return super().bytes_read(spec, length) + 2 * spec.vector_bytes * spec.num_kv_heads * -(-held // self.page)

    def ingest(self, spec: CacheSpec, prompt: Prompt) -> Slots:
        """The slots with the bounds of their pages."""
        return bound_pages(super().ingest(spec, prompt), self.page)

    def append(self, store: Slots, token: Token) -> Slots:
        """Appends the token, and widens the bounds of its page."""
        return widen_page(super().append(store, token), token, self.page)

    def compact(self, store: Slots, rows: Array) -> Slots:
        """The bounds of what is left."""
        return bound_pages(super().compact(store, rows), self.page)

    def select(self, store: Slots, q: Array, plan: object) -> View:
        """The pages of the highest bounds."""
        view, bounds = super().select(store, q, plan), store.bounds
        assert bounds is not None
        score = pallas_kernels.page_scores(q, bounds.high, bounds.low, implementation=store.implementation)
        return replace(view, pages=self.choose_pages(score, store))

    def choose_pages(self, score: Array, store: Slots) -> Pages:
        """The pages to read, by their scores for each query head, float32 `[B, H, G, P]`."""
        length = store.length
        if self.share == "group":
            score = jnp.max(score, axis=2, keepdims=True)
        filled = -(-length[..., None] // self.page)  # [B, H, 1]
        page = jnp.arange(score.shape[-1], dtype=jnp.int32).reshape(1, 1, 1, -1)
        candidates = filled - 1 if self.last else filled
        score = jnp.where(page < candidates[..., None], score, -jnp.inf)
        most = min(self.pages - self.last, score.shape[-1])
        count = jnp.broadcast_to(jnp.minimum(most, candidates), score.shape[:-1])
        index = pallas_kernels.select_top(score, count, most=most, implementation=store.implementation)
        # What is appended to is not listed but read as the end of the text.
        last = jnp.maximum(filled - 1, 0)
        read = True if self.last else jnp.any(index == last[..., None], axis=-1)
        start = jnp.where(read, last * self.page, length[..., None])
        start = jnp.where(filled <= self.pages, 0, start)
        return Pages(index, jnp.broadcast_to(start, score.shape[:-1]).astype(jnp.int32), self.page)


@register("quest")
@dataclass(frozen=True, kw_only=True)
class Quest(PagedReading):
    """Keeps every token and reads the pages of keys that may match the query best.

    Exact: with `share=head,last=False`, scores, pages and output of the Quest evaluation code; with `share=head`, the
    pages of its kernels.
    Differs: by default the query heads of a kv head read the same pages, so that a page is read once for all of them;
    Quest's kernels know one query head a kv head only.

    Attributes:
        budget: tokens read per kv head, the page that is being filled included; 3 pages at least.
        dense: first layers that read everything.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.10774"

    budget: int = 2048
    dense: int = 2

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        require(self, self.budget >= 3 * self.page, "budget", f"at least 3 pages of {self.page} tokens")
        require(self, self.dense >= 0, "dense", "0 or more layers")

    @property
    def pages(self) -> int:
        """Whole pages of the budget."""
        return self.budget // self.page

    def at(self, layer: int, layers: int) -> Policy:
        """The first layers are dense."""
        del layers
        return Full() if layer < self.dense else self


preset("quest@eval", Quest(share="head", last=False), "as Quest's evaluation code: pages for each query head")


def bound_pages(slots: Slots, size: int) -> Slots:
    """The slots with the bounds of their pages of `size`."""
    batch, heads, capacity, dim = slots.k.shape
    room = -capacity % size
    filled = jnp.pad(slots.filled, ((0, 0), (0, 0), (0, room))).reshape(batch, heads, -1, size, 1)
    k = jnp.pad(slots.k, ((0, 0), (0, 0), (0, room), (0, 0))).reshape(batch, heads, -1, size, dim)
    low, high = jnp.min(jnp.where(filled, k, jnp.inf), axis=3), jnp.max(jnp.where(filled, k, -jnp.inf), axis=3)
    return replace(slots, bounds=Bounds(low, high))


def widen_page(slots: Slots, token: Token, size: int) -> Slots:
    """The bounds with the key of the token that has just been appended."""
    assert slots.bounds is not None
    low, high = slots.bounds
    batch, heads = slots.length.shape
    row, head = jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.arange(heads, dtype=jnp.int32)[None]
    # Rows without a token write out of bounds, which is dropped.
    page = jnp.where(token.active[:, None], jnp.maximum(slots.length - 1, 0) // size, low.shape[2])
    k, how = token.k.astype(low.dtype), {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    return replace(slots, bounds=Bounds(low.at[row, head, page].min(k, **how), high.at[row, head, page].max(k, **how)))
