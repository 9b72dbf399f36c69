"""`pallas_kernels.window_scores` as Pallas Triton kernels.

The first one sums the exponentials of each query's logits, the second one knows these sums and makes the scores. Both
multiply a tile of keys by all queries that share them, so that each reads the keys once. Where the largest of a group
is taken, the keys come first in the product: then one thread holds all of a slot's logits, or nearly so.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.blocks import LEAST_DEPTH, Load, check_columns, hold, of_head, power_of_two, product
from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.decode_attention.split import splits_for
from pallas_kernels.dispatch import Gpu, Implementation

LOG2_E = 1.4426950408889634  # the GPU's own exponential is that of 2
MOST_PARTS = 64  # every program of the second kernel joins the sums of all parts


class Tiles(NamedTuple):
    """How the work is cut; all sizes of blocks are powers of two.

    Attributes:
        heads, tokens: query heads and tokens of the window whose queries a product takes at once, padding included.
        chunks: such products that make up the window.
        slots: keys of one step of a program.
        parts: programs that share the slots of one kv head.
        warps, stages: of Triton's code and of its pipeline of loads.
    """

    heads: int
    tokens: int
    chunks: int
    slots: int
    parts: int
    warps: int
    stages: int = 3

    @property
    def rows(self) -> int:
        """Queries of a product."""
        return self.heads * self.tokens


def tiles(q: jax.ShapeDtypeStruct | Array, k: jax.ShapeDtypeStruct | Array, gpu: Gpu) -> Tiles:
    """All queries at once if a thread can hold 64 of their logits and they fit beside three stages of keys."""
    batch, heads, group, window, size = q.shape
    stages, itemsize = Tiles._field_defaults["stages"], k.dtype.itemsize
    slots, most = (64, 256) if itemsize < 4 else (16, 32)
    room = gpu.shared_memory * 9 // 10 // (size * itemsize)
    group = power_of_two(group)
    rows = max(group * power_of_two(window), LEAST_DEPTH)
    if rows > min(most, room - stages * slots):  # then it is the queries that pass by
        rows = min(most, 128, power_of_two((room - slots) // stages + 1) // 2)
    tokens = max(rows // group, 1)
    parts = min(MOST_PARTS, splits_for(batch * heads, k.shape[2], slots, gpu))
    return Tiles(group, tokens, -(-window // tokens), slots, parts, 4 if rows <= 128 and itemsize < 4 else 8, stages)


def window_scores(
    q: Array, k: Array, length: Array, *, reduce: str, shift: float, implementation: Implementation
) -> Array:
    """Two kernels; the second leaves open what lies in the window and beyond.

    Raises:
        ValueError: head_dim is no multiple of 16.
    """
    batch, heads, _, window, size = q.shape
    capacity = k.shape[2]
    check_columns("window_scores", size)
    cut = tiles(q, k, implementation.gpu)
    call = partial(
        pl.pallas_call,
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=implementation.interpret,
    )
    inputs = [of_head(), of_head(*q.shape[2:]), of_head(capacity, size)]
    wide = cut.chunks * (cut.rows if reduce == "probs" else cut.tokens)
    sums = call(
        partial(_sum, cut=cut, reduce=reduce),
        grid=(cut.parts * cut.chunks, heads, batch),
        in_specs=inputs,
        out_specs=of_head(cut.parts, wide),
        out_shape=jax.ShapeDtypeStruct((batch, heads, cut.parts, wide), jnp.float32),
        name="window_sums",
    )(length, q, k)
    scores = call(
        partial(_score, cut=cut, reduce=reduce, shift=shift),
        grid=(cut.parts, heads, batch),
        in_specs=[*inputs, of_head(cut.parts, wide)],
        out_specs=of_head(capacity),
        out_shape=jax.ShapeDtypeStruct((batch, heads, capacity), jnp.float32),
        name="window_scores",
    )(length, q, k, sums)
    slot = jnp.arange(capacity, dtype=jnp.int32).reshape(1, 1, -1)
    return jnp.where(slot < (length - window)[..., None], scores, 0.0)


def _sum(length_ref, q_ref, k_ref, sum_ref, *, cut: Tiles, reduce: str) -> None:
    """One part's share of the softmax of one chunk: base-2 logarithms of summed exponentials, +1e30 for padding."""
    group, window, _ = q_ref.shape
    part, chunk = pl.program_id(0) // cut.chunks, pl.program_id(0) % cut.chunks
    length = plgpu.load(length_ref.at[...])
    first = length - window
    head, token = _rows(cut, chunk, cut.rows if reduce == "probs" else cut.tokens)
    last = first + token if reduce == "probs" else jnp.full_like(token, first - 1)
    stop = length if reduce == "probs" else first
    queries = _queries(q_ref, chunk, cut)

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = state
        slot, keys = _keys(k_ref, i, stop, cut)
        if reduce == "probs":
            logits = _multiply(queries, keys, (cut.rows, cut.slots), k_ref)
        else:
            logits = _largest_logits(keys, queries, group, k_ref, cut).T
        logits = jnp.where(slot[None] <= last[:, None], logits, MASKED)
        new = jnp.maximum(top, jnp.max(logits, axis=1))
        return new, total * jnp.exp2(top - new) + jnp.sum(jnp.exp2(logits - new[:, None]), axis=1)

    nothing = jnp.full(head.shape, MASKED, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    top, total = lax.fori_loop(*_steps(part, jnp.where(first > 0, stop, 0), cut), step, nothing)
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)) * LOG2_E, MASKED)
    real = (head < group) & (token < window)
    plgpu.store(sum_ref.at[part, pl.ds(chunk * head.shape[0], head.shape[0])], jnp.where(real, lse, -MASKED))


def _score(length_ref, q_ref, k_ref, sum_ref, score_ref, *, cut: Tiles, reduce: str, shift: float) -> None:
    """The scores of one part of the slots before the window."""
    (group, window, _), capacity = q_ref.shape, score_ref.shape[0]
    first = plgpu.load(length_ref.at[...]) - window

    def prepare(chunk: Array | int) -> tuple[Load, Array]:
        return _queries(q_ref, chunk, cut), _join(sum_ref, chunk, cut)

    only = prepare(0) if cut.chunks == 1 else None

    def step(i: Array, _: None) -> None:
        slot, keys = _keys(k_ref, i, first, cut)

        def add(chunk: Array | int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, squares, pivot = state
            queries, lse = only or prepare(chunk)
            if reduce == "probs":
                logits = _multiply(keys, queries, (cut.slots, cut.rows), k_ref)
                probs = _largest(jnp.exp2(logits - lse[None]), cut)
            else:
                probs = jnp.exp2(_largest_logits(keys, queries, group, k_ref, cut) - lse[None])
            if not shift:
                return total + jnp.sum(probs, axis=1), squares, pivot
            # Deviations from a value near the mean, since squares of probabilities would cancel out.
            pivot = jnp.where(chunk == 0, jnp.sum(probs, axis=1) / min(window, cut.tokens), pivot)
            real = _rows(cut, chunk, cut.tokens)[1] < window
            deviation = jnp.where(real[None], probs - pivot[:, None], 0.0)
            return total + jnp.sum(deviation, axis=1), squares + jnp.sum(deviation * deviation, axis=1), pivot

        zero = jnp.zeros(slot.shape, jnp.float32)
        state = (zero, zero, zero)
        total, squares, pivot = add(0, state) if only else lax.fori_loop(0, cut.chunks, add, state)
        score = pivot + total / window
        if shift:
            variance = (squares - total * total / window) / (window - 1)
            score = score + shift * jnp.sqrt(jnp.maximum(variance, 0.0))
        plgpu.store(score_ref.at[pl.ds(i * cut.slots, cut.slots)], score, mask=slot < capacity)

    lax.fori_loop(*_steps(pl.program_id(0), first, cut), step, None)


def _queries(q_ref, chunk: Array | int, cut: Tiles) -> Load:
    """The queries of a chunk."""
    head, token = _rows(cut, chunk, cut.rows)
    mask = ((head < q_ref.shape[0]) & (token < q_ref.shape[1]))[:, None]

    def load(columns: pl.Slice) -> Array:
        column = columns.start + jnp.arange(columns.size, dtype=jnp.int32)
        where = jnp.broadcast_arrays(head[:, None], token[:, None], column[None])
        return plgpu.load(q_ref.at[tuple(where)], mask=mask, other=0.0)

    return hold(load, q_ref.shape[2], q_ref.dtype)


def _keys(k_ref, i: Array, stop: Array, cut: Tiles) -> tuple[Array, Load]:
    """The slots of a tile and their keys, of which those from `stop` on are not read."""
    slot = i * cut.slots + jnp.arange(cut.slots, dtype=jnp.int32)
    mask = (slot < stop)[:, None]
    return slot, lambda columns: plgpu.load(k_ref.at[pl.ds(i * cut.slots, cut.slots), columns], mask=mask, other=0.0)


def _multiply(left: Load, right: Load, shape: tuple[int, int], k_ref) -> Array:
    """Logits for powers of 2."""
    size = k_ref.shape[1]
    return product(left, right, jax.ShapeDtypeStruct(shape, k_ref.dtype), size) * (size**-0.5 * LOG2_E)


def _largest_logits(keys: Load, queries: Load, group: int, k_ref, cut: Tiles) -> Array:
    """The largest logit of each group `[slots, tokens]`."""
    logits = _multiply(keys, queries, (cut.slots, cut.rows), k_ref)
    if cut.heads > group:
        logits += jnp.where(_rows(cut, 0, cut.rows)[0] < group, 0.0, MASKED)[None]
    return _largest(logits, cut)


def _largest(x: Array, cut: Tiles) -> Array:
    """The largest of each group's heads: `[slots, rows]` to `[slots, tokens]`."""
    return jnp.max(x.reshape(cut.slots, cut.heads, cut.tokens), axis=1)


def _join(sum_ref, chunk: Array | int, cut: Tiles) -> Array:
    """The sums of all parts for one chunk; those of padding are infinite, so that its probabilities vanish."""
    rows = sum_ref.shape[1] // cut.chunks
    part = jnp.arange(power_of_two(cut.parts), dtype=jnp.int32)[:, None]
    where = jnp.broadcast_arrays(part, chunk * rows + jnp.arange(rows, dtype=jnp.int32)[None])
    sums = plgpu.load(sum_ref.at[tuple(where)], mask=part < cut.parts, other=MASKED)
    top = jnp.max(sums, axis=0)
    return top + jnp.log(jnp.sum(jnp.exp2(sums - top[None]), axis=0)) * LOG2_E


def _rows(cut: Tiles, chunk: Array | int, count: int) -> tuple[Array, Array]:
    """Head of the group and token of the window of each row; one row a token if the heads are joined already."""
    row = jnp.arange(count, dtype=jnp.int32)
    return row // cut.tokens, chunk * cut.tokens + row % cut.tokens


def _steps(part: Array, stop: Array, cut: Tiles) -> tuple[Array, Array]:
    """The steps of a part: its share of the row's own length, so that a short row is shared out as evenly."""
    count = pl.cdiv(jnp.maximum(stop, 0), cut.slots)
    return part * count // cut.parts, (part + 1) * count // cut.parts
