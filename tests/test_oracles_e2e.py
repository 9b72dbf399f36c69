"""Replays the authors' R-KV and G-KV codes decoding with tiny models: text, logits and kept positions."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle_cases import FOLDER, policy_of, read

import weights
from jkv.config import CacheSpec
from jkv.engine import Engine, Request, State
from jkv.sampling import Sampling, seed_words

CASES = sorted(path.stem for path in FOLDER.glob("e2e_*.npz"))
TOLERANCE = 2e-4
ALGOS = {"gkv": "gkv_repo_score", "gkvstream": "gkv_repo_streamingllm", "rkvstream": "streamingllm"}
REQUEST = Request(seed=jnp.asarray(seed_words(0)), eos=jnp.full((1,), -1, jnp.int32))


class Model(NamedTuple):
    """A decoder as the engine takes it, and the sizes that a cache needs."""

    graph: nnx.GraphDef[Any]
    weights: nnx.State
    sizes: dict[str, int]


@functools.cache
def load(name: str) -> Model:
    checkpoint = weights.open_checkpoint(FOLDER / name)
    config = checkpoint.config
    sizes = {"num_kv_heads": config.num_kv_heads, "group": config.group, "head_dim": config.head_dim}
    return Model(*nnx.split(weights.load_parameters(checkpoint)), sizes)


def compaction_times(config: dict[str, Any], prompt_len: int) -> Iterator[int]:
    """Decoded tokens at each compaction: G-KV's code counts new tokens, R-KV's the whole text, one forward late."""
    every, last = config["divide_length"], config["max_new_tokens"] - 1
    first = -prompt_len % every + 1 if config["algo"].startswith("rkv") else every
    yield from range(first, last + 1, every)


@pytest.mark.parametrize("name", CASES)
def test_decoding(name: str) -> None:
    config, arrays = read(name)
    mask, new = arrays["attention_mask"], config["max_new_tokens"]
    batch, longest = mask.shape
    pads, length = np.sum(mask == 0, axis=1), np.sum(mask, axis=1).astype(np.int32)
    assert min(len(set(row)) for row in arrays["generated_ids"].tolist()) >= 5

    method = {**config["method_config"], "algo": ALGOS.get(config["algo"], config["algo"])}
    method.setdefault("kernel_size", 5 if config["algo"] == "gkv" else 7)
    policy = policy_of(method, batch=batch, interval=config["divide_length"])
    model = load(config["model"])
    spec = CacheSpec(**model.sizes, max_len=longest + new, max_new=new)
    engine = Engine(graph=model.graph, policy=policy, spec=spec, sampling=Sampling(), keep_logits=True)
    prompts = np.stack([np.roll(row, -pad) for row, pad in zip(arrays["prompt_ids"], pads, strict=True)])
    row = jnp.arange(batch, dtype=jnp.uint32)
    limit = jnp.full((batch,), new, jnp.int32)
    state, out = engine.prefill(model.weights, jnp.asarray(prompts), jnp.asarray(length), limit, row, REQUEST)
    tokens, logits = [out.tokens], [out.logits]

    recorded = Kept(arrays, pads)
    if policy.interval:
        recorded.compare(policy, state, seen=longest)
    times = set(compaction_times(config, longest)) if policy.interval else set()
    steps = math.gcd(*times) if times else 19
    for done in range(steps, new - 1 + steps, steps):
        state, out = engine.decode(model.weights, state, REQUEST, steps=steps)
        tokens.append(out.tokens)
        logits.append(out.logits)
        if done in times:
            state = engine.compact(state)
            recorded.compare(policy, state, seen=longest + done)
    assert recorded.compared == len(arrays.get("ev_layer", ()))
    np.testing.assert_array_equal(np.concatenate(tokens, axis=1)[:, :new], arrays["generated_ids"])
    ours = np.concatenate(logits, axis=1)[:, :new]
    top = np.take_along_axis(ours, arrays["logits_top_ids"].astype(np.int32), axis=-1)
    np.testing.assert_allclose(top, arrays["logits_top_vals"], atol=TOLERANCE, rtol=0)
    peak = ours.max(axis=-1)
    total = peak + np.log(np.sum(np.exp(ours - peak[..., None]), axis=-1))
    np.testing.assert_allclose(total, arrays["logits_lse"], atol=TOLERANCE, rtol=0)


class Kept:
    """The recorded positions after each compaction."""

    def __init__(self, arrays: dict[str, np.ndarray], pads: np.ndarray):
        self.arrays, self.pads, self.compared = arrays, pads, 0

    def compare(self, policy: Any, state: State, *, seen: int) -> None:
        events = np.flatnonzero(self.arrays["ev_cur_len"] == seen)
        assert len(events) == len(state.stores)
        for event in events:
            store = state.stores[self.arrays["ev_layer"][event]]
            pos, length = np.asarray(policy.positions(store)), np.asarray(store.length)
            for row, head in np.ndindex(length.shape):
                want = self.arrays["ev_kept_pos"][event, row, head] - self.pads[row]
                if self.arrays["ev_len_after"][event] == self.arrays["ev_len_before"][event]:
                    print("uncompressed", want)
                np.testing.assert_array_equal(pos[row, head, : length[row, head]], want[want >= 0])
            self.compared += 1
