"""Blocks of arrays `[B, H, ...]` in Triton kernels, whose sizes are powers of two, and products of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

LEAST_DEPTH = 16  # columns of the smallest product on tensor cores
Load = Callable[[pl.Slice], Array]  # gives those columns of a block that a slice names


def power_of_two(count: int) -> int:
    """The least one that is not below `count`."""
    return 1 << (count - 1).bit_length()


def of_head(*shape: int) -> pl.BlockSpec:
    """What the programs of one kv head see of an array `[B, H, *shape]`: all of it, on a grid (programs, H, B)."""
    return pl.BlockSpec((None, None, *shape), lambda _, h, b: (b, h, *[0] * len(shape)))


def check_columns(op: str, size: int) -> None:
    """Raises ValueError for a head_dim that is no multiple of 16."""
    if size % LEAST_DEPTH:
        raise ValueError(f"{op}: triton takes head_dim in multiples of {LEAST_DEPTH}, got {size}; use xla")


def split_columns(size: int) -> list[pl.Slice]:
    """The powers of two that `size` columns are made of, largest first: padding them would copy the cache."""
    widths = [1 << i for i in reversed(range(size.bit_length())) if size >> i & 1]
    return [pl.Slice(sum(widths[:i]), width) for i, width in enumerate(widths)]


def is_whole(dtype: jnp.dtype) -> bool:
    """Whether `product` takes all columns at once.

    Off the tensor cores a product is unrolled over its columns: over all of them it takes more registers than exist.
    """
    return dtype != jnp.float32


def hold(load: Load, size: int, dtype: jnp.dtype) -> Load:
    """A block that many products take, loaded here if they take it whole."""
    if not is_whole(dtype):
        return load
    held = {columns.start: load(columns) for columns in split_columns(size)}
    return lambda columns: held[columns.start]


def product(left: Load, right: Load, of: jax.ShapeDtypeStruct, size: int) -> Array:
    """A block times another one transposed, summed in float32; float32 blocks are not rounded to TensorFloat-32.

    Args:
        left, right: the blocks.
        of: the number of rows of each, and their dtype.
        size: columns of both, a multiple of 16.
    """

    def add(columns: pl.Slice, total: Array) -> Array:
        return total + lax.dot_general(
            left(columns),
            right(columns),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    total = jnp.zeros(of.shape, jnp.float32)
    if is_whole(of.dtype):
        for columns in split_columns(size):
            total = add(columns, total)
        return total
    return lax.fori_loop(
        0, size // LEAST_DEPTH, lambda i, total: add(pl.Slice(i * LEAST_DEPTH, LEAST_DEPTH), total), total
    )
