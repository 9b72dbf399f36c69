"""How much the last W queries look at every cached key."""

from jax import Array

from pallas_kernels.dispatch import Implementation, run


def window_scores(
    q: Array,
    k: Array,
    length: Array,
    *,
    reduce: str = "probs",
    shift: float = 0.0,
    implementation: Implementation | str = "xla",
) -> Array:
    """Mean attention of an observation window, the last W tokens, to the slots before it.

    Args:
        q: queries of the last W tokens in time order, `[B, H, G, W, D]`.
        k: cached keys `[B, H, C, D]`, whose last W filled slots are the window's own.
        length: filled slots, int32 `[B, H]`.
        reduce: "probs": softmax over all slots, causal inside the window, then the largest of the group's heads
            (G-KV, SnapKV). "logits": the largest of the group's raw logits, then softmax over the slots before the
            window only (R-KV).
        shift: weight of the standard deviation over the window, added to the mean (CAKE, arXiv 2503.12491).
        implementation: what runs it.

    Returns:
        float32 `[B, H, C]`, 0 in the window and beyond `length`.
    """
    return run("window_scores", implementation, q, k, length, reduce=reduce, shift=shift)
