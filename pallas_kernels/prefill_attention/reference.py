"""`pallas_kernels.prefill_attention` in jnp, in blocks: memory grows with T, not with T squared."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.decode_attention.reference import MASKED


def prefill_attention(q: Array, k: Array, v: Array, *, block: int) -> Array:
    """One block of queries after the other, each over the blocks of keys up to its own."""
    length = q.shape[3]
    block = min(block, length)
    padded = -(-length // block) * block
    if padded != length:
        q, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padded - length), (0, 0)]) for x in (q, k, v))
    blocks = padded // block
    inside = jnp.tril(jnp.ones((block, block), bool)).reshape((1, 1, 1, block, block))
    scale = q.shape[-1] ** -0.5

    def attend(i: Array) -> Array:
        q_block = lax.dynamic_slice_in_dim(q, i * block, block, axis=3)

        def step(carry: tuple[Array, Array, Array], start: Array, mask: Array | None) -> tuple[Array, Array, Array]:
            top, out, total = carry
            k_block, v_block = (lax.dynamic_slice_in_dim(x, start, block, axis=2) for x in (k, v))
            logits = jnp.einsum("bhgtd,bhcd->bhgtc", q_block, k_block, preferred_element_type=jnp.float32) * scale
            logits = logits if mask is None else jnp.where(mask, logits, MASKED)
            new = jnp.maximum(top, jnp.max(logits, axis=-1))
            weights, old = jnp.exp(logits - new[..., None]), jnp.exp(top - new)
            more = jnp.einsum("bhgtc,bhcd->bhgtd", weights.astype(v.dtype), v_block, preferred_element_type=jnp.float32)
            return new, out * old[..., None] + more, total * old + jnp.sum(weights, axis=-1)

        lead = q_block.shape[:4]
        carry = (
            jnp.full(lead, MASKED, jnp.float32),
            jnp.zeros(q_block.shape, jnp.float32),
            jnp.zeros(lead, jnp.float32),
        )
        carry = lax.fori_loop(0, i, lambda j, c: step(c, j * block, None), carry) if blocks > 1 else carry
        _, out, total = step(carry, i * block, inside)
        return (out / total[..., None]).astype(v.dtype)

    if blocks == 1:
        return attend(jnp.int32(0))[:, :, :, :length]
    out = lax.map(attend, jnp.arange(blocks, dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 3).reshape(q.shape)[:, :, :, :length]
