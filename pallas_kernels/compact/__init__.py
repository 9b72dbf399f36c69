"""Moves the chosen slots to the front of cache arrays."""

from collections.abc import Sequence

from jax import Array

from pallas_kernels.dispatch import Implementation, run


def compact(
    arrays: Sequence[Array], index: Array, *, implementation: Implementation | str = "xla"
) -> tuple[Array, ...]:
    """Gathers slots by ascending index into the front of every array, in place where the arrays are donated.

    Args:
        arrays: each `[B, H, C, ...]`, of any dtypes.
        index: int32 `[B, H, N]` with N <= C, strictly ascending up to a first entry of C, from which on all are C.
        implementation: what runs it.

    Returns:
        The arrays; slots beyond those that `index` names hold what they held or anything else.
    """
    return run("compact", implementation, tuple(arrays), index)
