"""Causal attention of a prompt over itself."""

from jax import Array

from pallas_kernels.dispatch import Implementation, run


def prefill_attention(
    q: Array, k: Array, v: Array, *, block: int = 512, implementation: Implementation | str = "xla"
) -> Array:
    """Causal softmax attention within right-padded prompts.

    Padding needs no mask: it stands to the right, and no real token looks there.

    Args:
        q: queries `[B, H, G, T, D]`.
        k, v: keys and values `[B, H, T, D]`.
        block: query and key tokens handled at once, where the implementation works in blocks of a given size.
        implementation: what runs it.

    Returns:
        `[B, H, G, T, D]` in `v`'s dtype.
    """
    return run("prefill_attention", implementation, q, k, v, block=block)
