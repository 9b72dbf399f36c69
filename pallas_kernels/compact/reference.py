"""`pallas_kernels.compact` in jnp."""

import jax.numpy as jnp
from jax import Array


def compact(arrays: tuple[Array, ...], index: Array) -> tuple[Array, ...]:
    """A gather, and an update in place."""

    def move(x: Array) -> Array:
        chosen = jnp.minimum(index, x.shape[2] - 1).reshape(index.shape + (1,) * (x.ndim - 3))
        return x.at[:, :, : index.shape[2]].set(jnp.take_along_axis(x, chosen, axis=2))

    return tuple(move(x) for x in arrays)
