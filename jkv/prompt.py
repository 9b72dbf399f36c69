"""Whole prompts through the model, with full attention."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jkv.attention import attend_prompt
from jkv.cache import Prompt
from jkv.config import ModelConfig
from jkv.models import rope
from jkv.models.decoder import Decoder, Layer, join
from pallas_kernels.dispatch import XLA, Implementation


def read_prompt(
    layer: Layer,
    x: Array,
    cos: Array,
    sin: Array,
    tokens: Array,
    length: Array,
    *,
    block: int,
    implementation: Implementation = XLA,
) -> tuple[Array, Prompt]:
    """Runs one layer over whole prompts with full attention.

    Args:
        layer: the layer.
        x: residual `[B, T, E]`.
        cos, sin: rotation of the positions, float32 `[1, T, D/2]`.
        tokens: token ids, int32 `[B, T]`.
        length: tokens of each row before its padding, int32 `[B]`.
        block: tokens handled at once.
        implementation: what runs the operations.

    Returns:
        The new residual and what the layer's store can be made from.
    """
    heads = layer.heads(x, cos, sin)
    q = jnp.moveaxis(heads.q, 1, 3)
    k, v, k_pre = (jnp.moveaxis(y, 1, 2) for y in (heads.k, heads.v, heads.k_pre))
    prompt = Prompt(q=q, k=k, v=v, k_pre=k_pre, tokens=tokens, length=length, implementation=implementation)
    attended = jnp.moveaxis(attend_prompt(prompt, block=block), 3, 1)
    return _map_blocks(layer.finish, x, attended, block=block), prompt


def prompt_logits(model: Decoder, tokens: Array, *, block: int = 512) -> Array:
    """Logits of right-padded prompts under full attention.

    Args:
        model: the model.
        tokens: int32 `[B, T]`.
        block: tokens handled at once.

    Returns:
        float32 `[B, T, V]`; what stands after a row's own tokens has no meaning.
    """
    return _logits(model.config, nnx.state(model), tokens, block)


def find_nonfinite(model: Decoder, tokens: Array) -> str:
    """Names the first part of the model whose output for `tokens` int32 `[B, T]` has an infinite or NaN value."""
    x = model.embed(tokens)
    cos, sin = rope.cos_sin(
        model.config.rope, model.config.head_dim, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    )
    length = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    if not jnp.all(jnp.isfinite(x)):
        return "embedding"
    for index, layer in enumerate(model.layers):
        x, _ = read_prompt(layer, x, cos, sin, tokens, length, block=512)
        if not jnp.all(jnp.isfinite(x)):
            return f"layer {index}"
    return "final norm or head"


@functools.partial(jax.jit, static_argnums=(0, 3))
def _logits(config: ModelConfig, weights: nnx.State, tokens: Array, block: int) -> Array:
    model = join(config, weights)
    x = model.embed(tokens)
    cos, sin = rope.cos_sin(
        model.config.rope, model.config.head_dim, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    )
    length = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    for layer in model.layers:
        x, _ = read_prompt(layer, x, cos, sin, tokens, length, block=block)
    return model.logits(x)


def _map_blocks(function: Callable[[Array, Array], Array], x: Array, y: Array, *, block: int) -> Array:
    """Applies a function of `[B, t, ...]` arrays to `block` tokens at a time, where there are more."""
    batch, length = x.shape[:2]
    if length <= block:
        return function(x, y)
    count = -(-length // block)

    def cut(z: Array) -> Array:
        z = jnp.pad(z, [(0, 0), (0, count * block - length)] + [(0, 0)] * (z.ndim - 2))
        return jnp.moveaxis(z.reshape(batch, count, block, *z.shape[2:]), 1, 0)

    out = lax.map(lambda pair: function(*pair), (cut(x), cut(y)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, count * block, *out.shape[3:])[:, :length]
