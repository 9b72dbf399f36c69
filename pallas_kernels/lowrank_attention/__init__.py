"""One query token a row over chunks of tokens whose keys are made from a product."""

from jax import Array

from pallas_kernels.decode_attention import Share
from pallas_kernels.dispatch import Implementation, run


def lowrank_attention(
    q: Array,
    a: Array,
    b: Array,
    v: Array,
    index: Array,
    cos: Array,
    sin: Array,
    *,
    size: int,
    implementation: Implementation | str = "xla",
) -> Share:
    """Softmax attention of one token per row over the tokens of the listed chunks.

    The key of token t in kv head h is ``a[t] @ b[h]``, rounded to `a`'s dtype, then rotated in float32 by the angles of
    position t and rounded again.

    Args:
        q: queries `[B, H, G, D]`.
        a: `[B, T, R]`.
        b: `[B, H, R, D]`.
        v: values `[B, H, T, D]`.
        index: chunks, int32 `[B, H, N]`, none of them twice; chunk i is the tokens ``i * size .. (i + 1) * size - 1``,
            and T / size or more is none.
        cos, sin: rotation of every position, float32 `[T or more, D/2]`.
        size: tokens of a chunk, which T is a multiple of.
        implementation: what runs it.
    """
    return run("lowrank_attention", implementation, q, a, b, v, index, cos, sin, size=size)
