"""The jnp references of the kernels against plain numpy in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def wide(*arrays) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def check(found, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    found = np.asarray(found).astype(np.float64)
    assert found.shape == expected.shape
    assert np.max(np.abs(found - expected)) <= tolerance


def decode_reference(q, k, v, length) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = wide(q, k, v)
    out, probs = np.zeros(q.shape), np.zeros((*q.shape[:3], k.shape[2]))
    for b, h, g in np.ndindex(q.shape[:3]):
        n = int(length[b, h])
        if n:
            probs[b, h, g, :n] = softmax(k[b, h, :n] @ q[b, h, g] / np.sqrt(q.shape[-1]))
            out[b, h, g] = probs[b, h, g, :n] @ v[b, h, :n]
    return out, probs


# One slot, a few, exactly a block, more than one, several and a rest.
@pytest.mark.parametrize("capacity", [1, 40, 256, 257, 600])
@pytest.mark.parametrize(("group", "size"), [(1, 16), (3, 80), (7, 16)])
def test_decode_attention(capacity, group, size):
    q, k, v = 2 * normal(3, 2, group, size), normal(3, 2, capacity, size), normal(3, 2, capacity, size, seed=1)
    length = np.array([[0, capacity], [1, capacity // 2], [capacity, max(capacity - 1, 0)]], np.int32)
    for b, h in np.ndindex(length.shape):  # what stands beyond the length is never looked at
        k[b, h, length[b, h] :] = 1e4
        v[b, h, length[b, h] :] = 1e4
    expected, expected_probs = decode_reference(q, k, v, length)
    attend = jax.jit(pallas_kernels.decode_attention, static_argnames="return_probs")
    out, none, *_ = attend(q, k, v, length)
    same, probs, *_ = attend(q, k, v, length, return_probs=True)
    assert none is None
    check(out, expected)
    check(same, expected)
    check(probs, expected_probs)
    assert np.ptp(expected) > 0.1


def test_decode_attention_of_every_length():
    capacity = 300
    q, k, v = normal(43, 1, 2, 16), normal(43, 1, capacity, 16), normal(43, 1, capacity, 16, seed=1)
    length = np.arange(0, 301, 7, dtype=np.int32).reshape(-1, 1)
    check(pallas_kernels.decode_attention(q, k, v, length)[0], decode_reference(q, k, v, length)[0])
    # The longest row alone decides how many blocks are read.
    for row in (3, 20, 42):
        alone = pallas_kernels.decode_attention(*(x[row : row + 1] for x in (q, k, v, length)))[0]
        check(alone, decode_reference(q, k, v, length)[0][row : row + 1])


def test_decode_attention_in_bfloat16_sums_in_float32():
    q, k, v = (
        jnp.asarray(x, jnp.bfloat16) for x in (normal(1, 1, 2, 64), normal(1, 1, 600, 64), normal(1, 1, 600, 64))
    )
    length = np.array([[600]], np.int32)
    out, probs, *_ = pallas_kernels.decode_attention(q, k, v, length, return_probs=True)
    assert out.dtype == jnp.bfloat16
    assert probs is not None
    assert probs.dtype == jnp.float32
    expected, expected_probs = decode_reference(q, k, v, length)
    check(probs, expected_probs, 1e-5)
    check(out, expected, 1e-2)


@pytest.mark.parametrize("block", [16, 64, 512])
@pytest.mark.parametrize(("group", "length", "size"), [(1, 1, 16), (3, 50, 80), (7, 64, 16), (2, 100, 16)])
def test_prefill_attention(block, group, length, size):
    q, k, v = 2 * normal(2, 2, group, length, size), normal(2, 2, length, size), normal(2, 2, length, size, seed=1)
    out = jax.jit(pallas_kernels.prefill_attention, static_argnames="block")(q, k, v, block=block)
    wq, wk, wv = wide(q, k, v)
    scores = np.einsum("bhgtd,bhcd->bhgtc", wq, wk) / np.sqrt(size)
    probs = softmax(np.where(np.tri(length, dtype=bool), scores, -np.inf))
    check(out, np.einsum("bhgtc,bhcd->bhgtd", probs, wv))


def window_reference(q, k, length, reduce: str, shift: float) -> np.ndarray:
    q, k = wide(q, k)
    window, size = q.shape[3:]
    score = np.zeros(k.shape[:3])
    for b, h in np.ndindex(k.shape[:2]):
        n = int(length[b, h])
        first = n - window
        if first <= 0:
            continue
        logits = np.einsum("gwd,cd->gwc", q[b, h], k[b, h, :n]) / np.sqrt(size)
        if reduce == "probs":
            later = np.arange(n)[None] > first + np.arange(window)[:, None]
            probs = softmax(np.where(later, -np.inf, logits)).max(axis=0)[:, :first]
        else:
            probs = softmax(logits.max(axis=0)[:, :first])
        score[b, h, :first] = probs.mean(axis=0)
        if shift:
            score[b, h, :first] += shift * probs.std(axis=0, ddof=1)
    return score


@pytest.mark.parametrize("reduce", ["probs", "logits"])
@pytest.mark.parametrize(("window", "shift"), [(1, 0.0), (4, 0.0), (4, 200.0)])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_window_scores(reduce, window, shift, group):
    q, k = 3 * normal(4, 2, group, window, 16), normal(4, 2, 24, 16)
    length = np.array([[24, 23], [5, 6], [window, 12], [0, 1]], np.int32)
    score = jax.jit(pallas_kernels.window_scores, static_argnames=("reduce", "shift"))(
        q, k, length, reduce=reduce, shift=shift
    )
    assert score.dtype == jnp.float32
    check(score, window_reference(q, k, length, reduce, shift), 1e-5 * max(shift, 1))


def test_modes_of_window_scores_differ():
    q, k, length = normal(1, 1, 3, 4, 16), normal(1, 1, 24, 16), np.array([[24]], np.int32)
    probs, logits = (pallas_kernels.window_scores(q, k, length, reduce=mode) for mode in ("probs", "logits"))
    assert np.max(np.abs(np.asarray(probs - logits))) > 1e-2
    assert abs(float(jnp.sum(logits)) - 1) < 1e-5  # "logits" shares everything out among the slots before the window


def redundancy_reference(k, length, threshold: float, retain: str) -> np.ndarray:
    (k,) = wide(k)
    result = np.zeros(k.shape[:3])
    for b, h in np.ndindex(k.shape[:2]):
        n = int(length[b, h])
        if not n:
            continue
        unit = k[b, h, :n] / (np.linalg.norm(k[b, h, :n], axis=-1, keepdims=True) + 1e-6)
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, 0)
        for key in range(n):
            similar = np.flatnonzero(cosine[:, key] > threshold)
            if retain == "first":
                cosine[0, key] = 0
            elif len(similar):
                cosine[similar[-1], key] = 0
            elif retain == "last":
                cosine[0, key] = 0
        result[b, h, :n] = softmax(cosine.sum(axis=1) / n)
    return result


def clustered_keys(*shape: int, clusters: int = 9) -> np.ndarray:
    """Keys around a few centres: most have similar ones, a part of them has none."""
    rng = np.random.default_rng(shape)
    centres = rng.standard_normal((clusters, shape[-1])).astype(np.float32)
    noise = rng.standard_normal(shape).astype(np.float32)
    lonely = rng.random(shape[:-1]) < 0.2
    return np.where(lonely[..., None], 3 * noise, centres[rng.integers(0, clusters, shape[:-1])] + 0.5 * noise)


@pytest.mark.parametrize("retain", ["recent", "last", "first"])
@pytest.mark.parametrize("capacity", [9, 256, 300])
def test_key_redundancy(retain, capacity):
    k = clustered_keys(2, 2, capacity, 16)
    length = np.array([[capacity, capacity - 3], [1, 0]], np.int32)
    for b, h in np.ndindex(length.shape):
        k[b, h, length[b, h] :] = 7.0
    found = jax.jit(pallas_kernels.key_redundancy, static_argnames=("threshold", "retain"))(
        k, length, threshold=0.6, retain=retain
    )
    expected = redundancy_reference(k, length, 0.6, retain)
    scale = 1 / capacity  # of one entry: it must not drown in the tolerance
    assert np.ptp(expected[0, 0]) > 0.05 * scale
    check(found, expected, 1e-5 * scale * 10)


def test_modes_of_key_redundancy_differ():
    k, length = clustered_keys(1, 1, 64, 16), np.array([[64]], np.int32)
    found = [pallas_kernels.key_redundancy(k, length, threshold=0.6, retain=r) for r in ("recent", "last", "first")]
    for i, j in ((0, 1), (1, 2), (0, 2)):
        assert np.max(np.abs(np.asarray(found[i] - found[j]))) > 1e-5


def shapes_in(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of everything that a program computes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (var.aval.shape for var in equation.outvars)
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


def test_key_redundancy_forms_no_square():
    k, length = jnp.zeros((1, 1, 1024, 16)), jnp.zeros((1, 1), jnp.int32)
    shapes = list(shapes_in(jax.make_jaxpr(pallas_kernels.key_redundancy)(k, length).jaxpr))
    assert (1, 1, 1024, 256) in shapes
    assert max(int(np.prod(shape)) for shape in shapes) < 1024 * 1024 // 2


levels = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf])


@given(st.lists(levels, min_size=12, max_size=12), st.integers(0, 8))
def test_select_top_takes_the_earliest_of_equal_scores(scores, count):
    score = np.array(scores, np.float32).reshape(1, 1, -1)
    found = np.asarray(pallas_kernels.select_top(score, np.full((1, 1), count, np.int32), most=8))[0, 0]
    expected = np.sort(np.argsort(-score[0, 0], kind="stable")[:count])
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, [*expected, *[12] * (8 - count)])


def test_select_top_of_each_row_by_its_own_count():
    score = np.round(normal(3, 2, 500), 1)
    count = np.array([[0, 1], [255, 256], [17, 300]], np.int32)
    found = jax.jit(pallas_kernels.select_top, static_argnames="most")(score, count, most=300)
    for b, h in np.ndindex(count.shape):
        best = np.sort(np.argsort(-score[b, h], kind="stable")[: count[b, h]])
        np.testing.assert_array_equal(found[b, h], [*best, *[500] * (300 - count[b, h])])


@pytest.mark.parametrize("shape", [(2, 3, 20), (2, 3, 20, 5), (2, 3, 20, 4, 2)])
@pytest.mark.parametrize("most", [1, 8, 20])
def test_compact_gathers_to_the_front_and_leaves_the_rest(shape, most):
    rng = np.random.default_rng(most)
    x = normal(*shape)
    index = np.full((2, 3, most), 20, np.int32)
    count = rng.integers(0, most + 1, (2, 3))
    for b, h in np.ndindex(2, 3):
        index[b, h, : count[b, h]] = np.sort(rng.choice(20, count[b, h], replace=False))
    found = np.asarray(jax.jit(pallas_kernels.compact)((x,), index)[0])
    for b, h in np.ndindex(2, 3):
        n = count[b, h]
        np.testing.assert_array_equal(found[b, h, :n], x[b, h, index[b, h, :n]])
        np.testing.assert_array_equal(found[b, h, most:], x[b, h, most:])
