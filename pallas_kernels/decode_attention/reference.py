"""`pallas_kernels.decode_attention` in jnp."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share

# Finite, so that a row without a single filled slot (a padding row) gives numbers and not NaN.
MASKED = -1e30


class Softmax(NamedTuple):
    """Attention over the slots so far.

    Attributes:
        top, total: largest logit, and sum of exponentials relative to it, float32 `[B, H, G]`.
        out: weighted values, float32 `[B, H, G, D]`.
    """

    top: Array
    out: Array
    total: Array


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
    beside: Share | None,
    return_probs: bool,
) -> Attended:
    """Writes the new token, then attends; probabilities need the whole cache at once."""
    k, v, notes = write(q, k, v, length, new, notes)
    if return_probs:
        _, weights, out, total = _attend_block(q, k, v, length, _nothing(q).top, form=Form(block=k.shape[2]))
        total = jnp.maximum(total, 1e-30)[..., None]
        return Attended((out / total).astype(v.dtype), weights / total, k, v, notes)
    return Attended(attend(q, k, v, length, beside), None, k, v, notes)


def attend(
    q: Array, k: Array, v: Array, length: Array, beside: Share | None = None, start: Array | None = None
) -> Array:
    """Attention over the slots from `start` int32 `[B, H, G]` on, or all, in the blocks that suit the platform."""
    # On CPU, XLA runs a batch of small products on one core and copies a sliced operand first; a sum of products it
    # fuses with the slice and spreads over the cores, which pays with several rows.
    cpu = Form(block=64, fused=True) if q.shape[0] >= 4 else Form(block=256)
    forms = {"cpu": cpu, "default": Form(block=512)}
    blocks = {name: partial(attend_blocks, form=form) for name, form in forms.items()}
    return lax.platform_dependent(q, k, v, length, beside, start, **blocks)


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


def attend_blocks(
    q: Array, k: Array, v: Array, length: Array, beside: Share | None, start: Array | None, *, form: Form
) -> Array:
    """`attend` block by block, each block's share weighted by its part of the softmax."""
    capacity = k.shape[2]
    block = min(form.block, capacity)

    def body(i: Array, carry: Softmax) -> Softmax:
        # The last block begins early where the capacity is not a multiple; what was read before is masked.
        first = jnp.minimum(i * block, capacity - block)
        k_block, v_block = (lax.dynamic_slice_in_dim(x, first, block, axis=2) for x in (k, v))
        skip = i * block - first
        if start is not None:
            skip = jnp.maximum(skip, start[..., None] - first)
        new, _, more, mass = _attend_block(q, k_block, v_block, length - first, carry.top, skip=skip, form=form)
        old = jnp.exp(carry.top - new)
        return Softmax(new, carry.out * old[..., None] + more, carry.total * old + mass)

    carry = _nothing(q) if beside is None else join(beside)
    if block == capacity:
        carry = body(jnp.int32(0), carry)
    else:
        begin = 0 if start is None else jnp.min(start) // block
        end = jnp.clip((jnp.max(length) + block - 1) // block, begin, -(-capacity // block))
        carry = lax.fori_loop(begin, end, body, carry)
    return (carry.out / jnp.maximum(carry.total, 1e-30)[..., None]).astype(v.dtype)


def join(share: Share) -> Softmax:
    """Several sets as one."""
    top = jnp.max(share.lse, axis=2)
    weights = jnp.exp(share.lse - top[:, :, None])
    return Softmax(top, jnp.sum(share.out * weights[..., None], axis=2), jnp.sum(weights, axis=2))


def _nothing(q: Array) -> Softmax:
    """Before the first block."""
    lead = q.shape[:3]
    return Softmax(jnp.full(lead, MASKED, jnp.float32), jnp.zeros(q.shape, jnp.float32), jnp.zeros(lead, jnp.float32))


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
