"""What a run takes in memory, predicted and compiled; the largest run that fits."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.engine import Engine, Request
from jkv.memory import (
    abstract_weights,
    find_largest,
    largest_batch,
    largest_budget,
    longest_answer,
    measure_programs,
    total_memory,
)
from jkv.plan import parse_bytes
from jkv.policies import get_policy
from jkv.sampling import Sampling
from jkv.workspace import workspace
from models import make_engine, tiny, token_ids

WIDE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
}
POLICIES = (
    "full",
    "gkv:budget=96,window=8",
    "h2o@gkv:budget=96",
    "streamingllm:budget=96",
    "quest:budget=64",
    "shadowkv:budget=64",
    "specontext:budget=96",
)
BATCH, PROMPT, NEW = 4, 128, 128
FLOAT = 4  # bytes


def engine_of(text: str, *, new: int = NEW, prompt: int = PROMPT) -> Engine:
    """An engine for a model whose programs take megabytes."""
    model = tiny(**WIDE)
    policy = get_policy(text).prepare(token_ids).adapt(model.config)
    return make_engine(model, policy, longest=prompt, new=new, sampling=Sampling(temperature=0.6, top_p=0.9))[0]


def workspace_of(function: Any, *shapes: tuple[int, ...], donated: tuple[int, ...] = ()) -> int:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = jax.jit(function, donate_argnums=donated).trace(*args)
    return workspace(traced.jaxpr, [i in donated for i in range(len(args))], platform="cpu")


def test_what_is_fused_takes_nothing():
    assert workspace_of(lambda x: jnp.exp(x) * 2 + 1, (64, 64)) == 0
    assert workspace_of(lambda x: jnp.sum(jnp.exp(x), axis=1), (64, 64)) < 64 * 64 * FLOAT + 1


def test_a_product_between_two_takes_its_size():
    product = lambda x, y, z: jax.nn.relu(x @ y) @ z  # noqa: E731
    assert workspace_of(product, (8, 32), (32, 128), (128, 4)) == 8 * 128 * FLOAT


def test_buffers_whose_time_is_over_are_used_again():
    def deep(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(9):
            x = jnp.tanh(x @ y)
        return x

    assert 2 * 64 * 64 * FLOAT <= workspace_of(deep, (64, 64), (64, 64)) <= 3 * 64 * 64 * FLOAT


def test_an_update_of_what_is_taken_over_is_in_place():
    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[3].set(y)

    assert workspace_of(put, (64, 64), (64,), donated=(0,)) == 0
    # What is read after the update cannot be overwritten.
    late = lambda x, y: (x.at[3].set(y), x @ x)  # noqa: E731
    assert workspace_of(late, (64, 64), (64,), donated=(0,)) >= 64 * 64 * FLOAT


def test_a_loop_takes_what_its_body_takes_once():
    def loop(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 50, lambda _, x: jax.nn.relu(x @ y) @ z, x)

    inner, carried = 8 * 256 * FLOAT, 8 * 16 * FLOAT
    assert inner <= workspace_of(loop, (8, 16), (16, 256), (256, 16)) <= inner + 2 * carried + 64


def compiled_temps(engine: Engine) -> dict[str, int]:
    """Bytes of workspace of the programs as they are compiled, the most of each kind."""
    found: dict[str, int] = {}
    names = {"read_layer": "prefill", "decode": "decode", "compact_store": "compact"}
    known = set()

    def call(function: Any, static: Any, *args: Any, **options: Any) -> Any:
        name = names[function.__name__]
        if (name, static) not in known:
            known.add((name, static))
            temp = function.lower(static, *args, **options).compile().memory_analysis().temp_size_in_bytes
            found[name] = max(found.get(name, 0), temp)
        return jax.eval_shape(partial(function, static, **options), *args)

    weights = abstract_weights(engine.config, "float32")
    brought = engine.policy.bring(engine.config, "float32")
    request = Request(jnp.zeros(2, jnp.uint32), jnp.full(8, -1, jnp.int32), brought)
    lengths, rows = np.full(BATCH, PROMPT, np.int32), np.arange(BATCH, dtype=np.uint32)
    tokens = np.zeros((BATCH, PROMPT), np.int32)
    state, _ = engine.prefill(weights, tokens, lengths, lengths, rows, request, call=call)
    call(Engine.decode, engine, weights, state, request, steps=engine.steps)
    if engine.policy.interval:
        engine.compact(state, call=call)
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=lambda text: text.partition(":")[0])
def test_a_prediction_is_within_a_tenth_of_what_is_compiled(policy):
    engine = engine_of(policy)
    predicted = measure_programs(engine, batch=BATCH, prompt=PROMPT, platform="cpu")
    compiled = compiled_temps(engine)
    assert predicted.keys() == compiled.keys()
    total = max(predicted[name].held + temp for name, temp in compiled.items())
    assert total_memory(predicted) == pytest.approx(total, rel=0.1)
    for name, temp in compiled.items():
        if temp > 0.1 * total:
            assert 0.5 < predicted[name].workspace / temp < 2, name
    assert max(compiled.values()) > 0.2 * total  # or nothing would be shown


def test_the_account_of_a_run_that_refills():
    peaks = measure_programs(engine_of("gkv:budget=96"), batch=8, prompt=PROMPT, platform="cpu", refills=True)
    assert list(peaks) == ["prefill", "refill", "admit", "decode", "compact"]
    assert peaks["admit"].held > peaks["decode"].held  # the row beside the batch
    assert peaks["refill"].workspace < peaks["prefill"].workspace


def test_long_prompts_are_read_one_after_the_other():
    engine = engine_of("gkv:budget=96", prompt=8192)
    where = {"batch": 8, "prompt": 8192, "platform": "cpu"}
    peaks = measure_programs(engine, **where)
    assert "refill" in peaks and peaks["prefill"].workspace < peaks["refill"].workspace
    assert list(measure_programs(engine, **where | {"batch": 4})) == ["prefill", "decode", "compact"]


@given(st.integers(0, 10**6), st.integers(1, 5000), st.integers(0, 3000), st.integers(1, 4000), st.integers(1, 64))
def test_the_largest_that_fits_is_found(memory, slope, base, most, step):
    def total(n: int) -> int:
        return base + slope * (-(-n // step)) * step

    found = find_largest(total, memory, least=base, most=most)
    assert found == max((n for n in range(1, most + 1) if total(n) <= memory), default=0)


def test_one_more_row_does_not_fit():
    engine = engine_of("gkv:budget=96")
    where = {"prompt": PROMPT, "platform": "cpu"}
    memory = 96 << 20
    rows = largest_batch(engine, **where, memory=memory)
    assert rows > 1
    assert total_memory(measure_programs(engine, batch=rows, **where)) <= memory
    assert total_memory(measure_programs(engine, batch=rows + 1, **where)) > memory
    assert largest_batch(engine, **where, memory=memory, most=2) == 2
    assert largest_batch(engine, **where, memory=1 << 20) == 0
    least = replace(engine, policy=replace(engine.policy, budget=64))
    memory = total_memory(measure_programs(least, batch=rows, **where))
    assert largest_budget(engine, batch=rows, **where, memory=memory) == 64
    assert largest_budget(replace(engine, policy=get_policy("full")), batch=1, **where, memory=memory) == 0


def test_the_longest_answer_that_fits():
    where = {"batch": 8, "prompt": PROMPT, "platform": "cpu"}
    make = lambda new: engine_of("full", new=new)  # noqa: E731
    memory = total_memory(measure_programs(make(512), **where))
    assert longest_answer(make, **where, memory=memory, most=4096) == 512


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("80 GB", 80 * 10**9), ("1.5kib", 1536), ("7b", 7), ("2TB", 2 * 10**12)]
)
def test_sizes(text, size):
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["80", "GiB", "-1GiB", "0GB", "0.1b", "1 GiBs", "1,5GB", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"--memory '.*' must be a size above 0 with its unit, as 80GiB"):
        parse_bytes(text, "--memory")
