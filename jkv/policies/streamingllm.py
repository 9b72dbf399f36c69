"""StreamingLLM: attention sinks and a sliding window."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.cache import Slots
from jkv.policies.base import Evict
from jkv.policies.registry import register


@register("streamingllm")
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Evict):
    """Keeps the first `sink` tokens and the most recent rest of the budget.

    Exact: kept positions, as in the R-KV and G-KV codes.
    Differs: keys keep their text positions, where the paper renumbers them inside the cache; compacts every
    `interval` tokens, where the paper drops one token a step (`interval=1` does).

    Attributes:
        budget: tokens kept per kv head, sinks included; or a share of the tokens seen.
        sink: first tokens of the text always kept.
        window: last tokens always kept; the budget already keeps the last `budget - sink`.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    needs_queries: ClassVar[bool] = False

    sink: int = 4
    window: int = 0

    def score(self, slots: Slots, queries: Array) -> Array:
        """The later, the better."""
        del queries
        return slots.pos.astype(jnp.float32)
