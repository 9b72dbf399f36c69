"""Quest and ShadowKV against recordings of their authors' codes: choices, keys, and attention."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jkv.attention import attend
from jkv.cache import Prompt, Token
from jkv.config import CacheSpec, RopeConfig
from jkv.models import rope
from jkv.policies.quest import Quest
from jkv.policies.shadowkv import ShadowKV
from jkv.shadow import Shadow
from oracle_cases import FOLDER, read
from pallas_kernels.dispatch import XLA, Implementation

TOLERANCE = {"rtol": 0, "atol": 1e-4}
SHADOWS = ("shadowkv_unaligned_gqa3", "shadowkv_group7", "shadowkv_mha")
TRITON = Implementation("triton", elsewhere=("xla",), interpret=True)
every_implementation = pytest.mark.parametrize("implementation", [XLA, TRITON], ids=["xla", "triton"])


def grouped(q: np.ndarray, heads: int) -> jax.Array:
    """Queries `[B, H * G, ..., D]` as `[B, H, G, ..., D]`."""
    return jnp.asarray(q.reshape(q.shape[0], heads, -1, *q.shape[2:]))


def prompt_of(k: Any, v: Any, k_pre: Any, q: Any, implementation: Implementation) -> Prompt:
    batch, _, length, _ = k.shape
    return Prompt(
        q=jnp.asarray(q),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        k_pre=jnp.asarray(k_pre),
        tokens=jnp.zeros((batch, length), jnp.int32),
        length=jnp.full((batch,), length, jnp.int32),
        implementation=implementation,
    )


def spec_of(heads: int, group: int, dim: int, *, prompt: int, new: int, theta: float = 1e4) -> CacheSpec:
    rotation = RopeConfig(theta=theta)
    return CacheSpec(
        num_kv_heads=heads,
        group=group,
        head_dim=dim,
        max_len=prompt + new,
        max_new=new,
        max_prompt=prompt,
        rope=rotation,
    )


@every_implementation
@pytest.mark.parametrize("name", ["quest_gqa3", "quest_mha_partial_page"])
def test_quest(name, implementation):
    config, arrays = read(FOLDER / "retrieval" / f"{name}.npz")
    heads, size, pages = config["Hkv"], config["page_size"], config["pages_selected"]
    k, v, q = arrays["in_k"], arrays["in_v"], grouped(arrays["in_q"][:, :, 0], config["Hkv"])
    policy = Quest(page=size, budget=size * pages, share="head", last=False)
    # The last token is the one being decoded.
    no_queries = jnp.zeros((*k.shape[:2], q.shape[2], k.shape[2] - 1, k.shape[3]))
    prompt = prompt_of(k[:, :, :-1], v[:, :, :-1], k[:, :, :-1], no_queries, implementation)
    spec = spec_of(heads, q.shape[2], config["D"], prompt=config["S"] - 1, new=1)
    store = policy.append(policy.ingest(spec, prompt), token_of(q, k[:, :, -1], v[:, :, -1], config["S"] - 1))

    score = pallas_kernels.page_scores(q, store.bounds.high, store.bounds.low, implementation=implementation)
    expected = arrays["out_page_score"]
    np.testing.assert_allclose(score.reshape(expected.shape), expected, **TOLERANCE)
    view = policy.select(store, q, ())
    chosen = arrays["out_page_selected"].reshape(*view.pages.index.shape[:3], -1)
    assert 0 < pages < chosen.shape[-1]
    for index in np.ndindex(chosen.shape[:3]):
        assert sorted(view.pages.index[index].tolist()) == np.flatnonzero(chosen[index]).tolist()
    out = attend(q, view).out
    np.testing.assert_allclose(out.reshape(arrays["out_attn"].shape), arrays["out_attn"], **TOLERANCE)


def token_of(q: jax.Array, k: Any, v: Any, place: int) -> Token:
    batch = q.shape[0]
    return Token(
        q=q,
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        k_pre=jnp.asarray(k),
        token=jnp.zeros((batch,), jnp.int32),
        pos=jnp.full((batch,), place, jnp.int32),
        active=jnp.ones((batch,), bool),
    )


def shadow_case(name: str, implementation: Implementation) -> tuple[dict, dict, ShadowKV, CacheSpec, Prompt]:
    """A recording, and what it was made from."""
    config, arrays = read(FOLDER / "retrieval" / f"{name}.npz")
    heads, size, length = config["Hkv"], config["D"], config["S"]
    efficient = config["method"] == "shadowkv_cpu_prefill"
    k_pre, v = (arrays[key] if efficient else arrays[key][0] for key in ("in_k_pre", "in_v"))
    cos, sin = (jnp.asarray(arrays[key][:length, : size // 2]) for key in ("in_cos", "in_sin"))
    q = np.zeros((config["B"], heads, config["Hq"] // heads, length, size), np.float32)
    if efficient:
        q[:, :, :, -1] = rope.rotate(grouped(arrays["in_q_last"][:, :, 0], heads), *rows(cos[-1], sin[-1], 4))
    prompt = prompt_of(rope.rotate(jnp.asarray(k_pre), *rows(cos, sin, 4)), v, k_pre, q, implementation)
    policy = ShadowKV(
        budget=config["sparse_budget"],
        rank=config["rank"],
        chunk=config["chunk_size"],
        outliers=config["outlier_chunks"],
        local=config["local_chunks"],
        variant="efficient" if efficient else "accuracy",
    )
    theta = config.get("rope_theta", 1e4)
    spec = spec_of(heads, q.shape[2], size, prompt=length, new=config.get("T", 1), theta=theta)
    table = rope.cos_sin(spec.rope, size, jnp.arange(length, dtype=jnp.int32))
    np.testing.assert_allclose(table[0], cos, **TOLERANCE)
    return config, arrays, policy, spec, prompt


def rows(cos: jax.Array, sin: jax.Array, ndim: int) -> tuple[jax.Array, jax.Array]:
    """A rotation that broadcasts against `ndim` axes."""
    return tuple(x.reshape((1,) * (ndim - x.ndim) + x.shape) for x in (cos, sin))  # type: ignore


def ingest(policy: ShadowKV, spec: CacheSpec, prompt: Prompt) -> Shadow:
    return jax.jit(lambda prompt: policy.ingest(spec, prompt))(prompt)


def check_chunks(arrays: dict, store: Any, spec: CacheSpec, landmarks: np.ndarray, ids: np.ndarray) -> None:
    """The candidates, their landmarks and the product of the factors."""
    for index in np.ndindex(ids.shape[:2]):
        np.testing.assert_array_equal(np.flatnonzero(store.candidate[index]), ids[index])
        np.testing.assert_allclose(np.asarray(store.landmarks[index])[ids[index]], landmarks[index], **TOLERANCE)
    expected = arrays["out_kpre_lowrank"]
    expected = expected if expected.ndim == 4 else expected[0]
    made = jnp.einsum("btr,bhrd->bhtd", store.a, store.b)[:, :, : expected.shape[2]]
    np.testing.assert_allclose(made, expected, **TOLERANCE)


@pytest.mark.parametrize(("name", "implementation"), [*((name, XLA) for name in SHADOWS), (SHADOWS[0], TRITON)])
def test_shadowkv(name, implementation):
    config, arrays, policy, spec, prompt = shadow_case(name, implementation)
    heads = config["Hkv"]
    store, length = ingest(policy, spec, prompt), config["S"]

    @jax.jit
    def decode(store: Shadow, token: Token) -> tuple[jax.Array, jax.Array, Shadow]:
        store = policy.append(store, token)
        view = policy.select(store, token.q, policy.shared(spec, 1))
        attended = attend(token.q, view)
        assert view.beside is not None
        return view.beside.index, attended.out, policy.settle(store, attended)

    check_chunks(arrays, store, spec, arrays["out_landmark"][0], arrays["out_landmark_chunk"][0])
    outliers = np.sort(arrays["out_outlier_chunks_sorted"][0], axis=-1)
    kept = outliers[..., None] * policy.chunk + np.arange(policy.chunk)
    for index in np.ndindex(kept.shape[:2]):
        expected = [*kept[index].ravel(), *range(length - config["prefill_local"], length)]
        assert store.exact.pos[index][: len(expected)].tolist() == expected
    for step in range(config["T"]):
        cos, sin = rope.cos_sin(spec.rope, config["D"], jnp.asarray([length + step]))
        q, k = (rope.rotate(jnp.asarray(arrays[f"in_{x}_steps"][step, 0, :, :, 0]), cos[None], sin[None]) for x in "qk")
        q = grouped(np.asarray(q), heads)
        token = token_of(q, k, arrays["in_v_steps"][step, 0, :, :, 0], length + step)
        index, out, store = decode(store, token)
        chosen = arrays["out_selected_chunks_sorted"][step, 0]
        assert chosen.shape[-1] < arrays["out_landmark_chunk"].shape[-1]
        np.testing.assert_array_equal(index, chosen)
        expected = arrays["out_attn_steps"][step, 0, :, :, 0]
        np.testing.assert_allclose(out.reshape(expected.shape), expected, **TOLERANCE)
    np.testing.assert_array_equal(store.exact.length, store.exact.length[0, 0])


def test_shadowkv_first_keys_are_exact_in_the_efficient_variant():
    config, arrays, policy, spec, prompt = shadow_case("shadowkv_cpu_prefill_b2", XLA)
    store = ingest(policy, spec, prompt)
    check_chunks(arrays, store, spec, arrays["out_landmark"], arrays["out_landmark_chunk"])
    first = arrays["out_first_selected_chunks_order"]
    np.testing.assert_array_equal(store.fresh, np.sort(first, axis=-1))
    # The recording has the end of the prompt, then outliers, then the chosen chunks in the order of their scores.
    local, begin, end = config["prefill_local"], config["sparse_start"], config["sparse_end"]
    for row, head in np.ndindex(first.shape[:2]):
        order = np.argsort(first[row, head])
        slots = (order[:, None] * policy.chunk + np.arange(policy.chunk)).ravel() + begin
        expected = np.concatenate([slots, np.arange(local)])
        for name, held in (("out_buf_k", store.exact.k), ("out_buf_v", store.exact.v)):
            found, recorded = np.asarray(held[row, head]), arrays[name][row, head]
            count = int(store.exact.length[row, head])
            found = np.concatenate([found[: end - begin], found[count - local : count]])
            np.testing.assert_allclose(found, recorded[expected], **TOLERANCE)


def test_shadowkv_chunks_lose_their_exact_keys_once_they_are_not_chosen():
    config, _, policy, spec, prompt = shadow_case("shadowkv_cpu_prefill_b2", XLA)
    store, plan = ingest(policy, spec, prompt), policy.shared(spec, 2)
    none, rng = store.landmarks.shape[2], np.random.default_rng(0)
    first, at = np.asarray(store.fresh), np.arange(policy.chunk)
    q = jnp.asarray(2 * rng.standard_normal((2, 2, 2, config["D"]), np.float32))
    token = token_of(q, *rng.standard_normal((2, 2, 2, config["D"]), np.float32), config["S"])
    after = policy.append(store, token)
    chosen, view = np.asarray(policy.choose_chunks(after, q)), policy.select(after, q, plan)
    attended = attend(q, view)
    after = policy.observe(policy.settle(after, attended), token, None)
    stayed = 0
    for index in np.ndindex(2, 2):
        both = sorted({*first[index].tolist()} & {*chosen[index].tolist()})
        stayed += len(both)
        assert [chunk for chunk in after.fresh[index].tolist() if chunk < none] == both
        # Exact keys for those that stayed, made ones for the others, and what is always read.
        k = np.einsum("tr,rd->td", store.a[index[0]], store.b[index])
        k = np.array(rope.rotate(jnp.asarray(k), plan[0], plan[1]))
        exact = (np.array(both, int)[:, None] * policy.chunk + at).ravel()
        k[exact] = np.asarray(prompt.k[index])[exact]
        read = np.sort((chosen[index][:, None] * policy.chunk + at).ravel())
        slots = np.arange(store.begin, int(after.exact.length[index]))
        keys = np.concatenate([k[read], np.asarray(after.exact.k[index])[slots]])
        values = np.concatenate([np.asarray(prompt.v[index])[read], np.asarray(after.exact.v[index])[slots]])
        logits = np.asarray(q[index]) @ keys.T * config["D"] ** -0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        np.testing.assert_allclose(attended.out[index], weights / weights.sum(-1, keepdims=True) @ values, **TOLERANCE)
    assert 0 < stayed < chosen.size
    idle = policy.observe(store, replace(token, active=jnp.zeros(2, bool)), None)
    np.testing.assert_array_equal(idle.fresh, first)
