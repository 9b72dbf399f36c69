"""Root-mean-square norm."""

from jax import Array

from pallas_kernels.dispatch import Implementation, run


def rms_norm(x: Array, scale: Array, *, eps: float, implementation: Implementation | str = "xla") -> Array:
    """Norms the last axis, in float32 (https://arxiv.org/abs/1910.07467).

    Args:
        x: `[..., N]`.
        scale: factors of the last axes of `x`, usually `[N]`.
        eps: added to the mean square.
        implementation: what runs it.

    Returns:
        `[..., N]` in `x`'s dtype.
    """
    return run("rms_norm", implementation, x, scale, eps=eps)
