"""`pallas_kernels.key_redundancy` in jnp."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.decode_attention.reference import MASKED

LONGEST_BLOCK, SHORTEST_BLOCK = 256, 16
WORKSPACE = 64 << 20  # bytes that one block of cosines may take


def key_redundancy(k: Array, length: Array, *, threshold: float = 0.5, retain: str = "recent") -> Array:
    """Cosines of all keys with one block of keys at a time."""
    capacity = k.shape[2]
    fitting = WORKSPACE // (4 * length.size * capacity)
    block = min(max(1 << max(fitting.bit_length() - 1, 0), SHORTEST_BLOCK), LONGEST_BLOCK, capacity)
    padded = -(-capacity // block) * block
    k = k.astype(jnp.float32)
    unit = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-6)
    slot = jnp.arange(padded, dtype=jnp.int32)
    unit = jnp.pad(unit, ((0, 0), (0, 0), (0, padded - capacity), (0, 0)))
    unit = jnp.where((slot.reshape(1, 1, -1) < length[..., None])[..., None], unit, 0.0)
    rows = slot.reshape(1, 1, -1, 1)

    def add(j: Array, total: Array) -> Array:
        other = lax.dynamic_slice_in_dim(unit, j * block, block, axis=2)
        column = (j * block + jnp.arange(block, dtype=jnp.int32)).reshape(1, 1, 1, -1)
        cosine = jnp.einsum("bhcd,bhed->bhce", unit, other)
        cosine = jnp.where(rows == column, 0.0, cosine)
        if retain == "first":
            spared = jnp.zeros_like(column)
        else:
            none = -1 if retain == "recent" else 0
            alike = (cosine > threshold) & (rows < length[..., None, None])
            spared = jnp.max(jnp.where(alike, rows, none), axis=2, keepdims=True)
        return total + jnp.sum(jnp.where(rows == spared, 0.0, cosine), axis=-1)

    total = lax.fori_loop(0, padded // block, add, jnp.zeros(unit.shape[:3], jnp.float32))[:, :, :capacity]
    valid = slot[:capacity].reshape(1, 1, -1) < length[..., None]
    mean = total / jnp.maximum(length, 1)[..., None].astype(jnp.float32)
    return jnp.where(valid, jax.nn.softmax(jnp.where(valid, mean, MASKED), axis=-1), 0.0)
