"""What an eviction policy could know at best: the attention of the tokens to come. A diagnostic, not for use."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jkv.cache import Prompt, Slots, Token, fill, resize
from jkv.config import CacheSpec
from jkv.policies.base import Evict
from jkv.policies.full import Full


@dataclass(frozen=True, kw_only=True)
class Witness(Full):
    """Full attention that adds up, in `extra["mass"]`, what each token receives from the tokens that are fed."""

    needs_probs: ClassVar[bool] = True

    def ingest(self, spec: CacheSpec, prompt: Prompt) -> Slots:
        """The prompt, to which nobody has attended yet."""
        slots = super().ingest(spec, prompt)
        return replace(slots, extra={"mass": jnp.zeros(slots.pos.shape, jnp.float32)})

    def observe(self, store: Slots, token: Token, probs: Array | None) -> Slots:
        """Adds this token's attention, of all query heads of a group."""
        assert probs is not None
        more = jnp.where(token.active[:, None, None], jnp.sum(probs, axis=2), 0.0)
        return replace(store, extra={"mass": store.extra["mass"] + more})


@dataclass(frozen=True, kw_only=True)
class Oracle(Evict):
    """Keeps the tokens that the next `interval` tokens attend to most under full attention, in each kv head.

    It sees one interval ahead, and only attention: a bound for policies that rank tokens by what will be attended to,
    not for every set of tokens. The prompt is cut when `foresee` and `compact` are first called, not as it is stored.
    """

    needs_queries: ClassVar[bool] = False

    window: int = 0

    def capacity(self, spec: CacheSpec) -> int:
        """Budget and interval, and at first the whole prompt."""
        return max(super().capacity(spec), spec.max_prompt + 1)

    def ingest(self, spec: CacheSpec, prompt: Prompt) -> Slots:
        """The whole prompt."""
        slots = fill(prompt)
        slots = replace(slots, extra={"future": jnp.zeros(slots.pos.shape, jnp.float32)})
        return resize(slots, self.capacity(spec))

    def score(self, slots: Slots, queries: Array) -> Array:
        """The attention to come."""
        del queries
        return slots.extra["future"]


@jax.jit
def foresee(store: Slots, mass: Array) -> Slots:
    """The store of an `Oracle` that knows the attention that each position will receive, float32 `[B, H, T]`."""
    future = jnp.take_along_axis(mass, jnp.maximum(store.pos, 0), axis=2)
    return replace(store, extra={"future": jnp.where(store.filled, future, 0.0)})
