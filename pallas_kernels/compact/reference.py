"""Moves the chosen slots to the front of a cache array, in jnp."""

import jax.numpy as jnp
from jax import Array


def compact(x: Array, index: Array) -> Array:
    """Gathers slots by ascending index into the front of the array.

    Args:
        x: `[B, H, C, ...]`.
        index: int32 `[B, H, N]` with N <= C; at an index of C or more the content is unspecified.

    Returns:
        `[B, H, C, ...]`; slots from N on keep what they held.
    """
    chosen = jnp.minimum(index, x.shape[2] - 1).reshape(index.shape + (1,) * (x.ndim - 3))
    return x.at[:, :, : index.shape[2]].set(jnp.take_along_axis(x, chosen, axis=2))
