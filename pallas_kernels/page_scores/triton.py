"""`pallas_kernels.page_scores` as a Pallas Triton kernel.

A program takes some pages of one kv head, for all query heads of its group, so that bounds are read once. The larger of
two products with one number is that number's positive part times the larger factor plus its negative part times the
smaller one, so tensor cores can do the sum.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.blocks import LEAST_DEPTH, Load, check_columns, of_head, power_of_two, product
from pallas_kernels.dispatch import Gpu, Implementation

LEAST_PAGES = 16  # of a product on tensor cores


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        pages: of a program, a power of two.
        warps, stages: of Triton's code and of its pipeline of loads.
    """

    pages: int
    warps: int = 4
    stages: int = 3


def tiles(high: jax.ShapeDtypeStruct | Array, gpu: Gpu) -> Tiles:
    """64 pages a program, or fewer where that leaves a core without two programs to hide each other's waiting."""
    batch, heads, count, _ = high.shape
    pages = 64
    while pages > LEAST_PAGES and batch * heads * pl.cdiv(count, pages) < 2 * gpu.cores:
        pages //= 2
    return Tiles(pages)


def page_scores(q: Array, high: Array, low: Array | None = None, *, implementation: Implementation) -> Array:
    """One kernel.

    Raises:
        ValueError: head_dim is no multiple of 16.
    """
    batch, heads, group, size = q.shape
    count = high.shape[2]
    check_columns("page_scores", size)
    cut = tiles(high, implementation.gpu)
    bounds = [high] if low is None else [high, low]
    return pl.pallas_call(
        partial(_score, cut=cut),
        grid=(pl.cdiv(count, cut.pages), heads, batch),
        in_specs=[of_head(group, size), *[of_head(count, size) for _ in bounds]],
        out_specs=of_head(group, count),
        out_shape=jax.ShapeDtypeStruct((batch, heads, group, count), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=implementation.interpret,
        name="page_scores",
    )(q.astype(high.dtype), *bounds)


def _score(q_ref, *refs, cut: Tiles) -> None:
    *bound_refs, out_ref = refs
    group, size = q_ref.shape
    count = out_ref.shape[1]
    start = pl.program_id(0) * cut.pages
    head = jnp.arange(max(power_of_two(group), LEAST_DEPTH), dtype=jnp.int32)
    page = start + jnp.arange(cut.pages, dtype=jnp.int32)

    def load_queries(columns: pl.Slice) -> Array:
        where = jnp.broadcast_arrays(head[:, None], columns.start + jnp.arange(columns.size, dtype=jnp.int32)[None])
        return plgpu.load(q_ref.at[tuple(where)], mask=(head < group)[:, None], other=0.0)

    def load_bounds(ref) -> Load:
        mask = (page < count)[:, None]
        return lambda columns: plgpu.load(ref.at[pl.ds(start, cut.pages), columns], mask=mask, other=0.0)

    of = jax.ShapeDtypeStruct((head.size, cut.pages), q_ref.dtype)
    if len(bound_refs) == 1:
        score = product(load_queries, load_bounds(bound_refs[0]), of, size)
    else:
        high, low = (load_bounds(ref) for ref in bound_refs)

        def positive(columns: pl.Slice) -> Array:
            return jnp.maximum(load_queries(columns), 0)

        def negative(columns: pl.Slice) -> Array:
            return jnp.minimum(load_queries(columns), 0)

        score = product(positive, high, of, size) + product(negative, low, of, size)
    where = jnp.broadcast_arrays(head[:, None], page[None])
    plgpu.store(out_ref.at[tuple(where)], score, mask=(head < group)[:, None] & (page < count)[None])
