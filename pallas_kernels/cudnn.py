"""What cuDNN's flash attention takes."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Gpu


def check_cudnn(op: str, k: Array, gpu: Gpu) -> None:
    """Raises ValueError unless cuDNN takes keys `[..., D]` of this dtype and size."""
    size, widest = k.shape[-1], 256 if gpu.capability >= 90 else 128
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"{op}: cudnn takes bfloat16 and float16, not {k.dtype}; use triton or xla")
    if size % 8 or size > widest:
        raise ValueError(
            f"{op}: cudnn takes head_dim in multiples of 8 up to {widest} on this GPU, not {size}; use triton or xla"
        )
