"""`pallas_kernels.prefill_attention` by cuDNN's flash attention."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.cudnn import check_cudnn
from pallas_kernels.dispatch import Implementation


def prefill_attention(q: Array, k: Array, v: Array, *, block: int, implementation: Implementation) -> Array:
    """One call for all heads; cuDNN chooses its own blocks.

    Raises:
        ValueError: cuDNN does not take this dtype or head_dim.
    """
    del block
    check_cudnn("prefill_attention", k, implementation.gpu)
    batch, heads, group, length, size = q.shape
    # cuDNN wants tokens before heads, which is what the projections give: XLA drops the two transposes.
    queries = jnp.moveaxis(q, 3, 1).reshape(batch, length, heads * group, size)
    out = jax.nn.dot_product_attention(
        queries.astype(k.dtype), jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1), is_causal=True, implementation="cudnn"
    )
    return jnp.moveaxis(out.reshape(batch, length, heads, group, size), 1, 3)
