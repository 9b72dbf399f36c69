"""One kernel on the GPU at hand: checked against its reference, or timed; and what the card itself can do."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bench.gpu_operations import Case, make_case
from pallas_kernels import Implementation
from pallas_kernels.shapes import Cache, Heads

TOLERANCE = 1e-2
REPEATS = 4
SPREAD = 128 << 20  # more than twice what the second-level cache of a GPU holds
MOST_SETS = 24
ROUNDS = 4
RUNS = 7
UNREAD_BEYOND = ("triton", "mosaic")  # the others multiply what they find there by 0


def check_kernel(
    operation: str, heads: Heads, cache: Cache, implementation: Implementation, seed: int
) -> dict[str, Any]:
    """Compares one call of an operation with the reference and with itself, as `compare` does."""
    poison = float("nan") if implementation.name in UNREAD_BEYOND else 1e4
    return compare(make_case(operation, seed, heads, cache, poison=poison), implementation)


def compare(case: Case, implementation: Implementation) -> dict[str, Any]:
    """Compares one call with the reference, and with `REPEATS` more of the same.

    Returns:
        `error`: relative to float32, of the row and head where it is largest. `wrong`: numbers that should be the
        reference's and are not. `unsteady`: numbers that were different in another call. `problem`: what of this is too
        much, if anything.
    """
    run = jax.jit(partial(case.function, implementation=implementation))
    reference = jax.jit(partial(case.function, implementation="xla"))
    parts = jax.jit(case.parts)
    litter(jax.eval_shape(run, **case.arguments))
    found = parts(run(**case.arguments), case.arguments)
    others = (parts(run(**case.arguments), case.arguments) for _ in range(REPEATS))
    unsteady = sum(int(count_different(found, other)) for other in others)
    error, wrong = 0.0, 0
    if found.close:
        with jax.default_matmul_precision("highest"):
            wide = parts(reference(**widen(case.arguments)), case.arguments)
        error = float(largest_error(found.close, wide.close))
    if found.exact:
        narrow = parts(reference(**case.arguments), case.arguments)
        wrong = int(count_different(found.exact, narrow.exact))
    problems = []
    if not error <= TOLERANCE:  # NaN is not
        problems.append(f"relative error {error:.2g}, more than {TOLERANCE}")
    if wrong:
        problems.append(f"{wrong} numbers differ from the reference's")
    if unsteady:
        problems.append(f"{unsteady} numbers change from call to call")
    return {"error": error, "wrong": wrong, "unsteady": unsteady, "problem": "; ".join(problems)}


def time_kernel(
    operation: str, heads: Heads, cache: Cache, implementation: Implementation, seed: int, *, spread: int = SPREAD
) -> dict[str, Any]:
    """Times calls one after the other in one program, over caches that are full.

    Args:
        operation, heads, cache, implementation, seed: what is timed.
        spread: bytes of the arguments that the calls go round.

    Returns:
        `seconds` of a call, the median of several runs; `fastest` of them; `moved` and `flops`, the least that a call
        must do.
    """
    first = make_case(operation, seed, heads, cache)
    size = sum(x.nbytes for x in jax.tree.leaves(first.arguments))
    count = min(max(-(-spread // size), 2), MOST_SETS)
    cases = [first, *(make_case(operation, seed + i, heads, cache) for i in range(1, count))]
    sets = [case.arguments for case in cases]
    loop = jax.jit(partial(go_round, first, implementation), donate_argnums=0)
    seconds = time_chain(lambda sets: loop(sets)[0], sets, runs=RUNS)
    calls = ROUNDS * count
    return {
        "seconds": median(seconds) / calls,
        "fastest": min(seconds) / calls,
        "moved": first.moved,
        "flops": first.flops,
    }


def go_round(case: Case, implementation: Implementation, sets: list[Any]) -> tuple[list[Any], list[Any]]:
    """Calls an operation on each set of arguments, over and over: the arguments and results at the end."""
    call = jax.jit(partial(case.function, implementation=implementation))  # traced once for all sets

    def body(carry: tuple[list[Any], list[Any]], _: None) -> tuple[tuple[list[Any], list[Any]], None]:
        # Behind the barrier nothing is seen to be the same in every round; what is not carried on would not be done.
        after = [case.again(arguments, call(**arguments)) for arguments in lax.optimization_barrier(carry)[0]]
        return ([arguments for arguments, _ in after], [left for _, left in after]), None

    left = jax.eval_shape(lambda: [case.again(arguments, call(**arguments))[1] for arguments in sets])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), left)
    return lax.scan(body, (sets, nothing), length=ROUNDS)[0]


def time_chain(function: Callable[[Any], Any], value: Any, *, runs: int) -> list[float]:
    """Seconds of each of some runs of a function on its own result, after two that count for nothing."""
    seconds = []
    for _ in range(2 + runs):
        start = time.perf_counter()
        value = jax.block_until_ready(function(value))
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def measure_ceilings(*, copied: int, side: int) -> dict[str, float]:
    """What the card reaches: `bandwidth` of a copy in bytes a second, read and written; `flops` of bfloat16 products.

    Args:
        copied: bytes of the copy.
        side: of the square matrices.
    """
    key = jax.random.key(0)
    data = jax.random.normal(key, (copied // 4,), jnp.float32)
    negate = jax.jit(lambda x: lax.scan(lambda y, _: (lax.optimization_barrier(-y), None), x, length=ROUNDS)[0])
    square = jax.random.normal(key, (side, side), jnp.bfloat16) * side**-0.5
    multiply = jax.jit(lambda x: lax.scan(lambda y, _: (y @ square, None), x, length=ROUNDS)[0])
    return {
        "bandwidth": 2 * data.nbytes * ROUNDS / median(time_chain(negate, data, runs=RUNS)),
        "flops": 2 * side**3 * ROUNDS / median(time_chain(multiply, square, runs=RUNS)),
    }


def litter(shapes: Any) -> None:
    """Leaves memory of these sizes, where results are likely to go, full of NaN and large numbers."""
    arrays = jax.tree.map(
        lambda x: jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 77, x.dtype), shapes
    )
    jax.block_until_ready(arrays)


@jax.jit
def widen(arguments: Any) -> Any:
    """bfloat16 as float32, without poison."""

    def convert(x: Array) -> Array:
        return jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    return jax.tree.map(convert, arguments)


@jax.jit
def largest_error(found: tuple[Array, ...], expected: tuple[Array, ...]) -> Array:
    """Of all arrays `[B, H, ...]` and their rows and heads, the largest norm of the error over that of the result."""

    def error(x: Array, y: Array) -> Array:
        x, y = (z.astype(jnp.float32).reshape(*z.shape[:2], -1) for z in (x, y))
        size = jnp.linalg.norm(y, axis=-1)
        return jnp.max(jnp.linalg.norm(x - y, axis=-1) / jnp.where(size > 0, size, 1.0))

    return jnp.max(jnp.stack([error(x, y) for x, y in zip(found, expected, strict=True)]))


@jax.jit
def count_different(a: Any, b: Any) -> Array:
    """Numbers whose bits differ."""

    def count(x: Array, y: Array) -> Array:
        bits = [z if z.dtype == jnp.int32 else lax.bitcast_convert_type(z, _BITS[z.dtype.itemsize]) for z in (x, y)]
        return jnp.sum(bits[0] != bits[1], dtype=jnp.int32)

    return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(count, a, b))))


_BITS = {2: np.uint16, 4: np.uint32}
