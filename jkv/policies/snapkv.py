"""SnapKV: what the last queries look at, pooled over neighbours."""

from dataclasses import dataclass
from typing import ClassVar

from jax import Array

import pallas_kernels
from jkv.cache import Slots, max_pool
from jkv.policies.base import Evict, require
from jkv.policies.registry import preset, register


@register("snapkv")
@dataclass(frozen=True, kw_only=True)
class SnapKV(Evict):
    """Keeps what the observation window attends to, max-pooled so that clusters stay whole.

    Exact: scores and kept positions, as in the G-KV code (`snapkv@gkv` has its window and pooling).
    Differs: one choice per kv head, by the largest of its query heads, where the paper repeats the cache per query
    head; compacts while decoding too (`interval=0` compacts the prompt alone, as the paper does).

    Attributes:
        pool: width of the max-pooling over slots, odd; 1 is off.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"

    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        require(self, self.window >= 1, "window", "at least 1 token, whose query scores the rest")
        require(self, self.pool >= 1 and self.pool % 2 == 1, "pool", "an odd number of slots; 1 is off")

    def score(self, slots: Slots, queries: Array) -> Array:
        """Pooled mean attention of the window."""
        return max_pool(
            pallas_kernels.window_scores(queries, slots.k, slots.length, implementation=slots.implementation), self.pool
        )


preset("snapkv@gkv", SnapKV(window=16, pool=5), "as the G-KV paper's baseline")
