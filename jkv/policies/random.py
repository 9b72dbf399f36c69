"""Random tokens: what any policy that is worth its while must beat."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.cache import Slots
from jkv.policies.base import Evict
from jkv.policies.registry import register


@register("random")
@dataclass(frozen=True, kw_only=True)
class Random(Evict):
    """Keeps tokens drawn at random, for each kv head its own, the same in all layers.

    Exact: every set of tokens before the window is as likely as another, and what was drawn once stays drawn: what is
    kept later is a part of what was kept before and of what came since.
    Differs: the draw depends on position, kv head and `seed` alone, so that a run can be repeated.

    Attributes:
        window: last tokens always kept.
        seed: of the draw.
    """

    paper: ClassVar[str] = ""
    needs_queries: ClassVar[bool] = False

    seed: int = 0

    def score(self, slots: Slots, queries: Array) -> Array:
        """Hashed positions."""
        del queries
        head = jnp.arange(slots.pos.shape[1], dtype=jnp.uint32).reshape(1, -1, 1)
        mixed = _mix(_mix(slots.pos.astype(jnp.uint32)) ^ _mix(head + jnp.uint32(2**16 * self.seed + 1)))
        return (mixed >> 8).astype(jnp.float32)


def _mix(x: Array) -> Array:
    """Scatters the bits of uint32 numbers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x
