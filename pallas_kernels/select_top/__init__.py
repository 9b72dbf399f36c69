"""The indices of the highest scores, in ascending order."""

from jax import Array

from pallas_kernels.dispatch import Implementation, run


def select_top(score: Array, count: Array, *, most: int, implementation: Implementation | str = "xla") -> Array:
    """Picks the `count` highest scores of each row; equal scores go to the lower index.

    Args:
        score: float32 `[..., C]` without NaN.
        count: how many to pick, int32 `[...]`, at most `most`.
        most: static upper bound of `count`; at most C.
        implementation: what runs it.

    Returns:
        int32 `[..., most]`, ascending; entries beyond `count` are C, one past the last slot.
    """
    return run("select_top", implementation, score, count, most=most)
