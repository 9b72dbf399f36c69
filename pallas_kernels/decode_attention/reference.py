"""`pallas_kernels.decode_attention` in jnp."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.decode_attention import Attended, NewToken, Notes

# Finite, so that a row without a single filled slot (a padding row) gives numbers and not NaN.
MASKED = -1e30


class Form(NamedTuple):
    """How XLA is made to do the two products.

    Attributes:
        block: slots attended at once. A longer cache is walked block by block up to its longest row, so that the time
            of a step follows the text and not the allocation.
        fused: as a multiplication and a sum instead of a matrix product.
    """

    block: int
    fused: bool = False


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    length: Array,
    new: NewToken | None = None,
    notes: Notes | None = None,
    *,
    return_probs: bool,
) -> Attended:
    """Writes the new token, then attends; probabilities need the whole cache at once."""
    k, v, notes = write(q, k, v, length, new, notes)
    if return_probs:
        _, weights, out, total = _attend_block(q, k, v, length, _nothing(q)[0], form=Form(block=k.shape[2]))
        total = jnp.maximum(total, 1e-30)[..., None]
        return Attended((out / total).astype(v.dtype), weights / total, k, v, notes)
    # On CPU, XLA runs a batch of small products on one core and copies a sliced operand first; a sum of products it
    # fuses with the slice and spreads over the cores, which pays with several rows.
    cpu = Form(block=64, fused=True) if q.shape[0] >= 4 else Form(block=256)
    attend = partial(lax.platform_dependent, q, k, v, length)
    out = attend(cpu=partial(attend_blocks, form=cpu), default=partial(attend_blocks, form=Form(block=512)))
    return Attended(out, None, k, v, notes)


def write(
    q: Array, k: Array, v: Array, length: Array, new: NewToken | None, notes: Notes | None
) -> tuple[Array, Array, Notes | None]:
    """Cache and notes with the new token in slot ``length - 1`` of its active rows."""
    if new is None:
        return k, v, notes
    batch, heads = length.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    head = jnp.arange(heads, dtype=jnp.int32)[None]

    def put(x: Array, index: Array, value: Array) -> Array:
        # The others write out of bounds, which is dropped.
        index = jnp.where(new.active[:, None] & (length > 0), index, x.shape[2])
        value = value.astype(x.dtype)
        return x.at[row, head, index].set(value, mode="drop", unique_indices=True, indices_are_sorted=True)

    if notes is not None:
        window, place = notes.window, notes.place[:, None]
        if size := window.shape[2]:
            window = put(window, place % size, q)
        notes = Notes(notes.place, put(notes.pos, length - 1, jnp.broadcast_to(place, length.shape)), window)
    return put(k, length - 1, new.k), put(v, length - 1, new.v), notes


def attend_blocks(q: Array, k: Array, v: Array, length: Array, *, form: Form) -> Array:
    """`decode_attention` block by block, each block's share weighted by its part of the softmax."""
    capacity = k.shape[2]
    block = min(form.block, capacity)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, out, total = carry
        # The last block starts early where the capacity is not a multiple; what was read before is masked.
        start = jnp.minimum(i * block, capacity - block)
        k_block, v_block = (lax.dynamic_slice_in_dim(x, start, block, axis=2) for x in (k, v))
        new, _, more, mass = _attend_block(q, k_block, v_block, length - start, top, skip=i * block - start, form=form)
        old = jnp.exp(top - new)
        return new, out * old[..., None] + more, total * old + mass

    if block == capacity:
        _, _, out, total = _attend_block(q, k, v, length, _nothing(q)[0], form=form)
    else:
        count = jnp.clip((jnp.max(length) + block - 1) // block, 1, -(-capacity // block))
        _, out, total = lax.fori_loop(0, count, body, _nothing(q))
    return (out / jnp.maximum(total, 1e-30)[..., None]).astype(v.dtype)


def _nothing(q: Array) -> tuple[Array, Array, Array]:
    """Row maximum, weighted values and sum of weights before the first block."""
    lead = q.shape[:3]
    return jnp.full(lead, MASKED, jnp.float32), jnp.zeros(q.shape, jnp.float32), jnp.zeros(lead, jnp.float32)


def _attend_block(
    q: Array, k: Array, v: Array, length: Array, top: Array, *, skip: Array | int = 0, form: Form
) -> tuple[Array, Array, Array, Array]:
    """Unnormalised attention over one block: new row maximum, weights, weighted values, sum of weights."""
    slot = jnp.arange(k.shape[2], dtype=jnp.int32).reshape(1, 1, 1, -1)
    logits = _scores(q, k, form) * q.shape[-1] ** -0.5
    valid = (slot < length[..., None, None]) & (slot >= skip)
    logits = jnp.where(valid, logits, MASKED)
    new = jnp.maximum(top, jnp.max(logits, axis=-1))
    weights = jnp.where(valid, jnp.exp(logits - new[..., None]), 0.0)
    return new, weights, _values(weights, v, form), jnp.sum(weights, axis=-1)


# The barriers keep what made the small factor out of the fused sums, where it would be made again for every slot.


def _scores(q: Array, k: Array, form: Form) -> Array:
    if not form.fused:
        return jnp.einsum("bhgd,bhcd->bhgc", q, k, preferred_element_type=jnp.float32)
    return jnp.sum(lax.optimization_barrier(q.astype(jnp.float32))[:, :, :, None] * k[:, :, None], axis=-1)


def _values(weights: Array, v: Array, form: Form) -> Array:
    if not form.fused:
        return jnp.einsum("bhgc,bhcd->bhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return jnp.sum(lax.optimization_barrier(weights)[..., None] * v[:, :, None], axis=3)
