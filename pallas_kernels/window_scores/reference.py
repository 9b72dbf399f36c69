"""`pallas_kernels.window_scores` in jnp."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.decode_attention.reference import MASKED


def window_scores(q: Array, k: Array, length: Array, *, reduce: str = "probs", shift: float = 0.0) -> Array:
    """Logits and softmax over the whole cache at once."""
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
