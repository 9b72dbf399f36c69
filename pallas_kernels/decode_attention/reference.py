"""One query token a row over the filled prefix of a cache, in jnp."""

import jax.numpy as jnp
from jax import Array, lax

# Slots attended at once. A longer cache is walked block by block up to its longest row, so that the time of a step
# follows the text and not the allocation.
BLOCK = 256
# Finite, and a divisor that is not 0: a row without a single filled slot (a padding row) gives 0 and not NaN.
MASKED = -1e30
LEAST = 1e-30


def decode_attention(
    q: Array, k: Array, v: Array, length: Array, *, return_probs: bool = False
) -> tuple[Array, Array | None]:
    """Softmax attention of one token per row over slots ``0 .. length - 1``.

    Args:
        q: queries `[B, H, G, D]`.
        k, v: cached keys and values `[B, H, C, D]`.
        length: filled slots, int32 `[B, H]`.
        return_probs: also return the attention probabilities (reads every slot of the cache).

    Returns:
        ``(out, probs)``: `[B, H, G, D]` in `v`'s dtype, and float32 `[B, H, G, C]` (0 beyond `length`) or None.
    """
    capacity = k.shape[2]
    if return_probs or capacity <= BLOCK:
        weights, out, total = _block(q, k, v, length, jnp.full(q.shape[:3], MASKED, jnp.float32))[1:]
        total = jnp.maximum(total, LEAST)[..., None]
        return (out / total).astype(v.dtype), weights / total if return_probs else None

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, out, total = carry
        # The last block starts early where the capacity is not a multiple; what was read before is masked.
        start = jnp.minimum(i * BLOCK, capacity - BLOCK)
        k_block, v_block = (lax.dynamic_slice_in_dim(x, start, BLOCK, axis=2) for x in (k, v))
        new, _, more, mass = _block(q, k_block, v_block, length - start, top, skip=i * BLOCK - start)
        old = jnp.exp(top - new)
        return new, out * old[..., None] + more, total * old + mass

    lead = q.shape[:3]
    start = (jnp.full(lead, MASKED, jnp.float32), jnp.zeros(q.shape, jnp.float32), jnp.zeros(lead, jnp.float32))
    blocks = jnp.maximum((jnp.max(length) + BLOCK - 1) // BLOCK, 1)
    _, out, total = lax.fori_loop(0, jnp.minimum(blocks, -(-capacity // BLOCK)), body, start)
    return (out / jnp.maximum(total, LEAST)[..., None]).astype(v.dtype), None


def _block(
    q: Array, k: Array, v: Array, length: Array, top: Array, skip: Array | int = 0
) -> tuple[Array, Array, Array, Array]:
    """Unnormalised attention over one block: new row maximum, weights, weighted values, sum of weights."""
    slot = jnp.arange(k.shape[2], dtype=jnp.int32).reshape(1, 1, 1, -1)
    logits = jnp.einsum("bhgd,bhcd->bhgc", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    valid = (slot < length[..., None, None]) & (slot >= skip)
    logits = jnp.where(valid, logits, MASKED)
    new = jnp.maximum(top, jnp.max(logits, axis=-1))
    weights = jnp.where(valid, jnp.exp(logits - new[..., None]), 0.0)
    out = jnp.einsum("bhgc,bhcd->bhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new, weights, out, jnp.sum(weights, axis=-1)
