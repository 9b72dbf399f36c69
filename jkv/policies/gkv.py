"""G-KV: attention scores that remember earlier compactions."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

import pallas_kernels
from jkv.cache import Prompt, Slots, max_pool
from jkv.policies.base import Evict, require
from jkv.policies.h2o import attention_mass
from jkv.policies.registry import preset, register


@register("gkv")
@dataclass(frozen=True, kw_only=True)
class GKV(Evict):
    """Keeps what any window so far attended to, with decay, less what repeats itself.

    history = max(alpha * history, local / max(local));  score = lam * pool(history) - (1 - lam) * redundancy.

    Exact: scores, history and kept positions, as in the G-KV code with its score cache on, for every smoothing.
    Differs: padding never counts towards the budget, where that code counts it and drops it first; with a budget that
    is a share, the share is of a row's own tokens, where that code counts padding.

    Attributes:
        alpha: decay of the history at each compaction, 0 to 1.
        smooth: how history and local score are joined: "max", "mean" (alpha and 1 - alpha) or "sum".
        lam: weight of attention against redundancy, 0 to 1; 1 switches redundancy off.
        pool: width of the max-pooling over slots, odd; 1 is off.
        threshold: cosine above which two keys count as alike.
        normalize: divide attention and redundancy by their largest value in the head.
        shift: weight of the deviation inside the window, added to the local score (CAKE, which uses 200).
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2512.00504"
    fills: ClassVar[dict[str, float]] = {"history": -1.0}

    alpha: float = 0.8
    smooth: Literal["max", "mean", "sum"] = "max"
    lam: float = 0.5
    pool: int = 1
    threshold: float = 0.5
    normalize: bool = True
    shift: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        require(self, self.window >= 1, "window", "at least 1 token, whose query scores the rest")
        require(self, 0 <= self.alpha <= 1, "alpha", "between 0 and 1")
        require(self, 0 <= self.lam <= 1, "lam", "between 0 and 1")
        require(self, self.pool >= 1 and self.pool % 2 == 1, "pool", "an odd number of slots; 1 is off")
        require(self, -1 <= self.threshold <= 1, "threshold", "a cosine, between -1 and 1")
        require(self, 0 <= self.shift < math.inf, "shift", "a finite number, 0 or more")
        require(self, not self.shift or self.window > 1, "window", "at least 2 tokens, for shift needs a deviation")

    def begin(self, slots: Slots, prompt: Prompt) -> Slots:
        """No history; but an undecayed sum begins with all attention inside the prompt, as in the G-KV code."""
        history = jnp.full(slots.pos.shape, -1.0, jnp.float32)
        if self.smooth == "sum" and self.alpha == 1:
            history = jnp.where(slots.filled, attention_mass(prompt), history)
        return replace(slots, extra={"history": history})

    def remember(self, slots: Slots, queries: Array, due: Array) -> Slots:
        """Joins the window's scores into the history; window tokens get theirs at a later compaction."""
        local = pallas_kernels.window_scores(
            queries, slots.k, slots.length, shift=self.shift, implementation=slots.implementation
        )
        local = _normalize(local) if self.normalize else local
        before = slots.extra["history"]
        joined = {
            "max": jnp.maximum(self.alpha * before, local),
            "mean": self.alpha * before + (1 - self.alpha) * local,
            "sum": self.alpha * before + local,
        }[self.smooth]
        history = jnp.where(before < 0, local, joined)
        history = jnp.where(slots.recent(self.window) | ~slots.filled, -1.0, history)
        return replace(slots, extra={"history": jnp.where(due[..., None], history, before)})

    def score(self, slots: Slots, queries: Array) -> Array:
        """History against redundancy."""
        del queries
        history = max_pool(jnp.maximum(slots.extra["history"], 0.0), self.pool)
        if self.lam == 1:
            return history
        redundancy = pallas_kernels.key_redundancy(
            slots.k, slots.length, threshold=self.threshold, implementation=slots.implementation
        )
        if self.normalize:
            redundancy = _normalize(jnp.where(slots.recent(self.window), 0.0, redundancy))
        return self.lam * history - (1 - self.lam) * redundancy


def _normalize(score: Array) -> Array:
    """Divides by the largest value of each head, which a head without any score keeps at 0."""
    top = jnp.max(score, axis=-1, keepdims=True)
    return score / jnp.where(top > 0, top, 1.0)


preset("h2o@gkv", GKV(window=1, smooth="sum", lam=1.0), "as the G-KV paper's baseline: a decayed sum, once an interval")
