"""The kernels of decode_attention, interpreted on CPU, against the jnp reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation, NewToken, Notes, Share, dispatch, shapes
from pallas_kernels.decode_attention import split

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}
# Slots in use: none, one, a rest, a tile, a tile and a rest, the whole cache. The third row is padding.
LENGTH = np.array([[1, 15], [17, 64], [0, 0], [109, -1]], np.int32)
ACTIVE = np.array([True, False, False, True])
WINDOW = 5


def kernel(name: Any, cores: int = 1) -> Implementation:
    """The kernel for a GPU with so few cores that the rows fill it, or with more, so that they are split."""
    chosen = Implementation(name, gpu=dispatch.Gpu(capability=90, cores=cores, shared_memory=232448), interpret=True)
    try:
        dispatch.find("decode_attention", chosen)
    except ValueError as error:
        pytest.skip(str(error))
    return chosen


def inputs(group: int, size: int, capacity: int, dtype: str) -> dict[str, Any]:
    """Arguments by name, NaN beyond the lengths, where the new token is not yet."""
    rng = np.random.default_rng([group, size, capacity])
    normal = partial(rng.standard_normal, dtype=np.float32)
    length = np.where(LENGTH < 0, capacity, np.minimum(LENGTH, capacity))
    rows, heads = length.shape
    k, v = (normal((rows, heads, capacity, size)) for _ in "kv")
    for b, h in np.ndindex(length.shape):
        k[b, h, length[b, h] - ACTIVE[b] :] = v[b, h, length[b, h] - ACTIVE[b] :] = np.nan
    k_new, v_new = (jnp.asarray(normal((rows, heads, size)), dtype) for _ in "kv")
    token = NewToken(k_new, v_new, jnp.asarray(ACTIVE))
    q = jnp.asarray(2 * normal((rows, heads, group, size)), dtype)
    pos = jnp.asarray(rng.integers(0, 99, (rows, heads, capacity)), jnp.int32)
    window = jnp.asarray(normal((rows, heads, WINDOW, group, size)), dtype)
    notes = Notes(jnp.asarray([200, 3, 0, 17], jnp.int32), pos, window)
    cache = {"k": jnp.asarray(k, dtype), "v": jnp.asarray(v, dtype)}
    return {"q": q, **cache, "length": length, "new": token, "notes": notes}


def expect(q, k, v, length, new, notes=None) -> pallas_kernels.Attended:
    """The reference in float32; what lies beyond the length is 0 for it."""
    del notes
    wide = partial(jnp.asarray, dtype=jnp.float32)
    k, v = (jnp.nan_to_num(wide(x)) for x in (k, v))
    new = new and NewToken(wide(new.k), wide(new.v), new.active)
    return pallas_kernels.decode_attention(wide(q), k, v, length, new, return_probs=True)


def attend(implementation: Implementation, arguments: dict[str, Any], return_probs: bool) -> pallas_kernels.Attended:
    call = partial(pallas_kernels.decode_attention, return_probs=return_probs, implementation=implementation)
    return jax.jit(call)(**arguments)


def check(found, expected, tolerance: float) -> None:
    found, expected = (np.asarray(x).astype(np.float32) for x in (found, expected))
    assert found.shape == expected.shape
    scale = np.max(np.abs(expected))
    assert scale > 0
    assert np.max(np.abs(found - expected)) <= tolerance * scale


def check_attended(found, arguments: dict[str, Any], return_probs: bool) -> None:
    dtype, expected = arguments["k"].dtype, expect(**arguments)
    assert found.out.dtype == dtype
    check(found.out, expected.out, TOLERANCE[dtype.name])
    if return_probs:
        assert found.probs.dtype == jnp.float32
        # One weight must not drown in the tolerance of another row.
        check(found.probs, expected.probs, TOLERANCE[dtype.name] / 10)
    else:
        assert found.probs is None
    check_written(found, arguments)


def check_written(found, arguments: dict[str, Any]) -> None:
    """The new token is where it belongs, and nothing else has changed."""
    names = ("q", "length", "new", "notes")
    check_notes(found.notes, **{name: arguments[name] for name in names})
    for name in "kv":
        found_cache = np.asarray(getattr(found, name)).astype(np.float32)
        np.testing.assert_array_equal(found_cache, filled(name, arguments))


def filled(name: str, arguments: dict[str, Any]) -> np.ndarray:
    """Keys or values with the new token among them."""
    cache = np.array(arguments[name]).astype(np.float32)
    if arguments["new"] is not None:
        for b, h in np.argwhere(ACTIVE[:, None] & (arguments["length"] > 0)):
            cache[b, h, arguments["length"][b, h] - 1] = getattr(arguments["new"], name)[b, h]
    return cache


def check_notes(found, *, q, length, new, notes) -> None:
    if new is None or notes is None:
        assert found is notes
        return
    pos, window = np.array(notes.pos), np.array(notes.window)
    for b, h in np.argwhere(ACTIVE[:, None] & (length > 0)):
        pos[b, h, length[b, h] - 1] = notes.place[b]
        if window.size:
            window[b, h, notes.place[b] % WINDOW] = q[b, h]
    np.testing.assert_array_equal(found.pos, pos)
    np.testing.assert_array_equal(found.window, window)


# Capacities that are no multiple of a tile or less than one, and head dimensions that are no power of two.
@pytest.mark.parametrize(
    ("group", "size", "capacity", "dtype", "cores"),
    [
        (1, 64, 109, "float32", 1),
        (1, 64, 109, "float32", 24),
        (3, 80, 150, "float32", 24),
        (4, 96, 640, "bfloat16", 1),
        (7, 128, 1152, "bfloat16", 24),
        (16, 16, 9, "float32", 24),
        (14, 16, 9, "bfloat16", 1),
    ],
)
def test_triton_writes_the_new_token_and_attends(group, size, capacity, dtype, cores):
    arguments = inputs(group, size, capacity, dtype)
    found = attend(kernel("triton", cores), arguments, True)
    check_attended(found, arguments, True)
    assert not np.any(np.asarray(found.out[2]).astype(np.float32))  # the row without a slot


@pytest.mark.parametrize(
    ("group", "size", "capacity", "dtype", "cores"), [(7, 80, 109, "bfloat16", 24), (4, 128, 200, "float32", 1)]
)
def test_triton_without_a_new_token(group, size, capacity, dtype, cores):
    arguments = inputs(group, size, capacity, dtype)
    arguments |= {"new": None, "notes": None, "length": arguments["length"] - ACTIVE[:, None].astype(np.int32)}
    check_attended(attend(kernel("triton", cores), arguments, False), arguments, False)


@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_backends_agree_on_the_contract(name):
    arguments = inputs(3, 64, 136, "bfloat16")
    check_attended(attend(kernel(name, cores=24), arguments, True), arguments, True)


@pytest.mark.parametrize("return_probs", [False, True])
def test_eager(return_probs):
    arguments = inputs(3, 16, 109, "float32")
    # It multiplies what lies beyond the length by 0.
    arguments |= {name: jnp.nan_to_num(arguments[name]) for name in "kv"}
    check_attended(attend(Implementation("eager"), arguments, return_probs), arguments, return_probs)


def tokens_beside(arguments: dict[str, Any], seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values of three sets of tokens, and which of them there are, `[B, H, S, T]`: some sets have none."""
    rng = np.random.default_rng([seed, 7])
    rows, heads, _, size = arguments["q"].shape
    k, v = (rng.standard_normal((rows, heads, 3, 5, size), np.float32) for _ in "kv")
    there = rng.random((rows, heads, 3, 5)) < 0.6
    there[:, :, 1] = there[2, 0] = False
    return k, v, there


def share_of(q, k: np.ndarray, v: np.ndarray, there: np.ndarray) -> Share:
    logits = np.einsum("bhgd,bhstd->bhsgt", np.asarray(q).astype(np.float32), k) * k.shape[-1] ** -0.5
    weights = np.exp(logits) * there[:, :, :, None]
    total = np.sum(weights, axis=-1)
    out = np.einsum("bhsgt,bhstd->bhsgd", weights, v) / np.maximum(total, 1e-30)[..., None]
    with np.errstate(divide="ignore"):
        return Share(jnp.asarray(out), jnp.asarray(np.where(total > 0, np.log(total), -1e30), jnp.float32))


def expect_kept(arguments: dict[str, Any], kept: np.ndarray, *beside: np.ndarray) -> np.ndarray:
    """A dense softmax over the slots that are `kept`, bool `[B, H, G, C]`, and over what `tokens_beside` gives."""
    q = np.asarray(arguments["q"]).astype(np.float64)
    keys, values = (np.nan_to_num(filled(name, arguments)).astype(np.float64) for name in "kv")
    if beside:
        rows, heads, group, _ = q.shape
        k, v, there = (x.reshape(rows, heads, -1, *x.shape[4:]) for x in beside)
        keys, values, there = np.concatenate([keys, k], 2), np.concatenate([values, v], 2), there[:, :, None]
        kept = np.concatenate([kept, np.broadcast_to(there, (rows, heads, group, there.shape[-1]))], -1)
    logits = np.where(kept, np.einsum("bhgd,bhcd->bhgc", q, keys) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.where(kept, np.exp(logits - np.max(logits, axis=-1, keepdims=True, initial=-1e30)), 0)
    total = np.maximum(np.sum(weights, axis=-1, keepdims=True), 1e-30)
    return np.einsum("bhgc,bhcd->bhgd", weights / total, values)


@pytest.mark.parametrize(
    ("name", "dtype", "cores"),
    [
        ("xla", "float32", 1),
        ("eager", "float32", 1),
        ("triton", "float32", 24),
        ("triton", "bfloat16", 1),
        ("mosaic", "bfloat16", 24),
    ],
)
def test_what_is_beside_takes_its_share(name, dtype, cores):
    arguments = inputs(3, 64, 136, dtype)
    if name in ("xla", "eager"):
        arguments |= {name: jnp.nan_to_num(arguments[name]) for name in "kv"}
    tokens = tokens_beside(arguments)
    call = partial(pallas_kernels.decode_attention, implementation=kernel(name, cores))
    found = jax.jit(call)(**arguments, beside=share_of(arguments["q"], *tokens))
    kept = np.arange(136) < arguments["length"][:, :, None, None]
    expected = expect_kept(arguments, np.broadcast_to(kept, (*arguments["q"].shape[:3], 136)), *tokens)
    assert found.out.dtype == dtype
    check(found.out, expected, TOLERANCE[dtype])
    assert not np.any(np.asarray(found.out[2, 0]).astype(np.float32))  # neither slots nor tokens beside them
    assert np.any(np.asarray(found.out[2, 1]).astype(np.float32))  # no slots
    check_written(found, arguments)


def test_what_is_beside_has_no_probabilities():
    arguments = inputs(2, 16, 16, "float32")
    share = share_of(arguments["q"], *tokens_beside(arguments))
    with pytest.raises(ValueError, match="leave out beside or return_probs"):
        pallas_kernels.decode_attention(**arguments, beside=share, return_probs=True)
    with pytest.raises(ValueError, match="cudnn keeps the sum of exponentials to itself; use triton or xla"):
        pallas_kernels.decode_attention(**arguments, beside=share, implementation=kernel("cudnn"))


def primitives(jaxpr: Any, least: int) -> dict[str, list[Any]]:
    """The equations, by primitive, that make an array of `least` elements or more; kernels are not looked into."""
    found: dict[str, list[Any]] = {}
    for equation in jaxpr.eqns:
        inner = getattr(equation.params.get("jaxpr"), "jaxpr", None)
        if inner is not None and equation.primitive.name != "pallas_call":
            for name, equations in primitives(inner, least).items():
                found.setdefault(name, []).extend(equations)
        elif any(var.aval.size >= least for var in equation.outvars):
            found.setdefault(equation.primitive.name, []).append(equation)
    return found


@pytest.mark.parametrize("return_probs", [False, True])
@pytest.mark.parametrize(("size", "capacity"), [(128, 640), (80, 109)])
def test_triton_makes_nothing_of_the_size_of_the_cache(size, capacity, return_probs):
    arguments = inputs(2, size, capacity, "bfloat16")
    call = partial(pallas_kernels.decode_attention, return_probs=return_probs, implementation=kernel("triton", 24))
    k = arguments["k"]
    found = primitives(jax.make_jaxpr(lambda x: call(**x))(arguments).jaxpr, k.size)
    assert list(found) == ["pallas_call"]
    (only,) = found["pallas_call"]
    aliased = [only.outvars[output].aval.shape for _, output in only.params["input_output_aliases"]]
    notes = arguments["notes"]
    assert sorted(aliased) == sorted(x.shape for x in (k, k, notes.pos, notes.window))


def test_parts_far_apart_and_empty_ones_combine():
    rng = np.random.default_rng(0)
    lse = rng.uniform(-1, 1, (2, 3, 7, 16)) + np.array([0, 900, -900, 0, 899, 5, 900]).reshape(7, 1)
    empty = rng.random(lse.shape) < 0.4
    empty[0, 0] = True
    out = np.where(empty[..., None], 0, rng.standard_normal((*lse.shape, 8)))
    lse = np.where(empty, -1e30, lse)
    share = np.exp(lse - lse.max(2, keepdims=True)) * ~empty
    share = share / np.maximum(share.sum(2, keepdims=True), 1e-30)
    parts = split.Partials(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32), None)
    found, none = split.combine(parts, jnp.ones((2, 3), jnp.int32), group=5)
    assert none is None
    # lse near 900 is itself exact to 6e-5 only.
    np.testing.assert_allclose(found, np.sum(share[..., None] * out, 2)[:, :, :5], atol=2e-4)
    assert not np.any(found[0, 0])


def test_group_is_padded_for_tensor_cores():
    for group, rows in ((1, 16), (7, 16), (16, 16), (17, 32)):
        q = split.pad_group(jnp.ones((1, 2, group, 8)))
        assert q.shape == (1, 2, rows, 8)
        assert float(jnp.sum(q)) == 2 * group * 8


@pytest.mark.parametrize("gpu", [dispatch.A100, dispatch.H200], ids=["a100", "h200"])
def test_splits_fill_the_card(gpu):
    for heads in shapes.MODELS.values():
        for cache in shapes.CACHES.values():
            rows, steps = cache.batch * heads.kv_heads, -(-cache.capacity // 64)
            splits = split.splits_for(rows, cache.capacity, 64, gpu)
            assert 1 <= splits <= steps
            assert rows * splits >= 1.5 * gpu.cores or splits == steps
            # One less would not, or one part would be long.
            assert splits == 1 or rows * (splits - 1) < 1.5 * gpu.cores or cache.capacity > 4096 * (splits - 1)


@pytest.mark.parametrize(
    ("size", "dtype", "return_probs", "reason"),
    [
        (64, "float32", False, "bfloat16 and float16, not float32"),
        (64, "bfloat16", True, "probabilities"),
        (20, "bfloat16", False, "multiples of 8 up to 256"),
        (264, "bfloat16", False, "multiples of 8 up to 256"),
    ],
)
def test_cudnn_refuses_what_it_cannot_do(size, dtype, return_probs, reason):
    with pytest.raises(ValueError, match=f"cudnn.*{reason}.*use triton or xla"):
        attend(kernel("cudnn"), inputs(2, size, 16, dtype), return_probs)
