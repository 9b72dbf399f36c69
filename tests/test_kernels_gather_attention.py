"""gather_attention: its reference, and its kernels interpreted on CPU, against a dense masked softmax in numpy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation, Pages, dispatch, shapes
from test_kernels_decode_attention import (
    ACTIVE,
    TOLERANCE,
    check,
    check_written,
    expect_kept,
    inputs,
    kernel,
    primitives,
    share_of,
    tokens_beside,
)

# Slots are read from the first one on, from somewhere inside, from the last one on, or not but for pages.
STARTS = (0.0, 0.4, 0.9, 1.0, 1.3)


def lists_of(arguments: dict[str, Any], lists: int, page: int, count: int) -> Pages:
    """Pages in any order, of which some are none, and nothing that a list must not have."""
    length, capacity = arguments["length"], arguments["k"].shape[2]
    rng = np.random.default_rng([lists, page, count, capacity])
    none = -(-capacity // page)
    index = np.full((*length.shape, lists, count), none, np.int32)
    start = np.zeros(index.shape[:3], np.int32)
    for number, (b, h, j) in enumerate(np.ndindex(start.shape)):
        start[b, h, j] = min(round(STARTS[number % len(STARTS)] * length[b, h]), capacity)
        drawn = rng.permutation(2 * none)[:count]
        index[b, h, j, : drawn.size] = np.where(drawn < none, drawn, (drawn * 2**20) | none)
        index[b, h, j, 0] = 2**31 - 1
        if start[b, h, j] >= length[b, h] > 0:
            index[b, h, j][index[b, h, j] == (length[b, h] - 1) // page] = none
    return Pages(jnp.asarray(index), jnp.asarray(start), page)


def kept_slots(arguments: dict[str, Any], pages: Pages) -> np.ndarray:
    """What is read, bool `[B, H, G, C]`."""
    rows, heads, group, _ = arguments["q"].shape
    capacity, (index, start) = arguments["k"].shape[2], (np.asarray(x) for x in (pages.index, pages.start))
    kept = np.zeros((rows, heads, group, capacity), bool)
    for b, h, g in np.ndindex(kept.shape[:3]):
        j = g * start.shape[2] // group
        for page in index[b, h, j].tolist():
            kept[b, h, g, page * pages.size : min((page + 1) * pages.size, start[b, h, j])] = True
        kept[b, h, g, start[b, h, j] :] = True
        kept[b, h, g, arguments["length"][b, h] :] = False
    return kept


def poison(arguments: dict[str, Any], kept: np.ndarray, value: float) -> dict[str, Any]:
    """Puts a value into every slot that nothing reads."""
    unread = ~np.any(kept, axis=2)[..., None]
    return arguments | {name: jnp.where(unread, value, jnp.nan_to_num(arguments[name])) for name in "kv"}


def gather(implementation: Implementation, arguments: dict[str, Any], **more: Any) -> pallas_kernels.Attended:
    call = partial(pallas_kernels.gather_attention, implementation=implementation)
    return jax.jit(call)(**arguments, **more)


def check_gathered(found, arguments: dict[str, Any], expected: np.ndarray) -> None:
    dtype = arguments["k"].dtype
    assert found.out.dtype == dtype
    assert found.probs is None
    check(found.out, expected, TOLERANCE[dtype.name])
    check_written(found, arguments)


# Groups, head dimensions, capacities and pages that are no multiple of each other or of a tile, and longer lists.
@pytest.mark.parametrize(
    ("name", "group", "lists", "size", "capacity", "page", "count", "dtype", "cores"),
    [
        ("xla", 1, 1, 64, 109, 8, 5, "float32", 1),
        ("xla", 7, 1, 128, 640, 16, 9, "bfloat16", 1),
        ("xla", 4, 4, 96, 640, 1, 70, "float32", 1),
        ("triton", 1, 1, 64, 109, 8, 5, "float32", 1),
        ("triton", 3, 3, 80, 150, 16, 6, "float32", 40),
        ("triton", 4, 1, 96, 640, 1, 150, "float32", 24),
        ("triton", 4, 4, 128, 200, 1, 64, "bfloat16", 1),
        ("triton", 7, 1, 128, 1152, 16, 40, "bfloat16", 24),
        ("triton", 16, 1, 16, 110, 64, 2, "bfloat16", 24),
        ("triton", 14, 2, 16, 150, 2, 33, "float32", 1),
    ],
)
def test_writes_the_new_token_and_reads_what_is_listed(name, group, lists, size, capacity, page, count, dtype, cores):
    arguments = inputs(group, size, capacity, dtype)
    pages = lists_of(arguments, lists, page, count)
    kept = kept_slots(arguments, pages)
    arguments = poison(arguments, kept, 1e4 if name == "xla" else np.nan)
    found = gather(kernel(name, cores), arguments, pages=pages)
    check_gathered(found, arguments, expect_kept(arguments, kept))
    empty = ~np.any(kept, axis=3)
    assert np.any(empty)
    assert not np.any(np.asarray(found.out)[empty].astype(np.float32))


@pytest.mark.parametrize(("name", "lists", "cores"), [("xla", 3, 1), ("triton", 3, 1), ("triton", 1, 24)])
def test_reads_without_a_new_token_and_beside_others(name, lists, cores):
    arguments = inputs(3, 64, 136, "float32")
    arguments |= {"new": None, "notes": None, "length": arguments["length"] - ACTIVE[:, None].astype(np.int32)}
    pages, tokens = lists_of(arguments, lists, 16, 5), tokens_beside(arguments)
    kept = kept_slots(arguments, pages)
    arguments = poison(arguments, kept, 1e4 if name == "xla" else np.nan)
    found = gather(kernel(name, cores), arguments, pages=pages, beside=share_of(arguments["q"], *tokens))
    check_gathered(found, arguments, expect_kept(arguments, kept, *tokens))


@pytest.mark.parametrize("name", ["xla", "triton"])
def test_rows_without_pages_are_those_of_decode_attention(name):
    arguments = inputs(4, 64, 300, "float32")
    if name == "xla":
        arguments |= {name: jnp.nan_to_num(arguments[name]) for name in "kv"}
    pages = lists_of(arguments, 1, 16, 5)
    rows = np.array([True, False, True, True])
    pages = Pages(pages.index, jnp.where(rows[:, None, None], 0, pages.start), 16)
    implementation = kernel(name, 24)
    found = gather(implementation, arguments, pages=pages)
    dense = jax.jit(partial(pallas_kernels.decode_attention, implementation=implementation))(**arguments)
    np.testing.assert_allclose(found.out[rows], dense.out[rows], atol=1e-6)
    assert np.max(np.abs(found.out[1] - dense.out[1])) > 0.01


def test_the_reference_reads_a_step_and_not_the_cache():
    arguments = inputs(4, 16, 4096, "float32") | {"new": None, "notes": None}
    pages = Pages(jnp.zeros((4, 2, 1, 3), jnp.int32), jnp.full((4, 2, 1), 4000, jnp.int32), 16)
    made = primitives(
        jax.make_jaxpr(pallas_kernels.gather_attention)(**arguments, pages=pages).jaxpr, 4 * 2 * 4096 * 16
    )
    assert not made


@pytest.mark.parametrize(("size", "capacity", "lists"), [(128, 640, 1), (80, 109, 2)])
def test_triton_makes_nothing_of_the_size_of_the_cache(size, capacity, lists):
    arguments = inputs(2, size, capacity, "bfloat16")
    pages = lists_of(arguments, lists, 8, 3)
    call = partial(pallas_kernels.gather_attention, implementation=kernel("triton", 24))
    k = arguments["k"]
    found = primitives(jax.make_jaxpr(lambda x: call(**x, pages=pages))(arguments).jaxpr, k.size)
    assert list(found) == ["pallas_call"]
    (only,) = found["pallas_call"]
    aliased = [only.outvars[output].aval.shape for _, output in only.params["input_output_aliases"]]
    notes = arguments["notes"]
    assert sorted(aliased) == sorted(x.shape for x in (k, k, notes.pos, notes.window))


@pytest.mark.parametrize("gpu", [dispatch.A100, dispatch.H200], ids=["a100", "h200"])
def test_parts_are_as_many_as_what_is_read_is_worth(gpu):
    triton = pytest.importorskip("pallas_kernels.gather_attention.triton", reason="this jax has no Triton")
    array = jax.ShapeDtypeStruct
    for heads in shapes.MODELS.values():
        for batch, lists in ((1, 1), (16, 1), (16, heads.group), (32, 1)):
            rows = batch * heads.kv_heads * lists
            index = array((batch, heads.kv_heads, lists, 2048), jnp.int32)
            pages = Pages(index, array(index.shape[:3], jnp.int32), 1)  # pyright: ignore[reportArgumentType]
            cuts = [
                triton.tiles(array((batch, heads.kv_heads, capacity, heads.head_dim), jnp.bfloat16), pages, gpu)
                for capacity in (4096, 34816)
            ]
            assert cuts[0] == cuts[1]
            assert cuts[0].splits * rows >= 1.5 * gpu.cores or cuts[0].splits * cuts[0].slots >= 2048
            assert cuts[0].splits == 1 or (cuts[0].splits - 1) * rows < 1.5 * gpu.cores
