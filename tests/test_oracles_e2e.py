"""Replays the authors' R-KV and G-KV codes decoding with tiny models: text, logits and kept positions."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import weights
from jkv.config import CacheSpec
from jkv.engine import Engine, Request, State
from jkv.models.decoder import Decoder
from jkv.policies.full import Full
from jkv.sampling import Sampling, seed_words
from oracle_cases import FOLDER, align, kept_by, policy_of, read
from pallas_kernels.dispatch import XLA, Implementation

MODELS = ("llama", "qwen2", "qwen3")
RUNS = sorted({path.stem.partition("_")[2] for path in (FOLDER / "e2e").glob("*.npz")})
TOLERANCE = 2e-4
REQUEST = Request(seed=jnp.asarray(seed_words(0)), eos=jnp.full((1,), -1, jnp.int32))


@functools.cache
def load(name: str) -> Decoder:
    return weights.load_parameters(weights.open_checkpoint(FOLDER / "models" / name))


def compaction_times(config: dict[str, Any], prompt_len: int) -> range:
    """Decoded tokens at each compaction: the G-KV code counts new tokens, the R-KV code the text, one token late."""
    every, new = config["divide_length"], config["max_new_tokens"]
    if not every:
        return range(0)
    return range(-prompt_len % every + 1 if config["algo"].startswith("rkv") else every, new, every)


def all_runs() -> list[Any]:
    """Every run with every model; by default each run with one of them, in turn."""
    return [
        pytest.param(model, run, marks=() if index % len(MODELS) == place else pytest.mark.slow)
        for index, run in enumerate(RUNS)
        for place, model in enumerate(MODELS)
    ]


@pytest.mark.parametrize(("model", "run"), all_runs())
def test_decoding(model: str, run: str) -> None:
    check_decoding(model, run, XLA)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "run"), [(model, run) for model in MODELS for run in RUNS])
def test_decoding_with_the_kernels_interpreted(model: str, run: str) -> None:
    check_decoding(model, run, Implementation("triton", elsewhere=("xla",), interpret=True))


def check_decoding(model: str, run: str, implementation: Implementation) -> None:
    """Replays a recorded generation."""
    config, arrays = read(FOLDER / "e2e" / f"{model}_{run}.npz")
    mask, new = arrays["attention_mask"], config["max_new_tokens"]
    (batch, longest), length = mask.shape, np.sum(mask, axis=1).astype(np.int32)
    pads = longest - length
    assert min(len(set(row)) for row in arrays["generated_ids"].tolist()) >= 5

    policy = policy_of(
        {**config["method_config"], "algo": config["algo"]}, batch=batch, interval=config["divide_length"]
    )
    decoder = load(config["model"])
    spec = CacheSpec.of(
        decoder.config,
        max_len=longest + new,
        max_new=new,
        max_prompt=longest,
        dtype="float32",
        implementation=implementation,
    )
    engine = Engine(config=decoder.config, policy=policy, spec=spec, sampling=Sampling(), keep_logits=True)
    parameters = nnx.state(decoder)
    state, out = engine.prefill(
        parameters,
        jnp.asarray(align(arrays["prompt_ids"].astype(np.int32), pads, 0)),
        jnp.asarray(length),
        jnp.full((batch,), new, jnp.int32),
        jnp.arange(batch, dtype=jnp.uint32),
        REQUEST,
    )
    outputs = [out]
    times = compaction_times(config, longest)
    compared = 0 if policy == Full() else assert_kept(arrays, state, pads, seen=longest)
    steps = math.gcd(*times) or 16
    for done in range(steps, new - 1 + steps, steps):
        state, out = engine.decode(parameters, state, REQUEST, steps=steps)
        outputs.append(out)
        if done in times:
            state = engine.compact(state)
            compared += assert_kept(arrays, state, pads, seen=longest + done)
    assert compared == len(arrays.get("event_layer", ()))
    assert_logits(arrays, np.concatenate([out.logits for out in outputs], axis=1)[:, :new])
    tokens = np.concatenate([out.tokens for out in outputs], axis=1)
    np.testing.assert_array_equal(tokens[:, :new], arrays["generated_ids"])
    assert (tokens[:, new:] == -1).all()


def assert_kept(arrays: dict[str, np.ndarray], state: State, pads: np.ndarray, *, seen: int) -> int:
    """Compares what every layer holds after `seen` tokens, padding counted; returns how many layers there were."""
    events = np.flatnonzero(arrays["event_seen"] == seen)
    assert sorted(arrays["event_layer"][events]) == list(range(len(state.stores)))
    for event in events:
        recorded = arrays["event_kept"][event] - pads.reshape(-1, 1, 1)
        kept = kept_by(state.stores[arrays["event_layer"][event]])
        for row, head in np.ndindex(recorded.shape[:2]):
            np.testing.assert_array_equal(kept[row][head], recorded[row, head][recorded[row, head] >= 0])
    return len(events)


def assert_logits(arrays: dict[str, np.ndarray], logits: np.ndarray) -> None:
    """Compares the largest logits of some steps, and the sum of all at every step."""
    top = np.take_along_axis(logits[:, arrays["top_step"]], arrays["top_ids"].astype(np.int32), axis=-1)
    np.testing.assert_allclose(top, arrays["top_logits"], atol=TOLERANCE, rtol=0)
    peak = np.max(logits, axis=-1, keepdims=True)
    total = np.log(np.sum(np.exp(logits - peak), axis=-1)) + peak[..., 0]
    np.testing.assert_allclose(total, arrays["logsumexp"], atol=TOLERANCE, rtol=0)
    assert np.std(arrays["top_logits"]) > 0.1
