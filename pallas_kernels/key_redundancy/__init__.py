"""How much each cached key resembles the others."""

from jax import Array

from pallas_kernels.dispatch import Implementation, run


def key_redundancy(
    k: Array,
    length: Array,
    *,
    threshold: float = 0.5,
    retain: str = "recent",
    implementation: Implementation | str = "xla",
) -> Array:
    """Softmax over the slots of the mean cosine similarity to all other keys.

    For each key one similar key is spared: of the slots whose cosine exceeds `threshold`, the most recent one does
    not count this key against itself. No `[C, C]` array is formed.

    Args:
        k: cached keys `[B, H, C, D]` in time order.
        length: filled slots, int32 `[B, H]`.
        threshold: cosine above which two keys are alike.
        retain: "recent": as above. "last": the same, but a key without a similar one spares slot 0 (as the R-KV code
            does). "first": every key spares slot 0 (as that code's "first" does).
        implementation: what runs it.

    Returns:
        float32 `[B, H, C]`, summing to 1 over the filled slots, 0 beyond.
    """
    return run("key_redundancy", implementation, k, length, threshold=threshold, retain=retain)
