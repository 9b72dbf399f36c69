"""What tells SpeContext which tokens matter, before a step's layers run: three retrieval heads of one form.

A head reads the prompts while the layers do, notices what the layers make of each token, and gives the probabilities by
which the next step's tokens are chosen. What it remembers is the policy's shared state.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import pallas_kernels
from jkv.cache import STATIC, Prompt, Token, fill
from jkv.config import CacheSpec, RopeConfig
from jkv.models import rope
from jkv.models.retrieval_head import HeadConfig, RetrievalHead, extend, join
from jkv.policies.base import Step
from pallas_kernels.dispatch import Implementation


@dataclass(frozen=True)
class Retriever(ABC):
    """A retrieval head in one of the model's layers; static. The defaults remember nothing.

    Attributes:
        layer: the layer, or None before the layers.
        layers: the number of layers.
    """

    layer: int | None = None
    layers: int = 0

    def at(self, layer: int, layers: int) -> "Retriever":
        """The head as a layer meets it; equal for layers that do nothing for it."""
        return replace(self, layer=layer, layers=layers) if layer in self.needs(layers) else self

    @abstractmethod
    def needs(self, layers: int) -> set[int]:
        """The layers that do something for it."""

    def searched(self, layers: int) -> int:
        """The layer that `bytes_read` is counted for."""
        return min(self.needs(layers))

    def bytes_read(self, spec: CacheSpec, length: int) -> int:
        """Bytes that a step of one row reads to choose, in this layer."""
        searches = self.layer is not None and self.layer == self.searched(self.layers)
        return spec.vector_bytes * spec.num_kv_heads * length if searches else 0

    def shared(self, spec: CacheSpec, batch: int) -> Any:
        """What it remembers."""
        del spec, batch
        return ()

    def read_prompt(self, shared: Any, x: Array, prompt: Prompt, brought: Any) -> Any:
        """That after a layer has read the prompts, `x` `[B, T, E]` having entered the layer."""
        del x, prompt, brought
        return shared

    def notice(self, shared: Any, x: Array, token: Token, brought: Any) -> Any:
        """That after a layer has projected a token, `x` `[B, E]` having entered the layer."""
        del x, token, brought
        return shared

    @abstractmethod
    def attend(self, shared: Any, step: Step) -> tuple[Array, Any]:
        """Probabilities of the tokens for each query head, float32 `[B, H, G, C]`, and what it remembers."""


@dataclass(frozen=True)
class FirstLayer(Retriever):
    """The model's own first layer, whose queries and keys depend on nothing but the token."""

    def needs(self, layers: int) -> set[int]:
        """The first one's keys are searched."""
        del layers
        return {0}

    def attend(self, shared: Any, step: Step) -> tuple[Array, Any]:
        """The first layer attends before it runs."""
        heads, store = step.model.layers[0].heads(step.x, step.cos, step.sin), step.stores[0]
        return attention(heads.q, store.k, store.length, heads.k, store.implementation), shared


@dataclass(frozen=True)
class Previous(Retriever):
    """The layer in the middle at the step before: remembers its query, float `[B, H, G, D]`."""

    def needs(self, layers: int) -> set[int]:
        """That layer."""
        return {layers // 2}

    def shared(self, spec: CacheSpec, batch: int) -> Array:
        """No query yet."""
        return jnp.zeros((batch, spec.num_kv_heads, spec.group, spec.head_dim), spec.dtype)

    def read_prompt(self, shared: Array, x: Array, prompt: Prompt, brought: Any) -> Array:
        """The last query of the prompt."""
        del x, brought
        return shared if self.layer is None else fill(prompt, window=1).window[:, :, 0]

    def notice(self, shared: Array, x: Array, token: Token, brought: Any) -> Array:
        """The query of the token."""
        del x, brought
        return shared if self.layer is None else jnp.where(token.active.reshape(-1, 1, 1, 1), token.q, shared)

    def attend(self, shared: Array, step: Step) -> tuple[Array, Array]:
        """The last query meets the keys of its layer."""
        store = step.stores[self.searched(len(step.stores))]
        return attention(shared, store.k, store.length, None, store.implementation), shared


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """What a draft's head remembers.

    Attributes:
        keys: of all tokens, `[B, H, C, D]`.
        feature: of the last token that went through the layers, `[B, E]`; None without features.
        rope: of the keys.
        embedded, features: of the prompts' tokens while they are read, `[B, T, E]`.
    """

    keys: Array
    feature: Array | None
    rope: RopeConfig = field(metadata=STATIC)
    embedded: Array | None = None
    features: Array | None = None


@dataclass(frozen=True)
class Draft(Retriever):
    """Queries and keys of a draft model, whose weights the policy brings.

    A token's key is made from the token and, where the head has features, from what the layers made of the token
    before it. The first token of a text has none, and counts as the most probable one.

    Attributes:
        head: its shape.
    """

    head: HeadConfig = field(kw_only=True)

    def needs(self, layers: int) -> set[int]:
        """Embedded tokens enter the first layer, features enter some."""
        del layers
        return {0, *self.head.feature_layers}

    @property
    def last(self) -> int:
        """The layer from which on a token's feature is whole."""
        return max(self.head.feature_layers, default=0)

    def shared(self, spec: CacheSpec, batch: int) -> DraftState:
        """No keys yet."""
        c = self.head
        return DraftState(
            keys=jnp.zeros((batch, c.num_kv_heads, spec.max_len, c.head_dim), spec.dtype),
            feature=jnp.zeros((batch, c.hidden_size), spec.dtype) if c.uses_features else None,
            rope=extend(c, spec.max_len),
        )

    def read_prompt(self, shared: DraftState, x: Array, prompt: Prompt, brought: Any) -> DraftState:
        """The keys of the prompts, once everything that they are made of is there."""
        if self.layer is None:
            return shared
        head = join(self.head, brought, prompt.implementation)
        if self.layer == 0:
            shared = replace(shared, embedded=head.embed(prompt.tokens, x))
        if (more := self._fuse(head, x)) is not None:
            shared = replace(shared, features=more if shared.features is None else shared.features + more)
        return self._read_keys(shared, head, prompt) if self.layer == self.last else shared

    def notice(self, shared: DraftState, x: Array, token: Token, brought: Any) -> DraftState:
        """Adds to the feature of the token."""
        if self.layer is None or (more := self._fuse(join(self.head, brought), x)) is None:
            return shared
        assert shared.feature is not None
        feature = more if self.layer == min(self.head.feature_layers) else shared.feature + more
        return replace(shared, feature=jnp.where(token.active[:, None], feature, shared.feature))

    def attend(self, shared: DraftState, step: Step) -> tuple[Array, DraftState]:
        """The token's query meets all keys, and its key joins them."""
        head, store = join(self.head, step.brought, step.stores[0].implementation), step.stores[0]
        cos, sin = rope.cos_sin(shared.rope, self.head.head_dim, step.pos)
        q, k = head.heads(head.embed(step.token, step.x), shared.feature, cos, sin)
        probs = attention(q, shared.keys, store.length, k, store.implementation)
        slot = jnp.arange(shared.keys.shape[2], dtype=jnp.int32).reshape(1, 1, 1, -1)
        row = jnp.arange(k.shape[0], dtype=jnp.int32)
        to = jnp.where(step.active, step.pos, shared.keys.shape[2])  # out of bounds, which is dropped
        keys = shared.keys.at[row, :, to].set(k.astype(shared.keys.dtype), mode="drop", unique_indices=True)
        return jnp.where(slot == 0, 1.0, probs), replace(shared, keys=keys)

    def _fuse(self, head: RetrievalHead, x: Array) -> Array | None:
        """What a layer's input adds to the features; None for a layer that adds nothing."""
        parts = [head.fuse(x, first=i) for i, layer in enumerate(self.head.feature_layers) if layer == self.layer]
        return functools.reduce(jnp.add, parts) if parts else None

    def _read_keys(self, shared: DraftState, head: RetrievalHead, prompt: Prompt) -> DraftState:
        assert shared.embedded is not None
        before, feature = None, None
        if shared.features is not None:
            before = jnp.pad(shared.features[:, :-1], ((0, 0), (1, 0), (0, 0)))
            last = jnp.maximum(prompt.length - 1, 0).reshape(-1, 1, 1)
            feature = jnp.take_along_axis(shared.features, last, axis=1)[:, 0].astype(shared.keys.dtype)
        position = jnp.arange(prompt.k.shape[2], dtype=jnp.int32)[None]
        _, k = head.heads(shared.embedded, before, *rope.cos_sin(shared.rope, self.head.head_dim, position))
        k = jnp.moveaxis(k, 1, 2)[:, :, : shared.keys.shape[2]].astype(shared.keys.dtype)
        keys = lax.dynamic_update_slice_in_dim(shared.keys, k, 0, axis=2)
        return DraftState(keys=keys, feature=feature, rope=shared.rope)


def attention(q: Array, k: Array, length: Array, new: Array | None, implementation: Implementation) -> Array:
    """Probabilities of a retrieval head.

    Args:
        q: queries `[B, H, G, D]`.
        k: keys `[B, H, C, D]`.
        length: filled slots, int32 `[B, H]`.
        new: the key of the token being decoded, `[B, H, D]`, which takes its share; None if there is none.
        implementation: what runs it.

    Returns:
        float32 `[B, H, G, C]`, 0 in empty slots.
    """
    scale = q.shape[-1] ** -0.5
    slot = jnp.arange(k.shape[2], dtype=jnp.int32).reshape(1, 1, 1, -1)
    logits = pallas_kernels.page_scores(q, k, implementation=implementation) * scale
    logits = jnp.where(slot < length[..., None, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-1e30)
    own: Array | float = 0.0
    if new is not None:
        logit = jnp.einsum("bhgd,bhd->bhg", q, new, preferred_element_type=jnp.float32)[..., None] * scale
        top = jnp.maximum(top, logit)
        own = jnp.exp(logit - top)
    weights = jnp.exp(logits - top)
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True) + own, 1e-30)
