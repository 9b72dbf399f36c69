"""The operations of `pallas_kernels` as functions to compile: arguments in the sizes of `shapes`, caches donated."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import Implementation, NewToken
from pallas_kernels.decode_attention import Notes
from pallas_kernels.shapes import Cache, Heads


class Operation(NamedTuple):
    """A function and its arguments as shapes.

    Attributes:
        donated: numbers of the arguments whose buffers it takes over.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def make_operation(name: str, heads: Heads, cache: Cache, implementation: Implementation) -> Operation:
    """The operation of one of `OPERATIONS` in bfloat16."""
    return OPERATIONS[name](_Sizes(heads, cache), implementation)


class _Sizes(NamedTuple):
    """Shapes of the arrays that several operations take."""

    heads: Heads
    cache: Cache

    def of(self, *dims: int, dtype: Any = jnp.bfloat16) -> Any:
        """An array `[B, H, ...]`."""
        return jax.ShapeDtypeStruct((self.cache.batch, self.heads.kv_heads, *dims), jnp.dtype(dtype))

    @property
    def kv(self) -> Any:
        return self.of(self.cache.capacity, self.heads.head_dim)

    @property
    def length(self) -> Any:
        return self.of(dtype=jnp.int32)


def _decode_attention(sizes: _Sizes, implementation: Implementation, *, return_probs: bool = False) -> Operation:
    def attend(q: Any, k: Any, v: Any, length: Any, new: Any, notes: Any) -> Any:
        return pallas_kernels.decode_attention(
            q, k, v, length, new, notes, return_probs=return_probs, implementation=implementation
        )

    heads, cache, token = sizes.heads, sizes.cache, sizes.of(sizes.heads.head_dim)
    row: Any = jax.ShapeDtypeStruct((cache.batch,), jnp.dtype(jnp.int32))
    active: Any = jax.ShapeDtypeStruct((cache.batch,), jnp.dtype(bool))
    window = sizes.of(cache.window, heads.group, heads.head_dim)
    notes = Notes(row, sizes.of(cache.capacity, dtype=jnp.int32), window)
    q = sizes.of(heads.group, heads.head_dim)
    args = (q, sizes.kv, sizes.kv, sizes.length, NewToken(token, token, active), notes)
    return Operation(attend, args, (1, 2, 5))


def _window_scores(sizes: _Sizes, implementation: Implementation, *, reduce: str) -> Operation:
    def score(q: Any, k: Any, length: Any) -> Any:
        return pallas_kernels.window_scores(q, k, length, reduce=reduce, implementation=implementation)

    q = sizes.of(sizes.heads.group, sizes.cache.window, sizes.heads.head_dim)
    return Operation(score, (q, sizes.kv, sizes.length))


def _key_redundancy(sizes: _Sizes, implementation: Implementation) -> Operation:
    def redundancy(k: Any, length: Any) -> Any:
        return pallas_kernels.key_redundancy(k, length, implementation=implementation)

    return Operation(redundancy, (sizes.kv, sizes.length))


def _select_top(sizes: _Sizes, implementation: Implementation) -> Operation:
    def select(score: Any, count: Any) -> Any:
        return pallas_kernels.select_top(score, count, most=sizes.cache.kept, implementation=implementation)

    return Operation(select, (sizes.of(sizes.cache.capacity, dtype=jnp.float32), sizes.length))


def _compact(sizes: _Sizes, implementation: Implementation) -> Operation:
    def move(arrays: Any, index: Any) -> Any:
        return pallas_kernels.compact(arrays, index, implementation=implementation)

    beside = (sizes.of(sizes.cache.capacity, dtype=jnp.int32), sizes.of(sizes.cache.capacity, dtype=jnp.float32))
    return Operation(move, ((sizes.kv, sizes.kv, *beside), sizes.of(sizes.cache.kept, dtype=jnp.int32)), (0,))


def _rms_norm(sizes: _Sizes, implementation: Implementation) -> Operation:
    def norm(x: Any, scale: Any) -> Any:
        return pallas_kernels.rms_norm(x, scale, eps=1e-6, implementation=implementation)

    # The one row of a batch of one, as wide as the query heads together.
    size = sizes.heads.kv_heads * sizes.heads.group * sizes.heads.head_dim
    return Operation(norm, tuple(jax.ShapeDtypeStruct(s, jnp.dtype(jnp.bfloat16)) for s in ((1, size), (size,))))


OPERATIONS: dict[str, Callable[[_Sizes, Implementation], Operation]] = {
    "decode_attention": _decode_attention,
    "decode_attention probs": partial(_decode_attention, return_probs=True),
    "window_scores": partial(_window_scores, reduce="probs"),
    "window_scores logits": partial(_window_scores, reduce="logits"),
    "key_redundancy": _key_redundancy,
    "rms_norm": _rms_norm,
    "select_top": _select_top,
    "compact": _compact,
}
# Names of their arguments that hold a cache or what is as large.
OPERANDS = r"^(k|v|x|score|arrays\[\d\])$"
