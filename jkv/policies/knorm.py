"""Key norms: a yardstick that looks at keys alone."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from jkv.cache import Slots
from jkv.policies.base import Evict
from jkv.policies.registry import register


@register("knorm")
@dataclass(frozen=True, kw_only=True)
class KNorm(Evict):
    """Keeps the keys of the smallest norm, which tend to be those that much attention goes to.

    Exact: the norm of a key, to three digits, one choice per kv head.
    Differs: compacts once an interval while decoding, and can keep recent tokens (`window`), which the paper does not;
    the paper leaves some first layers whole.

    Attributes:
        window: last tokens always kept.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"
    needs_queries: ClassVar[bool] = False

    def score(self, slots: Slots, queries: Array) -> Array:
        """The smaller the norm, the better; of equal ones the first.

        Rotation leaves norms as they are, so that in the first layer all keys of a token have the same, but for
        rounding, which must not decide.
        """
        del queries
        return -lax.reduce_precision(jnp.linalg.norm(slots.k.astype(jnp.float32), axis=-1), 8, 10)
