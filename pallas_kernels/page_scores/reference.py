"""`pallas_kernels.page_scores` in jnp."""

import jax.numpy as jnp
from jax import Array


def page_scores(q: Array, high: Array, low: Array | None = None) -> Array:
    """Positive channels of the query meet `high`, negative ones `low`."""

    def product(x: Array, y: Array) -> Array:
        return jnp.einsum("bhgd,bhpd->bhgp", x, y, preferred_element_type=jnp.float32)

    if low is None:
        return product(q, high)
    return product(jnp.maximum(q, 0), high) + product(jnp.minimum(q, 0), low)
