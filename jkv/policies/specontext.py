"""SpeContext: what all layers read is chosen before the first one runs."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

import pallas_kernels
from jkv.cache import Prompt, Slots, Token, View, fill
from jkv.config import CacheSpec
from jkv.policies.base import Policy, Step, require
from jkv.policies.fields import INTERNAL
from jkv.policies.registry import preset, register
from pallas_kernels import Pages

HEADS = ("first-layer", "previous")


@register("specontext")
@dataclass(frozen=True, kw_only=True)
class SpeContext(Policy):
    """Keeps every token and reads those that a retrieval head attends to most, the same ones in every layer.

    The query heads of a kv head share a choice, by the largest probability among them. The token being decoded is
    always read. Nothing depends on what the layers compute in the step, so that a choice can be made ahead of them.

    Differs: the paper takes its retrieval head from a draft model, and leaves sinks and recent tokens to it.
    `specontext@paper` reads none but the token being decoded for certain.

    Attributes:
        budget: tokens read per kv head, everything included.
        head: "first-layer": queries and keys of the model's own first layer; "previous": the last token's query of the
            layer in the middle, with that layer's keys.
        sink: first tokens of the text always read.
        recent: last tokens always read, the one being decoded included.
        searched: whether this is the policy of the layer whose keys are searched; `at` sets it.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2512.00722"

    budget: int = 2048
    head: str = "first-layer"
    sink: int = 4
    recent: int = 64
    searched: bool = field(default=False, metadata=INTERNAL)

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        require(self, self.head in HEADS, "head", " or ".join(HEADS))
        require(self, self.sink >= 0, "sink", "0 or more tokens")
        require(self, self.recent >= 1, "recent", "at least the token being decoded")
        always = self.sink + self.recent
        require(self, self.budget > always, "budget", f"more than sink + recent = {always} tokens")

    def at(self, layer: int, layers: int) -> Policy:
        """The layer whose keys are searched also keeps its last query."""
        return replace(self, searched=True) if layer == self.where(layers) else self

    def where(self, layers: int) -> int:
        """The layer whose keys are searched."""
        return 0 if self.head == "first-layer" else layers // 2

    def tokens_read(self, spec: CacheSpec, length: int) -> dict[str, int]:
        """Sinks, recent tokens and what the head chooses."""
        del spec
        sink = min(self.sink, length)
        recent = min(self.recent, length - sink)
        return {"sinks": sink, "recent": recent, "selected": min(self.budget, length) - sink - recent}

    def shared(self, spec: CacheSpec, batch: int) -> Array:
        """The last query, `[B, H, G, D]`; with no tokens in it where it is not needed."""
        shape = (batch, spec.num_kv_heads, spec.group, spec.head_dim if self.head == "previous" else 0)
        return jnp.zeros(shape, spec.dtype)

    def plan(self, shared: Array, step: Step) -> tuple[Pages, Array]:
        """Chooses the tokens."""
        store: Slots = step.stores[self.where(len(step.stores))]
        if self.head == "previous":
            return self.choose_tokens(attention(shared, store.k, store.length), store, step.active), shared
        heads = step.model.layers[0].heads(step.x, step.cos, step.sin)
        return self.choose_tokens(attention(heads.q, store.k, store.length, heads.k), store, step.active), shared

    def choose_tokens(self, probs: Array, store: Slots, active: Array) -> Pages:
        """The tokens to read.

        Args:
            probs: probabilities of the slots for each query head, float32 `[B, H, G, C]`.
            store: before the token being decoded is in it.
            active: rows that are still decoding, bool `[B]`.
        """
        length = store.length + active[:, None]
        start = jnp.where(length <= self.budget, 0, length - self.recent)
        slot = jnp.arange(store.capacity, dtype=jnp.int32).reshape(1, 1, -1)
        score = jnp.where(slot < self.sink, jnp.inf, jnp.max(probs, axis=2))
        score = jnp.where(slot < start[..., None], score, -jnp.inf)
        most = min(self.budget - self.recent, store.capacity)
        index = pallas_kernels.select_top(
            score, jnp.minimum(most, start), most=most, implementation=store.implementation
        )
        return Pages(index[:, :, None], start[:, :, None], 1)

    def select(self, store: Slots, q: Array, plan: Pages) -> View:
        """The tokens that were chosen before the layers."""
        return replace(super().select(store, q, plan), pages=plan)

    def bytes_read(self, spec: CacheSpec, length: int) -> int:
        """Also all keys, where they are searched."""
        searched = spec.vector_bytes * spec.num_kv_heads * length if self.searched else 0
        return super().bytes_read(spec, length) + searched

    def read(self, shared: Array, x: Array, prompt: Prompt) -> Array:
        """The last query of the prompt."""
        del x
        return fill(prompt, window=1).window[:, :, 0] if self.searched and shared.size else shared

    def notice(self, shared: Array, x: Array, token: Token) -> Array:
        """The query of the token, for the next one."""
        del x
        if not (self.searched and shared.size):
            return shared
        return jnp.where(token.active.reshape(-1, 1, 1, 1), token.q, shared)


preset(
    "specontext@previous",
    SpeContext(head="previous"),
    "the last token's query chooses, with the keys of the middle layer",
)
preset("specontext@paper", SpeContext(sink=0, recent=1), "nothing but the token being decoded is read for certain")


def attention(q: Array, k: Array, length: Array, new: Array | None = None) -> Array:
    """Probabilities of a retrieval head.

    Args:
        q: queries `[B, H, G, D]`.
        k: keys `[B, H, C, D]`.
        length: filled slots, int32 `[B, H]`.
        new: the key of the token being decoded, `[B, H, D]`, which takes its share.

    Returns:
        float32 `[B, H, G, C]`, 0 in empty slots.
    """
    scale = q.shape[-1] ** -0.5
    logits = pallas_kernels.page_scores(q, k) * scale
    slot = jnp.arange(k.shape[2], dtype=jnp.int32).reshape(1, 1, 1, -1)
    filled = slot < length[..., None, None]
    logits = jnp.where(filled, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-1e30)
    total = 0.0
    if new is not None:
        own = jnp.einsum("bhgd,bhd->bhg", q, new, preferred_element_type=jnp.float32)[..., None] * scale
        top = jnp.maximum(top, own)
        total = jnp.exp(own - top)
    weights = jnp.exp(logits - top)
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True) + total, 1e-30)
