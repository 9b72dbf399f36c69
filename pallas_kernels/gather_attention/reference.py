"""`pallas_kernels.gather_attention` in jnp."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.reference import MASKED, attend, write
from pallas_kernels.gather_attention import Pages


def gather_attention(
    q: Array,
    k: Array,
    v: Array,
    length: Array,
    pages: Pages,
    new: NewToken | None = None,
    notes: Notes | None = None,
    *,
    beside: Share | None,
) -> Attended:
    """Writes the new token, attends to copies of the listed slots, then to the slots from `start` on."""
    k, v, notes = write(q, k, v, length, new, notes)
    start = jnp.minimum(pages.start, length[..., None])
    listed = attend_listed(q, k, v, pages, start)
    if beside is not None:
        listed = Share(*(jnp.concatenate(pair, axis=2) for pair in zip(listed, beside, strict=True)))
    start = jnp.repeat(start, q.shape[2] // start.shape[2], axis=2)
    return Attended(attend(q, k, v, length, listed, start), None, k, v, notes)


def attend_listed(q: Array, k: Array, v: Array, pages: Pages, end: Array) -> Share:
    """Attention over the slots of the listed pages that are before `end` int32 `[B, H, J]`."""
    batch, heads, group, size = q.shape
    lists = pages.index.shape[2]
    index = jnp.minimum(pages.index, -(-k.shape[2] // pages.size))
    slot = index[..., None] * pages.size + jnp.arange(pages.size, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    slot = slot.reshape(batch, heads, lists, -1)
    valid = slot < end[..., None]
    at = jnp.where(valid, slot, 0).reshape(batch, heads, -1, 1)
    keys, values = (jnp.take_along_axis(x, at, axis=2).reshape(batch, heads, lists, -1, size) for x in (k, v))
    q = q.reshape(batch, heads, lists, group // lists, size)
    logits = jnp.einsum("bhjgd,bhjmd->bhjgm", q, keys, preferred_element_type=jnp.float32) * size**-0.5
    valid = valid[:, :, :, None]
    logits = jnp.where(valid, logits, MASKED)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=MASKED)
    weights = jnp.where(valid, jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=-1)
    # The slot that stands for none may hold anything.
    values = jnp.where(jnp.moveaxis(valid, 3, 4), values, 0)
    out = jnp.einsum("bhjgm,bhjmd->bhjgd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    lse = jnp.where(total > 0, top[..., 0] + jnp.log(jnp.maximum(total, 1e-30)), MASKED)
    return Share(out.reshape(batch, heads, 1, group, size), lse.reshape(batch, heads, 1, group))
