"""SpeContext's retrieval head: what an EAGLE-3 draft attends to tells what its target should read.

The draft (https://arxiv.org/abs/2503.01840) is one decoder layer. Its queries and keys are made of two halves side by
side, the embedded token and the features of the token before it: hidden states of some of the target's layers, fused by
one projection. Only the queries and keys are held here (https://arxiv.org/abs/2512.00722).
"""

import functools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jkv.config import RopeConfig
from jkv.models import rope
from jkv.models.decoder import Linear, RMSNorm
from pallas_kernels.dispatch import XLA, Implementation


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shape of a retrieval head.

    Attributes:
        hidden_size: width of an embedded token, and of one of the target's hidden states.
        num_heads, num_kv_heads, head_dim: those of the target, whose head i reads what head i here chooses.
        rope: of the draft as it was trained; `extend` gives that of a longer text.
        max_position: longest text in tokens that `rope` reaches.
        feature_layers: the target's layers whose inputs are fused, in the order of the fusion; empty for a head
            without features.
        vocab_size: rows of the head's own embedding; 0 where it has none and uses the target's.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position: int = 2048
    feature_layers: tuple[int, ...] = ()
    vocab_size: int = 0

    @property
    def group(self) -> int:
        """Query heads that share one kv head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def fused(self) -> int:
        """Hidden states of the target that make one feature; 0 without features."""
        return len(self.feature_layers)

    @property
    def uses_features(self) -> bool:
        """Whether the head holds the weights of the feature half."""
        return self.fused > 0


class RetrievalHead(nnx.Module):
    """Queries and keys of a draft; tokens `...` are B (decode) or B, T (prefill).

    Weights are stored `[out, in]`. A head without features holds half of the projections, and no fusion. Like a new
    `Decoder`, a new head has shapes for parameters.
    """

    def __init__(self, config: HeadConfig, *, dtype: str = "float32", implementation: Implementation = XLA):
        c, kind, self.config = config, jnp.dtype(dtype), config
        norm = functools.partial(RMSNorm, eps=c.norm_eps, dtype=kind, implementation=implementation)
        self.embedding = nnx.Param(jax.ShapeDtypeStruct((c.vocab_size, c.hidden_size), kind)) if c.vocab_size else None
        self.embedding_norm = norm(c.hidden_size)
        self.feature_norm = norm(c.hidden_size) if c.uses_features else None
        self.fc = Linear(c.fused * c.hidden_size, c.hidden_size, bias=False, dtype=kind) if c.uses_features else None
        width = 2 * c.hidden_size if c.uses_features else c.hidden_size
        self.qk = Linear(width, (c.num_heads + c.num_kv_heads) * c.head_dim, bias=False, dtype=kind)

    def embed(self, tokens: Array, embedded: Array) -> Array:
        """The head's own embedding of int32 tokens `[...]`, or else the target's, `embedded` `[..., E]`."""
        return embedded if self.embedding is None else self.embedding[...][tokens]

    def fuse(self, hidden: Array, *, first: int = 0) -> Array:
        """Makes features of the target's hidden states, or what some of the states add to them.

        Args:
            hidden: what entered the target's `feature_layers`, side by side, `[..., fused * E]`; or some of them.
            first: number of the first of them.

        Returns:
            `[..., E]`.

        Raises:
            ValueError: the head has no features.
        """
        if self.fc is None:
            raise ValueError("a retrieval head without features fuses none; make it with features")
        begin = first * self.config.hidden_size
        return jnp.einsum("...i,oi->...o", hidden, self.fc.kernel[...][:, begin : begin + hidden.shape[-1]])

    def heads(self, embedded: Array, features: Array | None, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Makes the queries and keys of tokens.

        Args:
            embedded: the tokens, `[..., E]`.
            features: `fuse` of each token's predecessor, `[..., E]`; zeros for the first token of a text. None stands
                for zeros everywhere, and costs half the product.
            cos, sin: float32 `[..., D/2]` of each token's position, by the rotation that `extend` gives.

        Returns:
            Queries `[..., H, G, D]` and keys `[..., H, D]` after RoPE.

        Raises:
            ValueError: features for a head without them.
        """
        c, x = self.config, self.embedding_norm(embedded)
        if features is not None:
            if self.feature_norm is None:
                raise ValueError("a retrieval head without features was given some; pass None")
            x = jnp.concatenate([x, self.feature_norm(features)], axis=-1)
        qk = jnp.einsum("...i,oi->...o", x, self.qk.kernel[...][:, : x.shape[-1]])
        qk = rope.rotate(qk.reshape(*x.shape[:-1], -1, c.head_dim), cos[..., None, :], sin[..., None, :])
        q, k = jnp.split(qk, [c.num_heads], axis=-2)
        return q.reshape(*k.shape[:-1], c.group, c.head_dim), k


def extend(config: HeadConfig, max_len: int) -> RopeConfig:
    """Rotary embedding for texts of up to `max_len` tokens, without training: YaRN beyond what the draft reaches.

    Raises:
        ValueError: the draft does not reach so far, and its own rotation is scaled already.
    """
    if max_len <= config.max_position:
        return config.rope
    if config.rope.type != "default":
        raise ValueError(
            f"the draft reaches {config.max_position} tokens by rope_type {config.rope.type!r}, which is not extended "
            f"to {max_len}; allow fewer tokens, or take a draft of rope_type 'default'"
        )
    return RopeConfig(
        type="yarn",
        theta=config.rope.theta,
        factor=float(math.ceil(max_len / config.max_position)),
        original_max_position=config.max_position,
    )


def join(config: HeadConfig, weights: nnx.State, implementation: Implementation = XLA) -> RetrievalHead:
    """The head of these sizes and parameters, as `jkv.models.decoder.join` joins a decoder."""
    return nnx.merge(_graph(config, implementation), weights)


@functools.lru_cache
def _graph(config: HeadConfig, implementation: Implementation) -> nnx.GraphDef[RetrievalHead]:
    return nnx.split(RetrievalHead(config, implementation=implementation))[0]
