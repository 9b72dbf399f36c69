"""Rotary position embedding (https://arxiv.org/abs/2104.09864) with linear, llama3 and yarn context extension.

Positions are those of the text: a cached key keeps the rotation of its own position whatever is evicted around it.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.config import RopeConfig


def inv_freq(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies of a rotary embedding of heads of `head_dim` numbers.

    Returns:
        ``(inv_freq, scale)``: float32 `[D/2]`, in radians a token, and the factor on cos and sin (1.0 but for yarn).
    """
    base = np.float32(rope.theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    plain = (np.float32(1.0) / base).astype(np.float32)
    if rope.type == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain, 1.0


def cos_sin(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine of the rotation of every position, float32 `[..., D/2]` for positions int32 `[...]`."""
    freq, scale = inv_freq(rope, head_dim)
    angle = jnp.expand_dims(positions.astype(jnp.float32), -1) * freq.reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs (i, i + D/2) of `x` `[..., D]` by `cos`, `sin` `[..., D/2]`; computed in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _llama3(freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Slows the low frequencies by `factor`, keeps the high ones, blends between (Llama 3.1)."""
    turns = rope.original_max_position * freq / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (blend * freq + (1 - blend) * freq / rope.factor).astype(np.float32)


def _yarn(freq: np.ndarray, rope: RopeConfig, dim: int) -> tuple[np.ndarray, float]:
    """YaRN (https://arxiv.org/abs/2309.00071): interpolates the slow dimensions, keeps the quick ones."""

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
    mixed = (ramp * freq / rope.factor + (1 - ramp) * freq).astype(np.float32)
    return mixed, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
