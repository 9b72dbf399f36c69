"""`pallas_kernels.select_top` in jnp."""

import jax.numpy as jnp
from jax import Array, lax


def select_top(score: Array, count: Array, *, most: int) -> Array:
    """Sorts by score, then by index."""
    capacity = score.shape[-1]
    # -0.0 and 0.0 are equal scores, but top_k ranks them.
    _, index = lax.top_k(jnp.where(score == 0, 0.0, score), most)
    rank = jnp.arange(most, dtype=jnp.int32).reshape((1,) * (score.ndim - 1) + (-1,))
    return jnp.sort(jnp.where(rank < count[..., None], index, capacity), axis=-1)
