"""`pallas_kernels.rms_norm` in jnp."""

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    """Rounds to `x`'s dtype before it scales, as transformers does."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
