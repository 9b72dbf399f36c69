"""R-KV: attention of the last queries, less what repeats itself."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jax import Array

import pallas_kernels
from jkv.cache import Slots, max_pool
from jkv.policies.base import Evict, require
from jkv.policies.registry import preset, register


@register("rkv")
@dataclass(frozen=True, kw_only=True)
class RKV(Evict):
    """Keeps what the observation window attends to and what other keys do not repeat.

    score = lam * pool(attention) - (1 - lam) * redundancy.

    Exact: scores and kept positions of one compaction, as in the R-KV code; `rkv@gkv` as in the G-KV code's own R-KV.
    Differs from the R-KV code: slots stay in the order of the text, where that code leaves them in the order of their
    scores, so that its next pooling and its "most recent similar key" mean something else; redundancy is computed for
    every row, where that code uses row 0 for all; a key without a similar one spares none, where that code spares
    slot 0 (`retain=last` does so too); compaction falls every `interval` new tokens, where that code counts from the
    beginning of the text and goes on counting over the next prompt; a cache of just `budget` tokens is left alone.

    Attributes:
        lam: weight of attention against redundancy, 0 to 1; 1 switches redundancy off.
        pool: width of the max-pooling over slots, odd; 1 is off.
        threshold: cosine above which two keys count as alike.
        retain: which similar key is spared for each key: "recent", or as the R-KV code does, "last" and "first".
        reduce: how the query heads of a group are joined: "logits" takes the largest raw logit, "probs" the largest
            probability.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2505.24133"

    window: int = 8
    lam: float = 0.1
    pool: int = 7
    threshold: float = 0.5
    retain: Literal["recent", "last", "first"] = "recent"
    reduce: Literal["logits", "probs"] = "logits"

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        require(self, self.window >= 1, "window", "at least 1 token, whose query scores the rest")
        require(self, 0 <= self.lam <= 1, "lam", "between 0 and 1")
        require(self, self.pool >= 1 and self.pool % 2 == 1, "pool", "an odd number of slots; 1 is off")
        require(self, -1 <= self.threshold <= 1, "threshold", "a cosine, between -1 and 1")

    def score(self, slots: Slots, queries: Array) -> Array:
        """Attention against redundancy."""
        attention = pallas_kernels.window_scores(
            queries, slots.k, slots.length, reduce=self.reduce, implementation=slots.implementation
        )
        attention = max_pool(attention, self.pool)
        if self.lam == 1:
            return attention
        redundancy = pallas_kernels.key_redundancy(
            slots.k, slots.length, threshold=self.threshold, retain=self.retain, implementation=slots.implementation
        )
        return self.lam * attention - (1 - self.lam) * redundancy


preset("rkv@gkv", RKV(window=16, pool=5, reduce="probs"), "as the G-KV paper's baseline")
