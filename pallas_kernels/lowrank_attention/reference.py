"""`pallas_kernels.lowrank_attention` in jnp."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.decode_attention import Share
from pallas_kernels.decode_attention.reference import MASKED


def lowrank_attention(
    q: Array, a: Array, b: Array, v: Array, index: Array, cos: Array, sin: Array, *, size: int
) -> Share:
    """Makes the keys of all listed tokens at once."""
    batch, heads, length, dim = v.shape
    # No chunk may be any number, whose tokens would have numbers that int32 does not hold.
    chunk = jnp.minimum(index, -(-length // size))
    token = chunk[..., None] * size + jnp.arange(size, dtype=jnp.int32).reshape(1, 1, 1, -1)
    token = token.reshape(batch, heads, -1)
    valid = token < length
    token = jnp.where(valid, token, 0)
    rows = jnp.take_along_axis(a[:, None], token[..., None], axis=2)
    keys = jnp.einsum("bhmr,bhrd->bhmd", rows, b, preferred_element_type=jnp.float32).astype(a.dtype)
    left, right = jnp.split(keys.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[token], sin[token]
    keys = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(a.dtype)

    logits = jnp.einsum("bhgd,bhmd->bhgm", q, keys, preferred_element_type=jnp.float32) * dim**-0.5
    logits = jnp.where(valid[:, :, None], logits, MASKED)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=MASKED)
    weights = jnp.where(valid[:, :, None], jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=-1)
    values = jnp.where(valid[..., None], jnp.take_along_axis(v, token[..., None], axis=2), 0)
    out = jnp.einsum("bhgm,bhmd->bhgd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    lse = jnp.where(total > 0, top[..., 0] + jnp.log(jnp.maximum(total, 1e-30)), MASKED)
    return Share(out[:, :, None], lse[:, :, None])
