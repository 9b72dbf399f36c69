"""H2O: the tokens that have received the most attention so far."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from jkv.cache import Prompt, Slots, Token
from jkv.policies.base import Evict
from jkv.policies.registry import register

CHUNK = 256


@register("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(Evict):
    """Keeps the heavy hitters, tokens with the largest sum of attention, beside the recent ones.

    Exact: the sum runs over every query, prompt and decoded alike, and moves with its token.
    Differs: one choice per kv head, by the largest probability among its query heads, where the paper has one cache
    per query head; compacts every `interval` tokens, where the paper drops one token a step (`interval=1` does).

    Attributes:
        window: last tokens always kept; 0 is half of the budget, as in the paper.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    needs_probs: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = False

    window: int = 0

    @property
    def protected(self) -> int:
        """The recent half of the budget, unless `window` says otherwise."""
        return self.window or self.least // 2

    def begin(self, slots: Slots, prompt: Prompt) -> Slots:
        """The attention that each prompt token received inside the prompt."""
        return replace(slots, extra={"mass": attention_mass(prompt)})

    def observe(self, store: Slots, token: Token, probs: Array | None) -> Slots:
        """Adds this step's attention."""
        assert probs is not None
        more = jnp.where(token.active[:, None, None], jnp.max(probs, axis=2), 0.0)
        return replace(store, extra={"mass": store.extra["mass"] + more})

    def score(self, slots: Slots, queries: Array) -> Array:
        """The sum of attention."""
        del queries
        return slots.extra["mass"]


def attention_mass(prompt: Prompt) -> Array:
    """Attention that each token of a prompt receives from all of it: the largest of the group's heads, summed.

    Returns:
        float32 `[B, H, T]`, 0 in the padding.
    """
    length = prompt.k.shape[2]
    chunk = min(CHUNK, length)
    padded = -(-length // chunk) * chunk
    q = jnp.pad(prompt.q, ((0, 0), (0, 0), (0, 0), (0, padded - length), (0, 0)))
    column = jnp.arange(length, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)

    def add(i: Array, mass: Array) -> Array:
        rows = (i * chunk + jnp.arange(chunk, dtype=jnp.int32)).reshape(1, 1, 1, -1, 1)
        part = lax.dynamic_slice_in_dim(q, i * chunk, chunk, axis=3)
        logits = jnp.einsum("bhgtd,bhcd->bhgtc", part, prompt.k, preferred_element_type=jnp.float32)
        logits = jnp.where(column <= rows, logits * q.shape[-1] ** -0.5, -jnp.inf)
        probs = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        probs = jnp.max(probs / jnp.sum(probs, axis=-1, keepdims=True), axis=2)
        real = rows[:, :, 0] < prompt.length.reshape(-1, 1, 1, 1)
        return mass + jnp.sum(jnp.where(real, probs, 0.0), axis=2)

    return lax.fori_loop(0, padded // chunk, add, jnp.zeros(prompt.k.shape[:3], jnp.float32))
