"""The indices of the highest scores, in ascending order, in jnp."""

import jax.numpy as jnp
from jax import Array, lax


def select_top(score: Array, count: Array, *, most: int) -> Array:
    """Picks the `count` highest scores of each row; equal scores go to the lower index.

    Args:
        score: float32 `[..., C]` without NaN.
        count: how many to pick, int32 `[...]`, at most `most`.
        most: static upper bound of `count`; at most C.

    Returns:
        int32 `[..., most]`, ascending; entries beyond `count` are C, one past the last slot.
    """
    capacity = score.shape[-1]
    # -0.0 and 0.0 are equal scores, but top_k ranks them.
    _, index = lax.top_k(jnp.where(score == 0, 0.0, score), most)
    rank = jnp.arange(most, dtype=jnp.int32).reshape((1,) * (score.ndim - 1) + (-1,))
    return jnp.sort(jnp.where(rank < count[..., None], index, capacity), axis=-1)
