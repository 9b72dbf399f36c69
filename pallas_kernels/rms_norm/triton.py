"""`pallas_kernels.rms_norm` of a single row as a Pallas Triton kernel.

XLA makes one kernel of the norm of many rows, and fuses what stands before and after; a single row it sums up by one
kernel and scales by another.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import Implementation
from pallas_kernels.rms_norm.reference import rms_norm as norm_rows


def rms_norm(x: Array, scale: Array, *, eps: float, implementation: Implementation) -> Array:
    """One program that holds the row; several rows, or a scale of more axes, are left to XLA."""
    size = x.shape[-1]
    if x.size != size or scale.ndim != 1:
        return norm_rows(x, scale, eps=eps)
    row = pl.pallas_call(
        partial(_norm, eps=eps),
        out_shape=jax.ShapeDtypeStruct((size,), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=implementation.interpret,
        name="rms_norm",
    )(x.reshape(size), scale)
    return row.reshape(x.shape)


def _norm(x_ref, scale_ref, out_ref, *, eps: float) -> None:
    size = x_ref.shape[0]
    column = jnp.arange(1 << (size - 1).bit_length(), dtype=jnp.int32)
    real = column < size
    x, scale = (plgpu.load(ref.at[column], mask=real, other=0.0) for ref in (x_ref, scale_ref))
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    plgpu.store(out_ref.at[column], wide.astype(x.dtype) * scale, mask=real)
