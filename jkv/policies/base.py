"""What a policy is: `Policy`, whose defaults are full attention, and `Evict`, which keeps a budget by score."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import pallas_kernels
from jkv.cache import Prompt, Slots, Token, View, fill, keep, put, resize, settled
from jkv.config import CacheSpec, ModelConfig
from jkv.policies.fields import field_kinds, is_of, name_kinds
from pallas_kernels import Attended


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides what a layer's cache holds and what attention may read.

    A policy is a static, hashable argument of the compiled programs; its arrays live in the store that its methods
    take and return. The defaults keep every token and read all of them.

    Attributes:
        interval: decoded tokens between two compactions; 0 never compacts after the prompt.
    """

    paper: ClassVar[str] = ""
    needs_probs: ClassVar[bool] = False

    interval: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError when a field is of another type than its annotation, or out of range."""
        for name, kinds in field_kinds(type(self)).items():
            require(self, is_of(getattr(self, name), kinds), name, name_kinds(kinds))
        require(self, self.interval >= 0, "interval", "0 (never compact while decoding) or more tokens")

    @property
    def implementation(self) -> str | None:
        """The implementation of the operations that the policy insists on, or None."""
        return None

    def prepare(self, token_ids: Callable[[str], tuple[int, ...]]) -> "Policy":
        """The policy with its text fields turned into token ids by `token_ids`; called once, before any compile."""
        del token_ids
        return self

    def adapt(self, config: ModelConfig) -> "Policy":
        """The policy for a model of these sizes; called once, before any compile."""
        del config
        return self

    def bring(self, config: ModelConfig, dtype: str) -> Any:
        """Arrays that the policy needs beside the model's, in the run's dtype; called once."""
        del config, dtype
        return ()

    def capacity(self, spec: CacheSpec) -> int:
        """Slots per kv head that a layer's store allocates."""
        return spec.max_len

    def most(self, length: int) -> int:
        """Most tokens per kv head that a compaction leaves of a text of `length` tokens."""
        return length

    def at(self, layer: int, layers: int) -> "Policy":
        """The policy of one of the model's layers; prefill compiles a program for each that differs."""
        del layer, layers
        return self

    def tokens_read(self, spec: CacheSpec, length: int) -> dict[str, int]:
        """Most tokens per kv head that a step reads of a text of `length` tokens, by what they are read for."""
        del spec
        return {"all": length}

    def bytes_read(self, spec: CacheSpec, length: int) -> int:
        """Bytes that a step of one row reads of one layer's store to attend, and to choose what to attend to."""
        return 2 * spec.vector_bytes * spec.num_kv_heads * sum(self.tokens_read(spec, length).values())

    def shared(self, spec: CacheSpec, batch: int) -> Any:
        """State outside the layers."""
        del spec, batch
        return ()

    def read_prompt(self, shared: Any, x: Array, prompt: Prompt, brought: Any) -> Any:
        """That state after a layer has read the prompts; `x` `[B, T, E]` is what entered the layer."""
        del x, prompt, brought
        return shared

    def plan(self, shared: Any, step: "Step") -> tuple[Any, Any]:
        """Chooses before the layers run: ``(plan, shared)``."""
        del step
        return (), shared

    def notice(self, shared: Any, x: Array, token: Token, brought: Any) -> Any:
        """The shared state once a layer has projected the token; `x` `[B, E]` is what entered the layer."""
        del x, token, brought
        return shared

    def ingest(self, spec: CacheSpec, prompt: Prompt) -> Any:
        """The store of one layer after the prompt."""
        return resize(fill(prompt), self.capacity(spec))

    def append(self, store: Any, token: Token) -> Any:
        """The store with one more token in every active row."""
        return put(store, token)

    def select(self, store: Any, q: Array, plan: Any) -> View:
        """What the queries `q` `[B, H, G, D]` may read."""
        del q, plan
        return store.view()

    def settle(self, store: Any, attended: Attended) -> Any:
        """The store with the arrays that attention has written the token to."""
        return settled(store, attended.k, attended.v, attended.notes)

    def observe(self, store: Any, token: Token, probs: Array | None) -> Any:
        """The store after attention; `probs` float32 `[B, H, G, C]` if `needs_probs`, else None."""
        del token, probs
        return store

    def compact(self, store: Any, rows: Array) -> Any:
        """The store with an interval ended in some `rows`, bool `[B]`; the others stay as they are."""
        del rows
        return store

    def positions(self, store: Any) -> Array:
        """Text positions that the store holds, int32 `[B, H, C]`, -1 where empty."""
        return store.pos

    def kv(self, store: Any) -> Any:
        """The arrays of a store that keys and values are read from; the others are there to choose by."""
        return store.k, store.v


class Step(NamedTuple):
    """A decoding step before its layers run.

    Attributes:
        model: the model, a `jkv.models.decoder.Decoder`.
        stores: one store per layer.
        token: its id, int32 `[B]`.
        x: the embedded token, `[B, E]`.
        cos, sin: rotation of its position, float32 `[B, D/2]`.
        pos: its position in the text, int32 `[B]`.
        active: rows that are still decoding, bool `[B]`.
        brought: what `Policy.bring` gave.
    """

    model: Any
    stores: tuple[Any, ...]
    token: Array
    x: Array
    cos: Array
    sin: Array
    pos: Array
    active: Array
    brought: Any


@dataclass(frozen=True, kw_only=True)
class Evict(Policy):
    """Keeps the `budget` tokens of the highest score in every kv head, the last `window` always among them.

    A subclass says what a token is worth in `score`. The prompt is compacted as it is stored, the decoded text after
    every `interval` tokens, and what attention reads in a step is never cut by that step's own compaction. Rows that
    hold no more than the budget are left as they are.

    Attributes:
        budget: tokens kept per kv head, everything included; or a share between 0 and 1 (also written 25%) of the
            tokens seen so far, which then grows with the text.
        floor: least tokens kept when the budget is a share.
        window: last tokens always kept; their queries are the observation window.
        sink: first tokens of the text always kept.
        interval: decoded tokens between two compactions; 0 compacts the prompt alone.
    """

    needs_queries: ClassVar[bool] = True
    fills: ClassVar[Mapping[str, float]] = MappingProxyType({})

    budget: int | float = 512
    floor: int = 128
    window: int = 16
    sink: int = 0
    interval: int = 128

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range, or the budget cannot hold sinks and window."""
        super().__post_init__()
        if isinstance(self.budget, float):
            tenths = round(self.budget * 1000, 6).is_integer()
            require(self, 0 < self.budget < 1 and tenths, "budget", "a number of tokens, or 0.1% to 99.9% in tenths")
            require(self, self.floor >= 1, "floor", "at least 1 token")
        for name in ("window", "sink"):
            require(self, getattr(self, name) >= 0, name, "0 or more tokens")
        held, least = self.sink + self.protected, self.least
        require(
            self,
            least > held,
            "budget" if isinstance(self.budget, int) else "floor",
            f"more than sink + window = {self.sink} + {self.protected} = {held} tokens",
        )

    @property
    def least(self) -> int:
        """Tokens that are always kept once they are there."""
        return self.budget if isinstance(self.budget, int) else self.floor

    @property
    def protected(self) -> int:
        """Last tokens that no compaction drops."""
        return self.window

    def most(self, length: int) -> int:
        """The budget."""
        if isinstance(self.budget, int):
            return self.budget
        return max(self.floor, length * round(self.budget * 1000) // 1000)

    def capacity(self, spec: CacheSpec) -> int:
        """Budget and interval together; without an interval, budget and all new tokens."""
        most = self.most(spec.max_len)
        return most + self.interval if self.interval else min(most + spec.max_new, spec.max_len)

    def tokens_read(self, spec: CacheSpec, length: int) -> dict[str, int]:
        """Everything that is held."""
        return {"kept": min(length, self.capacity(spec))}

    def target(self, seen: Array) -> Array:
        """Tokens to keep of texts of `seen` tokens, int32 `[B]`."""
        if isinstance(self.budget, int):
            return jnp.full_like(seen, self.budget)
        # In thousandths, so that 29% of 100 is 29 whatever the float says.
        return jnp.maximum(self.floor, seen * round(self.budget * 1000) // 1000)

    def due(self, slots: Slots) -> Array:
        """Which rows and heads hold more than their target, bool `[B, H]`."""
        return slots.length > self.target(slots.seen)[:, None]

    def begin(self, slots: Slots, prompt: Prompt) -> Slots:
        """Adds the arrays that the policy keeps beside each slot to the slots of whole prompts."""
        del prompt
        return slots

    def ingest(self, spec: CacheSpec, prompt: Prompt) -> Slots:
        """The compacted prompt."""
        slots = self.begin(fill(prompt, window=self.window if self.needs_queries else 0), prompt)
        if slots.capacity >= self.least:
            slots = self.compact(slots, jnp.ones(prompt.length.shape, bool))
        return resize(slots, self.capacity(spec), fills=self.fills)

    def score(self, slots: Slots, queries: Array) -> Array:
        """What each slot is worth: the higher, the longer it stays.

        Args:
            slots: what is held.
            queries: the last W queries in time order, `[B, H, G, W, D]`; W is 0 if `needs_queries` is false.

        Returns:
            float32 `[B, H, C]`. Values in the window, among the sinks and in empty slots do not matter; -inf drops a
            token even where the budget would hold it.
        """
        raise TypeError(f"policy {type(self).__name__} has no score method")

    def remember(self, slots: Slots, queries: Array, due: Array) -> Slots:
        """Updates the arrays beside the slots of heads that are `due`, before they are scored."""
        del queries, due
        return slots

    def choose(self, slots: Slots, score: Array, count: Array) -> Array:
        """Indices of the `count` int32 `[B, H]` slots to keep, int32 `[B, H, N]`, C from `count` on."""
        most = min(self.most(2**30), slots.capacity)
        return pallas_kernels.select_top(score, count, most=most, implementation=slots.implementation)

    def compact(self, store: Slots, rows: Array) -> Slots:
        """Keeps sinks, window and the best of the rest."""
        due, queries = self.due(store) & rows[:, None], store.window_queries()
        # Kernels pass over empty slots, so that a head which keeps everything costs nothing.
        scored = self.remember(replace(store, length=jnp.where(due, store.length, 0)), queries, due)
        score = self.score(scored, queries)
        store = replace(scored, length=store.length)
        if score.shape != store.pos.shape:
            raise ValueError(
                f"policy {type(self).__name__}: score has shape {score.shape}; it must be [B, H, C], {store.pos.shape}"
            )
        rank = self.rank(store, score, due)
        kept = jnp.sum(rank > -jnp.inf, axis=-1, dtype=jnp.int32)
        count = jnp.where(due, jnp.minimum(kept, self.target(store.seen)[:, None]), store.length)
        return keep(store, self.choose(store, rank, count), count, fills=self.fills)

    def rank(self, slots: Slots, score: Array, due: Array) -> Array:
        """The score with sinks, window and rows that are not due put first, and empty slots last."""
        held = slots.recent(self.protected) | ((slots.pos >= 0) & (slots.pos < self.sink)) | ~due[..., None]
        score = jnp.nan_to_num(score.astype(jnp.float32), nan=-jnp.inf, neginf=-jnp.inf)
        return jnp.where(slots.filled, jnp.where(held, jnp.inf, score), -jnp.inf)


def try_score(policy: Evict) -> None:
    """Scores a small random prompt, so that a fault in a new policy is found before anything is compiled.

    Raises:
        ValueError: the score is not a float array `[B, H, C]`, or is NaN for a token.
    """
    length = policy.window + policy.sink + 8
    draw = jax.random.normal(jax.random.key(0), (5, 2, 2, length, 16))
    prompt = Prompt(
        q=jnp.stack([draw[0], draw[1]], axis=2),
        k=draw[2],
        v=draw[3],
        k_pre=draw[4],
        tokens=jnp.zeros((2, length), jnp.int32),
        length=jnp.array([length, length - 3], jnp.int32),
    )
    slots = policy.begin(fill(prompt, window=policy.window if policy.needs_queries else 0), prompt)
    queries = slots.window_queries()
    score = policy.score(policy.remember(slots, queries, policy.due(slots)), queries)
    name = type(policy).__name__
    if getattr(score, "shape", None) != slots.pos.shape or not jnp.issubdtype(score.dtype, jnp.floating):
        found = f"{getattr(score, 'dtype', type(score).__name__)} {getattr(score, 'shape', '')}"
        raise ValueError(f"policy {name}: score returned {found}; it must be float [B, H, C], here {slots.pos.shape}")
    if bool(jnp.any(jnp.isnan(score) & slots.filled)):
        raise ValueError(f"policy {name}: score returned NaN for a token; use -inf to drop one")


def require(policy: Policy, holds: bool, name: str, wanted: str) -> None:
    """Raises a ValueError that names the field, its value and what it must be, unless `holds`."""
    if not holds:
        raise ValueError(f"policy {type(policy).__name__}: {name} is {getattr(policy, name)!r}; it must be {wanted}")
