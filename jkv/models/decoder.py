"""One Flax NNX decoder for Llama, Qwen2 and Qwen3: the three differ by biases and by a norm on queries and keys.

The module holds weights and the arithmetic of a layer before and after attention. What attention may read is the
policy's business: the engine calls `Layer.heads`, lets the policy and attention do their part, then `Layer.finish`.
Query, key and value projections are one weight, so are gate and up: one matrix product each, at prefill and decode.
Weights are stored `[out, in]`, as checkpoints have them; on CPU that is also the quickest layout at every batch size.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jkv.config import ModelConfig
from jkv.models import rope
from pallas_kernels import rms_norm
from pallas_kernels.dispatch import XLA, Implementation


class Heads(NamedTuple):
    """Projections of one layer for tokens `...` = B (decode) or B, T (prefill).

    Attributes:
        q: queries after norm and RoPE, `[..., H, G, D]`.
        k: keys after norm and RoPE, `[..., H, D]`.
        v: values, `[..., H, D]`.
        k_pre: keys after norm, before RoPE, `[..., H, D]`.
    """

    q: Array
    k: Array
    v: Array
    k_pre: Array


class Linear(nnx.Module):
    """``x @ kernel.T + bias`` with `kernel` `[out, in]`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: jnp.dtype):
        self.kernel = nnx.Param(jax.ShapeDtypeStruct((outputs, inputs), dtype))
        self.bias = nnx.Param(jax.ShapeDtypeStruct((outputs,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = jnp.einsum("...i,oi->...o", x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype, implementation: Implementation):
        self.scale = nnx.Param(jax.ShapeDtypeStruct((size,), dtype))
        self.eps, self.implementation = eps, implementation

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], eps=self.eps, implementation=self.implementation)


class Layer(nnx.Module):
    """One decoder layer, without the attention itself."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation):
        c, self.config = config, config
        norm = functools.partial(RMSNorm, eps=c.norm_eps, dtype=dtype, implementation=implementation)
        inner = c.num_heads * c.head_dim
        self.attention_norm = norm(c.hidden_size)
        self.qkv = Linear(c.hidden_size, inner + 2 * c.num_kv_heads * c.head_dim, bias=c.qkv_bias, dtype=dtype)
        self.q_norm = norm(c.head_dim) if c.qk_norm else None
        self.k_norm = norm(c.head_dim) if c.qk_norm else None
        self.out = Linear(inner, c.hidden_size, bias=c.out_bias, dtype=dtype)
        self.mlp_norm = norm(c.hidden_size)
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias, dtype=dtype)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=dtype)

    def heads(self, x: Array, cos: Array, sin: Array) -> Heads:
        """Projects `x` `[..., E]`; `cos`, `sin` float32 `[..., D/2]` of each token's position."""
        c = self.config
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:-1], -1, c.head_dim)
        # Queries and keys side by side, so that XLA norms and rotates both by one kernel.
        qk, v = jnp.split(heads, [c.num_heads + c.num_kv_heads], axis=-2)
        if self.q_norm is not None and self.k_norm is not None:
            is_query = jnp.arange(qk.shape[-2], dtype=jnp.int32)[:, None] < c.num_heads
            scale = jnp.where(is_query, self.q_norm.scale[...][None], self.k_norm.scale[...][None])
            qk = rms_norm(qk, scale, eps=c.norm_eps)
        rotated = rope.rotate(qk, cos[..., None, :], sin[..., None, :])
        q, k = jnp.split(rotated, [c.num_heads], axis=-2)
        q = q.reshape(*k.shape[:-1], c.group, c.head_dim)
        return Heads(q, k, v, qk[..., c.num_heads :, :])

    def finish(self, x: Array, attended: Array) -> Array:
        """Adds attention's output `[..., H, G, D]` and the MLP to the residual `x` `[..., E]`."""
        x = x + self.out(attended.reshape(*x.shape[:-1], -1))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. `head` is None when the head is tied to the embedding.

    A new decoder has shapes for parameters; `weights.load_parameters` and `weights.random_parameters` fill them.
    """

    def __init__(self, config: ModelConfig, *, dtype: str = "float32", implementation: Implementation = XLA):
        kind = jnp.dtype(dtype)
        self.config = config
        self.embedding = nnx.Param(jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), kind))
        self.layers = nnx.List(
            [Layer(config, dtype=kind, implementation=implementation) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=kind, implementation=implementation)
        self.head = (
            None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=kind)
        )

    def embed(self, tokens: Array) -> Array:
        """Embeds int32 tokens `[...]` to `[..., E]`."""
        return self.embedding[...][tokens]

    def logits(self, x: Array) -> Array:
        """Logits of hidden states `[..., E]`: float32 `[..., V]`, whatever the weights' dtype."""
        kernel = self.embedding[...] if self.head is None else self.head.kernel[...]
        return jnp.einsum("...e,ve->...v", self.norm(x), kernel, preferred_element_type=jnp.float32)


def join(config: ModelConfig, weights: nnx.State, implementation: Implementation = XLA) -> Decoder:
    """The decoder of these sizes and parameters. Its structure follows from the config, and is too slow to hash."""
    return nnx.merge(_graph(config, implementation), weights)


@functools.lru_cache
def _graph(config: ModelConfig, implementation: Implementation) -> nnx.GraphDef[Decoder]:
    return nnx.split(Decoder(config, implementation=implementation))[0]


def single_layer(weights: nnx.State, index: int) -> nnx.State:
    """Parameters of a model of which only the layer at `index` is left."""
    return nnx.State({**weights, "layers": nnx.State({0: weights["layers"][index]})})
