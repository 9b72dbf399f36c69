"""How much the last W queries look at every cached key, in jnp."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.decode_attention.reference import MASKED


def window_scores(q: Array, k: Array, length: Array, *, reduce: str = "probs", shift: float = 0.0) -> Array:
    """Mean attention of an observation window, the last W tokens, to the slots before it.

    Args:
        q: queries of the last W tokens in time order, `[B, H, G, W, D]`.
        k: cached keys `[B, H, C, D]`, whose last W filled slots are the window's own.
        length: filled slots, int32 `[B, H]`.
        reduce: "probs": softmax over all slots, causal inside the window, then the largest of the group's heads
            (G-KV, SnapKV). "logits": the largest of the group's raw logits, then softmax over the slots before the
            window only (R-KV).
        shift: weight of the standard deviation over the window, added to the mean (CAKE, arXiv 2503.12491).

    Returns:
        float32 `[B, H, C]`, 0 in the window and beyond `length`.
    """
    window = q.shape[3]
    slot = jnp.arange(k.shape[2], dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    first = (length - window)[..., None, None, None]
    logits = jnp.einsum("bhgwd,bhcd->bhgwc", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if reduce == "probs":
        row = jnp.arange(window, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        logits = jnp.where(slot <= first + row, logits, MASKED)
        probs = jnp.max(jax.nn.softmax(logits, axis=-1), axis=2)
    else:
        top = jnp.max(logits, axis=2, keepdims=True)
        probs = jax.nn.softmax(jnp.where(slot < first, top, MASKED), axis=-1)[:, :, 0]
    score = jnp.mean(probs, axis=2)
    if shift:
        score = score + shift * jnp.std(probs, axis=2, ddof=1)
    return jnp.where(slot[:, :, 0, 0] < first[:, :, 0, 0], score, 0.0)
