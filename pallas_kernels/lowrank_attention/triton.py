"""`pallas_kernels.lowrank_attention` as a Pallas Triton kernel.

A program takes one part of the list of one kv head, for all query heads of its group, so that rows of `a` and values
are read once. It keeps the head's `b` in shared memory, makes the keys of some tokens as a product on tensor cores,
rotates them and attends to them while the rows and values of the next tokens are on their way. The two halves of a key
are two products, so that what a rotation pairs lies in the same place of both.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.blocks import LEAST_DEPTH, Load, check_columns, hold, is_whole, of_head, product
from pallas_kernels.decode_attention import Share
from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.decode_attention.split import padded
from pallas_kernels.decode_attention.triton_part import Softmax, _dot, _load, _matrix
from pallas_kernels.dispatch import Gpu, Implementation

START = 2  # a program's start, until `b` and its first rows are there, in steps
SCRATCH = 8192  # bytes of shared memory for chunks, weights and sums


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        tokens: tokens of one step of a program, a power of two.
        splits: parts of a list.
        warps, stages: of Triton's code and of its pipeline of loads.
    """

    tokens: int
    splits: int
    warps: int = 4
    stages: int = 5  # chunks are on their way before the rows that they name can be


def tiles(a: jax.ShapeDtypeStruct | Array, v: jax.ShapeDtypeStruct | Array, group: int, listed: int, gpu: Gpu) -> Tiles:
    """The largest steps of which two fit beside `b`, in parts that take the cores the least time.

    Args:
        a, v: arrays of the operation.
        group: G.
        listed: tokens of a list.
        gpu: the card.

    Raises:
        ValueError: `b` is too large.
    """
    rows, heads = v.shape[:2]
    tokens = _fit_tokens(a, v, group, gpu) if is_whole(a.dtype) else 16
    steps = -(-listed // tokens)

    def time(splits: int) -> int:
        return -(-rows * heads * splits // gpu.cores) * (-(-steps // splits) + START)

    return Tiles(tokens, min(range(1, max(steps, 1) + 1), key=time), warps=4 if is_whole(a.dtype) else 8)


def _fit_tokens(a: jax.ShapeDtypeStruct | Array, v: jax.ShapeDtypeStruct | Array, group: int, gpu: Gpu) -> int:
    """Tokens of a step."""
    rank, dim, pairs = _depth(a.shape[-1]), padded(v.shape[-1]), padded(v.shape[-1] // 2)
    fixed = 2 * (rank * 2 * pairs + padded(group) * dim) + SCRATCH
    # Values and tables of two steps, and rows of three, since a product on Hopper may still read those of the last one.
    each = 3 * 2 * rank + 2 * (2 * dim + 2 * 4 * pairs)
    for tokens in (64, 32, 16):
        if fixed + tokens * each <= gpu.shared_memory:
            return tokens
    raise ValueError(
        f"lowrank_attention: triton keeps b in shared memory, where a rank of {a.shape[-1]} does not fit; use xla"
    )


def lowrank_attention(
    q: Array,
    a: Array,
    b: Array,
    v: Array,
    index: Array,
    cos: Array,
    sin: Array,
    *,
    size: int,
    implementation: Implementation,
) -> Share:
    """One kernel, whose parts are sets of their own.

    Raises:
        ValueError: head_dim is no multiple of 16, or the rank is too large.
    """
    batch, heads, group, dim = q.shape
    check_columns("lowrank_attention", dim)
    cut = tiles(a, v, group, index.shape[2] * size, implementation.gpu)
    of_row = pl.BlockSpec((None, *a.shape[1:]), lambda _, h, b: (b, 0, 0))
    table = pl.BlockSpec(cos.shape, lambda *_: (0, 0))

    def of_part(*shape: int) -> Any:
        return pl.BlockSpec((None, None, None, *shape), lambda s, h, b: (b, h, s, *[0] * len(shape)))

    parts = (batch, heads, cut.splits, group)
    return pl.pallas_call(
        partial(_attend, size=size, cut=cut),
        grid=(cut.splits, heads, batch),
        in_specs=[of_head(group, dim), of_row, *(of_head(*x.shape[2:]) for x in (b, v, index)), table, table],
        out_specs=Share(of_part(group, dim), of_part(group)),
        out_shape=Share(
            jax.ShapeDtypeStruct((*parts, dim), jnp.float32),  # pyright: ignore[reportArgumentType]
            jax.ShapeDtypeStruct(parts, jnp.float32),  # pyright: ignore[reportArgumentType]
        ),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=implementation.interpret,
        name="lowrank_attention",
    )(q.astype(a.dtype), a, b, v, index, cos, sin)


def _attend(
    q_ref, a_ref, b_ref, v_ref, index_ref, cos_ref, sin_ref, out_ref, lse_ref, *, size: int, cut: Tiles
) -> None:
    """One part of one kv head's list; references to what that head has, all of the tables, and the part's results."""
    (group, dim), dtype = q_ref.shape, a_ref.dtype
    head, column = (jnp.arange(padded(n), dtype=jnp.int32) for n in (group, dim))
    pair = jnp.arange(padded(dim // 2), dtype=jnp.int32)
    # Padding of the left half holds columns of the right one, which the zeros of padded tables take away.
    halves = pair, pair + dim // 2
    q = [_load(q_ref, head, half, head < group) for half in halves]
    b = [_factor(b_ref, half) for half in halves]
    count, none = index_ref.shape[0] * size, pl.cdiv(a_ref.shape[0], size)
    steps, part = pl.cdiv(count, cut.tokens), pl.program_id(0)

    def step(i: Array, state: Softmax) -> Softmax:
        entry = i * cut.tokens + jnp.arange(cut.tokens, dtype=jnp.int32)
        chunk = plgpu.load(index_ref.at[lax.div(entry, size),], mask=entry < count, other=none)
        token = jnp.minimum(chunk, none) * size + lax.rem(entry, size)
        valid = token < a_ref.shape[0]

        def rows(columns: pl.Slice) -> Array:
            return _load(a_ref, token, columns.start + jnp.arange(columns.size, dtype=jnp.int32), valid)

        of = jax.ShapeDtypeStruct((cut.tokens, pair.size), dtype)
        left, right = (product(rows, factor, of, _depth(a_ref.shape[1])).astype(dtype) for factor in b)
        cos, sin = (_load(table, token, pair, valid) for table in (cos_ref, sin_ref))
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        left, right = left * cos - right * sin, right * cos + left * sin
        logits = _multiply(q[0], left.astype(dtype)) + _multiply(q[1], right.astype(dtype))
        logits = jnp.where(valid[None], logits * dim**-0.5, MASKED)
        top = jnp.maximum(state.top, jnp.max(logits, axis=1))
        # What a step with nothing to read adds before there is a logit to compare with, the first one takes away again.
        old, weights = jnp.exp(state.top - top), jnp.exp(logits - top[:, None])
        more = _dot(weights.astype(v_ref.dtype), _load(v_ref, token, column, valid), 0)
        return Softmax(top, state.total * old + jnp.sum(weights, axis=1), state.out * old[:, None] + more)

    nothing = jnp.zeros(head.shape, jnp.float32)
    state = Softmax(nothing + MASKED, nothing, jnp.zeros((head.size, column.size), jnp.float32))
    state = lax.fori_loop(part * steps // cut.splits, (part + 1) * steps // cut.splits, step, state)
    total = jnp.where(state.total > 0, state.total, 1.0)
    mask = (head < group)[:, None] & (column < dim)[None]
    plgpu.store(out_ref.at[_matrix(head, column)], state.out / total[:, None], mask=mask)
    plgpu.store(lse_ref.at[head,], state.top + jnp.log(total), mask=head < group)


def _depth(rank: int) -> int:
    """Columns of `a` that products take, zeros included."""
    return -(-rank // LEAST_DEPTH) * LEAST_DEPTH


def _factor(b_ref: Any, column: Array) -> Load:
    """Those columns of `b`, transposed."""
    rank = b_ref.shape[0]

    def load(rows: pl.Slice) -> Array:
        row = rows.start + jnp.arange(rows.size, dtype=jnp.int32)
        return _load(b_ref, row, column, row < rank).T

    return hold(load, _depth(rank), b_ref.dtype)


def _multiply(queries: Array, keys: Array) -> Array:
    """Products of queries `[P, D/2]` with keys `[tokens, D/2]`."""
    if keys.shape[0] < 64:
        return _dot(queries, keys, 1)
    # As the first factor, keys stay in the registers where Hopper's product of so many rows has left them.
    return _dot(keys, queries, 1).T
