"""ShadowKV: keys of low rank, read by the chunk."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

import pallas_kernels
from jkv.cache import LowRank, Prompt, Token, View, fill, keep, put, resize, settled
from jkv.config import CacheSpec
from jkv.models import rope
from jkv.policies.base import Policy, require
from jkv.policies.registry import preset, register
from jkv.shadow import Shadow, cosine, factor, find, fold, mean_keys, pad_prompt
from pallas_kernels import Attended, Pages

LANDMARK_SCALE = 128**-0.5  # whatever the head dim: it decides between query heads that agree on nothing else


@register("shadowkv")
@dataclass(frozen=True, kw_only=True)
class ShadowKV(Policy):
    """Keeps values and, in place of most keys, a product of low rank from which those to read are made again.

    Each step reads the chunks whose mean keys fit the query best, beside the chunks with outliers, the end of the
    prompt and all that was decoded since.

    Exact: chunks, landmarks, outliers, choice and output as in ShadowKV's accuracy class, and the first choice and
    keys of its efficient class with `variant=efficient`.
    Differs: every decoded token stays readable, where ShadowKV's efficient class drops those that its buffer has no
    place for; short prompts are read whole, where that code refuses them; the factors come from the eigenvectors of
    the keys' Gram matrix, whose product is the same; values stay on the device. With an interval, which that code
    does not have, decoded tokens become chunks as they age, by the prompt's factors, so that a step does not grow
    with the answer.

    Attributes:
        budget: tokens of the chunks chosen in a step; what is read at every step comes on top, as in ShadowKV.
        rank: of the keys of all kv heads side by side.
        chunk: tokens of a chunk.
        outliers: chunks per kv head that are kept exactly, as their keys differ most from the mean.
        local: whole chunks at the end of the prompt that are kept exactly.
        variant: "accuracy": all keys of chosen chunks are made; "efficient": the chunks that the last query of the
            prompt chooses keep their exact keys for as long as they stay chosen, and the prompt has a multiple of 8
            chunks. ShadowKV has both, by these names.
        interval: decoded tokens after which those that have left the last `local` chunks become chunks; 0 is never.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.21465"

    budget: int = 2048
    rank: int = 160
    chunk: int = 8
    outliers: int = 48
    local: int = 4
    variant: Literal["accuracy", "efficient"] = "accuracy"

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        whole = 1 <= self.chunk <= 64 and self.chunk & (self.chunk - 1) == 0
        require(self, whole, "chunk", "a power of two from 1 to 64 tokens")
        divides = self.budget >= self.chunk and self.budget % self.chunk == 0
        require(self, divides, "budget", f"a multiple of the chunk of {self.chunk} tokens")
        require(self, self.rank >= 1, "rank", "at least 1")
        require(self, self.outliers >= 0, "outliers", "0 or more chunks")
        require(self, self.local >= 1, "local", "at least 1 chunk")

    @property
    def tail(self) -> int:
        """Most tokens of a prompt after its chunks."""
        return (self.local + self.aligned) * self.chunk - 1

    @property
    def aligned(self) -> int:
        """What the number of a prompt's chunks is a multiple of."""
        return 8 if self.variant == "efficient" else 1

    def capacity(self, spec: CacheSpec) -> int:
        """Tokens that have a key of their own."""
        most = self.outliers * self.chunk + self.tail + (self.interval or spec.max_new)
        return most + (self.budget if self.variant == "efficient" else 0)

    def longest(self, spec: CacheSpec) -> int:
        """Tokens that chunks may hold (T)."""
        longest = spec.max_len if self.interval else spec.max_prompt
        return -(-longest // self.chunk) * self.chunk

    def tokens_read(self, spec: CacheSpec, length: int) -> dict[str, int]:
        """Chunks that are chosen, and those that are read at every step."""
        decoded = min(self.interval or spec.max_new, length)
        local = min(self.tail, length - decoded)
        outliers = min(self.outliers * self.chunk, length - decoded - local)
        selected = min(self.budget, length - decoded - local - outliers)
        return {"selected": selected, "outliers": outliers, "local": local, "decoded": decoded}

    def bytes_read(self, spec: CacheSpec, length: int) -> int:
        """Keys, values, the rows that keys are made from, and the landmarks."""
        read, itemsize = self.tokens_read(spec, length), spec.vector_bytes // spec.head_dim
        selected = read.pop("selected")
        rank = min(self.rank, spec.num_kv_heads * spec.head_dim)
        made = selected * (rank + spec.head_dim) + rank * spec.head_dim
        landmarks = (length // self.chunk) * spec.head_dim
        exact = 2 * spec.head_dim * sum(read.values())
        return itemsize * spec.num_kv_heads * (made + landmarks + exact)

    def shared(self, spec: CacheSpec, batch: int) -> tuple[Array, Array]:
        """Rotation of every position that a chunk may have, float32 `[T, D/2]` each."""
        del batch
        return rope.cos_sin(spec.rope, spec.head_dim, jnp.arange(self.longest(spec), dtype=jnp.int32))

    def plan(self, shared: tuple[Array, Array], step: object) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """All layers need the rotations."""
        del step
        return shared, shared

    def ingest(self, spec: CacheSpec, prompt: Prompt) -> Shadow:
        """Splits the prompt into chunks and what is kept exactly."""
        prompt = pad_prompt(prompt, self.longest(spec))
        batch, heads, length, _ = prompt.k.shape
        chunks = jnp.maximum(prompt.length // self.chunk - self.local, 0) // self.aligned * self.aligned
        keys = prompt.k.reshape(batch, heads, -1, self.chunk, prompt.k.shape[-1])
        landmarks = mean_keys(keys)
        inside = jnp.arange(length // self.chunk, dtype=jnp.int32)[None] < chunks[:, None]  # [B, N]
        outlier = self._find_outliers(keys, landmarks, inside, prompt)
        token = jnp.arange(length, dtype=jnp.int32).reshape(1, 1, -1)
        after = (token >= self.chunk * chunks.reshape(-1, 1, 1)) & (token < prompt.length.reshape(-1, 1, 1))
        exact = jnp.repeat(outlier, self.chunk, axis=-1) | after
        count = jnp.sum(exact, axis=-1, dtype=jnp.int32)
        index = pallas_kernels.select_top(
            jnp.where(exact, 0.0, -jnp.inf),
            count,
            most=min(self.outliers * self.chunk + self.tail, length),
            implementation=prompt.implementation,
        )
        a, b = factor(prompt, self.rank)
        store = Shadow(
            exact=resize(keep(fill(prompt), index, count, fills={}), self.capacity(spec)),
            a=a,
            b=b,
            v=prompt.v,
            landmarks=landmarks,
            candidate=inside[:, None] & ~outlier,
            chunks=chunks,
            fresh=jnp.zeros((batch, heads, 0), jnp.int32),
            rope=spec.rope,
        )
        return self._keep_first(store, prompt) if self.variant == "efficient" else store

    def _find_outliers(self, keys: Array, landmarks: Array, inside: Array, prompt: Prompt) -> Array:
        """Chunks that hold a key far from their mean, bool `[B, H, N]`, of those `inside` `[B, N]`."""
        batch, heads, chunks = keys.shape[:3]
        likeness = jnp.where(inside[:, None], jnp.min(cosine(keys, landmarks[:, :, :, None]), axis=-1), jnp.inf)
        most = min(self.outliers, chunks)
        count = jnp.minimum(most, jnp.sum(inside, axis=-1, dtype=jnp.int32))
        index = pallas_kernels.select_top(
            -likeness,
            jnp.broadcast_to(count[:, None], (batch, heads)),
            most=most,
            implementation=prompt.implementation,
        )
        row, head = (jnp.arange(size, dtype=jnp.int32) for size in (batch, heads))
        none = jnp.zeros((batch, heads, chunks), bool)
        return none.at[row.reshape(-1, 1, 1), head.reshape(1, -1, 1), index].set(True, mode="drop")

    def append(self, store: Shadow, token: Token) -> Shadow:
        """The token is kept exactly."""
        return replace(store, exact=put(store.exact, token))

    def select(self, store: Shadow, q: Array, plan: tuple[Array, Array]) -> View:
        """What is kept exactly, and the chunks that fit best."""
        chosen, view, none = self.choose_chunks(store, q), store.exact.view(), store.landmarks.shape[2]
        if count := store.fresh.shape[2]:
            place = jnp.arange(count, dtype=jnp.int32).reshape(1, 1, -1)
            page = jnp.where(find(store.fresh, chosen, none), place, store.exact.capacity)
            start = jnp.full((*chosen.shape[:2], 1), store.begin, jnp.int32)
            view = replace(view, pages=Pages(page[:, :, None], start, self.chunk))
            chosen = jnp.where(find(chosen, store.fresh, none), none, chosen)
        beside = LowRank(store.a, store.b, store.v, chosen, *plan, size=self.chunk)
        return replace(view, beside=beside)

    def choose_chunks(self, store: Shadow, q: Array) -> Array:
        """The chunks with the largest share of a query head's softmax over landmarks, int32 `[B, H, K]`; N is none."""
        implementation = store.exact.implementation
        score = pallas_kernels.page_scores(q, store.landmarks, implementation=implementation) * LANDMARK_SCALE
        candidate = store.candidate[:, :, None]
        score = jnp.where(candidate, score, -jnp.inf)
        weights = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True, initial=-1e30))
        share = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
        most = min(self.budget // self.chunk, share.shape[-1])
        count = jnp.minimum(most, jnp.sum(store.candidate, axis=-1, dtype=jnp.int32))
        best = jnp.where(store.candidate, jnp.max(share, axis=2), -jnp.inf)
        return pallas_kernels.select_top(best, count, most=most, implementation=implementation)

    def settle(self, store: Shadow, attended: Attended) -> Shadow:
        """The token is now in its slot."""
        return replace(store, exact=settled(store.exact, attended.k, attended.v, attended.notes))

    def observe(self, store: Shadow, token: Token, probs: Array | None) -> Shadow:
        """A chunk that was not chosen loses its exact keys."""
        del probs
        if not store.fresh.shape[2]:
            return store
        none = store.landmarks.shape[2]
        stays = find(store.fresh, self.choose_chunks(store, token.q), none) | ~token.active.reshape(-1, 1, 1)
        return replace(store, fresh=jnp.where(stays, store.fresh, none))

    def compact(self, store: Shadow, rows: Array) -> Shadow:
        """Makes chunks of the decoded tokens that have left the last `local` chunks."""
        return fold(store, rows, size=self.chunk, local=self.local, most=-(-self.interval // self.chunk))

    def positions(self, store: Shadow) -> Array:
        """The exact ones, then those of the chunks."""
        token = jnp.arange(store.v.shape[2], dtype=jnp.int32).reshape(1, 1, -1)
        held = jnp.where(jnp.repeat(store.candidate, self.chunk, axis=-1), token, -1)
        return jnp.concatenate([store.exact.pos[:, :, store.begin :], held], axis=-1)

    def kv(self, store: Shadow) -> tuple[Array, ...]:
        """Exact keys and values, factors and values."""
        return store.exact.k, store.exact.v, store.a, store.b, store.v

    def _keep_first(self, store: Shadow, prompt: Prompt) -> Shadow:
        """The exact keys of the chunks that the prompt's last query chooses go before the other exact tokens."""
        chosen = self.choose_chunks(store, fill(prompt, window=1).window[:, :, 0])
        none, room = store.landmarks.shape[2], self.budget // self.chunk
        chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, room - chosen.shape[2])), constant_values=none)
        token = chosen[..., None] * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32).reshape(1, 1, 1, -1)
        token = token.reshape(*chosen.shape[:2], -1)
        at = jnp.minimum(token, prompt.k.shape[2] - 1)[..., None]
        exact, rest = store.exact, store.exact.capacity - self.budget

        def join(first: Array, x: Array) -> Array:
            return jnp.concatenate([first.astype(x.dtype), x[:, :, :rest]], axis=2)

        exact = replace(
            exact,
            k=join(jnp.take_along_axis(prompt.k, at, axis=2), exact.k),
            v=join(jnp.take_along_axis(prompt.v, at, axis=2), exact.v),
            pos=join(jnp.where(token < prompt.k.shape[2], token, -1), exact.pos),
            length=exact.length + self.budget,
        )
        return replace(store, exact=exact, fresh=chosen)


preset("shadowkv@efficient", ShadowKV(variant="efficient"), "as ShadowKV's efficient class: first keys are exact")
preset("shadowkv@fold", ShadowKV(interval=128), "decoded tokens become chunks as they age, for long answers")
