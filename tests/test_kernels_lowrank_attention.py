"""lowrank_attention, the jnp reference and the kernel interpreted on CPU, against numpy in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation, Share, dispatch, shapes
from pallas_kernels.decode_attention.reference import MASKED
from test_kernels_decode_attention import TOLERANCE, check, primitives

ROWS, HEADS, CHUNKS = 2, 2, 40


def kernel(name: Any, cores: int = 1, shared_memory: int = 232448) -> Implementation:
    """The kernel for a GPU with so few cores that the lists fill it, or with more, so that they are split."""
    gpu = dispatch.Gpu(capability=90, cores=cores, shared_memory=shared_memory)
    chosen = Implementation(name, gpu=gpu, interpret=True)
    try:
        dispatch.find("lowrank_attention", chosen)
    except ValueError as error:
        pytest.skip(str(error))
    return chosen


def inputs(group: int, dim: int, rank: int, size: int, count: int, dtype: str) -> dict[str, Any]:
    """Arguments by name, NaN in all tokens that no list names and in the tables behind the last token.

    The lists are in any order: one with chunks that are none in between, one of such alone, one with a chunk at the
    end alone, and one of chunks alone.
    """
    rng = np.random.default_rng([group, dim, rank, size, count])
    normal = partial(rng.standard_normal, dtype=np.float32)
    tokens = CHUNKS * size
    index = np.stack([rng.permutation(CHUNKS)[:count] for _ in range(ROWS * HEADS)]).astype(np.int32)
    index[0, rng.random(count) < 0.4] = CHUNKS
    index[0, [0, -1]] = 2**31 - 1, CHUNKS + 1
    index[1] = CHUNKS
    index[2, :-1] = CHUNKS + np.arange(count - 1)
    index = index.reshape(ROWS, HEADS, count)
    read = np.zeros((ROWS, HEADS, tokens), bool)
    for b, h in np.ndindex(ROWS, HEADS):
        read[b, h, listed_tokens(index[b, h], size)] = True
    a = np.where(np.any(read, axis=1)[..., None], normal((ROWS, tokens, rank)), np.nan)
    v = np.where(read[..., None], normal((ROWS, HEADS, tokens, dim)), np.nan)
    angle = np.arange(tokens + 3)[:, None] * 100.0 ** -np.linspace(0, 1, dim // 2)
    angle[tokens:] = np.nan
    return {
        "q": jnp.asarray(2 * normal((ROWS, HEADS, group, dim)), dtype),
        "a": jnp.asarray(a, dtype),
        "b": jnp.asarray(normal((ROWS, HEADS, rank, dim)) / np.float32(rank**0.5), dtype),
        "v": jnp.asarray(v, dtype),
        "index": jnp.asarray(index),
        "cos": jnp.asarray(1.2 * np.cos(angle), jnp.float32),
        "sin": jnp.asarray(1.2 * np.sin(angle), jnp.float32),
    }


def listed_tokens(index: np.ndarray, size: int) -> np.ndarray:
    chunks = index[index < CHUNKS].astype(np.int64)
    return (chunks[:, None] * size + np.arange(size)).reshape(-1)


def expect(size: int, q, a, b, v, index, cos, sin, beside: tuple[np.ndarray, np.ndarray] | None = None):
    """Outputs `[B, H, G, D]` and sums of exponentials of the tokens of the lists, and of keys and values `beside`."""
    q, a, b, v, cos, sin = (np.asarray(x).astype(np.float64) for x in (q, a, b, v, cos, sin))
    half, index = q.shape[-1] // 2, np.asarray(index)
    out, total = np.zeros(q.shape), np.zeros(q.shape[:3])
    for row, head in np.ndindex(index.shape[:2]):
        token = listed_tokens(index[row, head], size)
        keys = a[row, token] @ b[row, head]
        turned = np.concatenate([-keys[:, half:], keys[:, :half]], axis=1)
        keys = keys * np.tile(cos[token], 2) + turned * np.tile(sin[token], 2)
        values = v[row, head, token]
        if beside is not None:
            keys, values = (
                np.concatenate(pair) for pair in ((keys, beside[0][row, head]), (values, beside[1][row, head]))
            )
        weights = np.exp(q[row, head] @ keys.T / np.sqrt(2 * half))
        total[row, head] = weights.sum(axis=1)
        out[row, head] = weights @ values / np.maximum(total[row, head], 1e-300)[:, None]
    return out, total


def attend(implementation: Implementation, arguments: dict[str, Any], size: int) -> Share:
    call = partial(pallas_kernels.lowrank_attention, size=size, implementation=implementation)
    return jax.jit(call)(**arguments)


def joined(share: Share) -> tuple[np.ndarray, np.ndarray]:
    """Sets as one: outputs and sums of exponentials."""
    out, lse = (np.asarray(x).astype(np.float64) for x in share)
    weights = np.exp(lse)
    total = weights.sum(axis=2)
    return np.sum(out * weights[..., None], axis=2) / np.maximum(total, 1e-300)[..., None], total


# Ranks and head dimensions that are no power of two, or no multiple of 16, and lists that are no multiple of a step.
@pytest.mark.parametrize("name", ["xla", "triton"])
@pytest.mark.parametrize(
    ("group", "dim", "rank", "size", "count", "dtype", "cores"),
    [
        (1, 64, 16, 8, 5, "float32", 1),
        (3, 80, 160, 8, 13, "float32", 24),
        (4, 128, 48, 16, 7, "float32", 24),
        (7, 16, 13, 1, 33, "float32", 8),
        (1, 96, 160, 8, 40, "bfloat16", 24),
        (3, 80, 100, 16, 11, "bfloat16", 24),
        (7, 128, 160, 16, 23, "bfloat16", 8),
        (16, 64, 80, 8, 37, "bfloat16", 24),
    ],
)
def test_attends_to_the_listed_chunks(name, group, dim, rank, size, count, dtype, cores):
    arguments = inputs(group, dim, rank, size, count, dtype)
    found = attend(kernel(name, cores), arguments, size)
    assert found.out.dtype == found.lse.dtype == jnp.float32
    assert found.lse.shape == found.out.shape[:-1]
    out, total = expect(size, **arguments)
    found_out, found_total = joined(found)
    check(found_out, out, TOLERANCE[dtype])
    check(found_total / np.maximum(total, 1), np.minimum(total, 1), TOLERANCE[dtype] * 2)
    assert np.all(np.asarray(found.lse)[0, 1] == np.float32(MASKED))
    assert not np.any(np.asarray(found.out)[0, 1])


@pytest.mark.parametrize(("dtype", "shared_memory"), [("float32", 232448), ("bfloat16", 49152)])
def test_a_list_is_split_and_its_parts_are_sets(dtype, shared_memory):
    arguments = inputs(4, 64, 48, 8, 40, dtype)
    found = attend(kernel("triton", 24, shared_memory), arguments, 8)
    assert found.out.shape[2] > 2
    lse = np.asarray(found.lse)
    assert np.any(lse[1, 0] == np.float32(MASKED))  # parts of a list with one chunk
    assert np.all(lse[1, 1] > 0)
    out, total = expect(8, **arguments)
    found_out, found_total = joined(found)
    check(found_out, out, TOLERANCE[dtype])
    check(found_total, total, TOLERANCE[dtype] * 2)


@pytest.mark.parametrize(("name", "dtype"), [("xla", "float32"), ("triton", "float32"), ("triton", "bfloat16")])
def test_beside_a_cache_it_is_one_softmax(name, dtype):
    arguments = inputs(3, 64, 48, 8, 21, dtype)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((ROWS, HEADS, 30, 64)), dtype) for _ in "kv")
    share = attend(kernel(name, 24), arguments, 8)
    length = jnp.full((ROWS, HEADS), 30, jnp.int32)
    found = jax.jit(pallas_kernels.decode_attention)(arguments["q"], k, v, length, beside=share)
    expected, _ = expect(8, **arguments, beside=(np.asarray(k, np.float64), np.asarray(v, np.float64)))
    check(found.out, expected, TOLERANCE[dtype])
    alone, _ = expect(8, **arguments)
    assert np.max(np.abs(alone - expected)) > 0.1


def test_triton_makes_nothing_of_the_size_of_the_prompt():
    arguments = inputs(2, 80, 80, 8, 5, "bfloat16")
    call = partial(pallas_kernels.lowrank_attention, size=8, implementation=kernel("triton", 24))
    made = jax.make_jaxpr(lambda x: call(**x))(arguments).jaxpr
    assert not primitives(made, arguments["a"].size // 2)


def test_refuses_what_triton_has_no_products_for():
    arguments = inputs(1, 40, 16, 8, 2, "float32")
    with pytest.raises(ValueError, match="multiples of 16, got 40"):
        attend(kernel("triton"), arguments, 8)
    with pytest.raises(ValueError, match="rank of 1024 does not fit"):
        attend(kernel("triton"), inputs(1, 128, 1024, 8, 2, "bfloat16"), 8)


@pytest.mark.parametrize(("gpu", "tokens"), [(dispatch.A100, 32), (dispatch.H200, 64)], ids=["a100", "h200"])
def test_tiles_fill_the_card_in_whole_rounds(gpu, tokens):
    triton = pytest.importorskip("pallas_kernels.lowrank_attention.triton", reason="this jax has no Triton")
    for heads in shapes.MODELS.values():
        for batch in (1, 8, 16, 32, 64):
            a, v = (
                jax.ShapeDtypeStruct(shape, jnp.bfloat16)
                for shape in ((batch, 32768, 160), (batch, heads.kv_heads, 32768, heads.head_dim))
            )
            cut = triton.tiles(a, v, heads.group, 2048, gpu)
            assert cut.tokens == (tokens if heads.head_dim == 128 else 64)
            steps, lists = 2048 // cut.tokens, batch * heads.kv_heads
            rounds = -(-lists * cut.splits // gpu.cores)
            # Against a card whose cores share out all steps evenly and start once.
            least = lists * steps / gpu.cores + triton.START
            assert rounds * (-(-steps // cut.splits) + triton.START) <= 1.35 * least
