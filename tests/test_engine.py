"""Prefill, decode and compaction as programs: what they compile, copy and hold, and when rows end."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv.engine import Engine, State, run_if
from jkv.loop import bucket
from jkv.models.decoder import Decoder
from jkv.policies import Evict, Policy, entry, get_policy, names
from jkv.prompt import find_nonfinite, prompt_logits
from jkv.sampling import Sampling
from models import batch, dense, make_engine, request, run, snapshot, tiny, token_ids

FULL = get_policy("full")
GKV = get_policy("gkv:budget=12,window=4,interval=6")
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny("llama")


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(2, 64, length).tolist()


PROMPTS = [random_prompt(length) for length in (3, 29, 11)]


@pytest.fixture(scope="module")
def greedy(model):
    """Full attention over 12 tokens a row."""
    return run(model, FULL, PROMPTS, 12)


def large(name: str) -> Policy:
    """The policy with a cache that dwarfs everything else."""
    policy = entry(name).policy.prepare(token_ids)
    if not isinstance(policy, Evict):
        return policy
    return replace(policy, budget=4088, interval=8, window=min(policy.window, 4), sink=min(policy.sink, 4))


def pointers(state: State) -> list[int]:
    large = [x for x in jax.tree.leaves(state.stores) if x.ndim == 4]
    return [x.unsafe_buffer_pointer() for x in large]


@pytest.mark.parametrize("name", names())
def test_decoding_copies_no_cache(model, name):
    policy = large(name)
    engine, weights = make_engine(model, policy, longest=32, new=4096 - 32)
    asked = request()
    state, _ = engine.prefill(weights, *batch(PROMPTS[:1], 32, 100), asked)
    k = max((x for x in jax.tree.leaves(state.stores) if x.ndim == 4), key=lambda x: x.size)
    assert k.shape[2] >= 4032
    # Every token gets a score, or chosen keys are made, in a model whose keys are hardly larger than that.
    scores = 3 * k.nbytes if name.startswith(("specontext", "shadowkv")) else 0
    decode = Engine.decode.lower(engine, weights, state, asked, steps=8).compile()
    memory = decode.memory_analysis()
    assert memory.temp_size_in_bytes < k.nbytes // 2 + scores
    assert memory.alias_size_in_bytes > (2 if name.startswith("shadowkv") else 4) * k.nbytes
    before = pointers(state)
    for _ in range(3):
        state, _ = decode(weights, state, asked)
    assert pointers(state) == before
    assert int(state.pos[0]) == 3 + 24


@pytest.mark.parametrize("policy", [GKV, get_policy("h2o:budget=12,interval=6")], ids=["gkv", "h2o"])
def test_a_compaction_stays_in_its_buffers(model, policy):
    engine, weights = make_engine(model, policy, longest=32, new=8)
    state, _ = engine.prefill(weights, *batch(PROMPTS, 32, 8), request())
    before = pointers(state)
    state, _ = engine.decode(weights, state, request(), steps=6)
    state = engine.compact(state)
    assert pointers(state) == before
    np.testing.assert_array_equal(state.stores[1].length, np.array([[9, 9], [12, 12], [12, 12]]))


def compiled_programs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Names of the programs compiled since the last call."""
    found = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    caplog.clear()
    return found


def test_twenty_prompt_lengths_compile_a_program_per_bucket(model, caplog):
    engine, weights = make_engine(model, replace(GKV, budget=13), longest=128, new=20)
    lengths = np.linspace(1, 120, 20).astype(int).tolist()
    assert len(set(lengths)) == 20

    def decode_all(seed: int, eos: int, limit: int) -> list[np.ndarray]:
        tokens = []
        for length in lengths:
            arrays = batch([random_prompt(length)], bucket(length), limit)
            asked = request((eos, -1), seed)
            state, first = engine.prefill(weights, *arrays, asked)
            for _ in range(2):
                state, out = engine.decode(weights, state, asked, steps=6)
                state = engine.compact(state)
            tokens.append(np.asarray(first.tokens)[0].tolist() + np.asarray(out.tokens)[0].tolist())
        return tokens

    with jax.log_compiles():
        first = decode_all(0, -1, 20)
        programs = compiled_programs(caplog)
        assert programs.count("read_layer") == len({bucket(length) for length in lengths}) == 3
        assert programs.count("decode") == 1
        assert programs.count("compact_store") == 1
        assert decode_all(0, -1, 20) == first
        assert compiled_programs(caplog) == []
        decode_all(2**40, 5, 9)
        assert compiled_programs(caplog) == []


def test_a_bucket_does_not_change_the_answer(model):
    for policy in (FULL, GKV):
        small, large = (run(model, policy, PROMPTS, 12, longest=longest) for longest in (32, 64))
        np.testing.assert_array_equal(small.tokens, large.tokens)
        assert np.max(np.abs(small.logits - large.logits)) <= 1e-5


@pytest.mark.parametrize("policy", [FULL, GKV], ids=["full", "gkv"])
def test_prefill_in_blocks_equals_prefill_at_once(model, policy):
    prompt = random_prompt(109)
    whole = run(model, policy, [prompt], 8, longest=128, prefill_block=128)
    for block in (16, 32):
        blocks = run(model, policy, [prompt], 8, longest=128, prefill_block=block)
        np.testing.assert_array_equal(blocks.tokens, whole.tokens)
        assert np.max(np.abs(blocks.logits - whole.logits)) <= 1e-5
        np.testing.assert_array_equal(blocks.kept[0][2], whole.kept[0][2])


def test_prefill_in_blocks_of_odd_size(model):
    prompt = random_prompt(109)
    expected = dense(model, prompt, np.tril(np.ones((2, 2, 109, 109), bool)))[0]
    for block in (7, 109, 500):
        found = prompt_logits(model, jnp.asarray([prompt], jnp.int32), block=block)
        assert np.max(np.abs(found[0] - expected)) < 1e-4


@pytest.mark.parametrize("text", ["full", "rkv:budget=20", "h2o:budget=20"])
def test_memory_of_prefill_grows_with_the_prompt_not_with_its_square(model, text):
    temporary = []
    for longest in (1024, 2048):
        engine, weights = make_engine(model, get_policy(text), longest=longest, new=8, prefill_block=32)
        arrays = batch([random_prompt(longest)], longest, 8)
        sizes = []

        def measure(function, *args, sizes=sizes, **options):
            if not sizes:
                sizes.append(function.lower(*args, **options).compile().memory_analysis().temp_size_in_bytes)
            return jax.eval_shape(lambda *rest: function(args[0], *rest, **options), *args[1:])

        engine.prefill(weights, *arrays, request(), call=measure)
        temporary.extend(sizes)
    assert temporary[1] < 2.3 * temporary[0]


def test_run_if_runs_once_or_not_at_all():
    def add(tree):
        return jax.tree.map(lambda x: x + 1, tree)

    value = (jnp.arange(3), {"x": jnp.zeros(())})
    for condition, more in ((True, 1), (False, 0)):
        numbers, rest = jax.jit(lambda c, v: run_if(c, add, v))(jnp.asarray(condition), value)
        np.testing.assert_array_equal(numbers, np.arange(3) + more)
        assert rest["x"] == more


def test_a_block_after_the_last_row_has_ended_changes_nothing(model):
    engine, weights = make_engine(model, GKV, longest=32, new=12)
    state, _ = engine.prefill(weights, *batch(PROMPTS, 32, (2, 3, 1)), request())
    state, out = engine.decode(weights, state, request(), steps=6)
    assert np.asarray(out.done).all()
    np.testing.assert_array_equal(np.sum(np.asarray(out.tokens) >= 0, axis=1), [1, 2, 0])
    before = jax.tree.map(snapshot, state)
    state, out = engine.decode(weights, state, request(), steps=6)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(snapshot, state))
    assert np.all(np.asarray(out.tokens) == -1)
    assert np.all(out.finite)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_limit_of_no_or_one_token(model, limit):
    engine, weights = make_engine(model, FULL, longest=32, new=12)
    state, out = engine.prefill(weights, *batch(PROMPTS, 32, limit), request())
    assert np.all((np.asarray(out.tokens) >= 0) == limit)
    assert np.asarray(state.done).all()


def test_rows_end_at_their_own_eos_and_keep_it(model, greedy):
    rows = greedy.tokens.tolist()
    eos = [rows[0][3], rows[1][5]]
    ends = [next((i for i, token in enumerate(row) if token in eos), 11) for row in rows]
    assert len(set(ends)) >= 2
    trace = run(model, FULL, PROMPTS, 12, eos=eos)
    for row, (tokens, end) in enumerate(zip(rows, ends, strict=True)):
        assert trace.tokens[row].tolist() == tokens[: end + 1] + [-1] * (11 - end)
        np.testing.assert_array_equal(trace.logits[row, : end + 1], greedy.logits[row, : end + 1])
        assert int(trace.state.pos[row]) == len(PROMPTS[row]) + min(end, 11)


def test_eos_in_a_prompt_or_as_first_token(model, greedy):
    first = int(greedy.tokens[0, 0])
    prompts = [PROMPTS[0], [first, *PROMPTS[1][1:]], PROMPTS[2]]
    expected = run(model, FULL, prompts, 12).tokens
    found = run(model, FULL, prompts, 12, eos=[first]).tokens
    assert found[0].tolist() == [first] + [-1] * 11
    end = expected[1].tolist().index(first) + 1 if first in expected[1] else 12
    assert end > 1
    assert found[1, :end].tolist() == expected[1, :end].tolist()


def test_no_eos_decodes_to_the_limit(greedy):
    assert np.all(greedy.tokens >= 0)
    assert np.asarray(greedy.state.done).all()


def test_repetition_penalty_counts_prompt_and_answer_but_no_padding(model, greedy):
    penalty = 1.7
    trace = run(model, FULL, PROMPTS, 12, sampling=Sampling(repetition_penalty=penalty))
    assert not np.array_equal(trace.tokens, greedy.tokens)
    for row, prompt in enumerate(PROMPTS):
        seen = set(prompt)
        for raw, token in zip(trace.logits[row], trace.tokens[row].tolist(), strict=True):
            used = np.isin(np.arange(64), list(seen))
            scaled = np.where(used, np.where(raw < 0, raw * penalty, raw / penalty), raw)
            assert np.argmax(scaled) == token
            seen.add(token)
        assert trace.state.seen is not None
        np.testing.assert_array_equal(np.flatnonzero(trace.state.seen[row]), sorted(seen))


def test_random_tokens_follow_the_row_and_not_its_place(model):
    sampling = Sampling(temperature=1.0)
    engine, weights = make_engine(model, GKV, longest=32, new=7, sampling=sampling)

    def draw(order: list[int], seed: int) -> dict[int, list[int]]:
        tokens, length, limit, _ = batch([PROMPTS[i] for i in order], 32, 7)
        state, first = engine.prefill(weights, tokens, length, limit, np.array(order, np.uint32), request(seed=seed))
        _, out = engine.decode(weights, state, request(seed=seed), steps=6)
        both = np.concatenate([np.asarray(first.tokens), np.asarray(out.tokens)], axis=1)
        return {row: both[place].tolist() for place, row in enumerate(order)}

    drawn = draw([0, 1, 2], 3)
    assert draw([2, 0, 1], 3) == drawn
    assert draw([0, 1, 2], 4) != drawn
    assert len({tuple(tokens) for tokens in draw([1, 1, 1], 3).values()}) == 1


@pytest.mark.parametrize("size", [1, 2, 8])
def test_tokens_do_not_depend_on_the_size_of_the_batch(model, greedy, size):
    rows = [i % 3 for i in range(1, size + 1)]
    trace = run(model, FULL, [PROMPTS[i] for i in rows], 12, steps=11)
    np.testing.assert_array_equal(trace.tokens, greedy.tokens[rows])


def test_large_queries_and_keys_do_not_overflow_float16(model):
    graph, weights = nnx.split(model)
    half = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.float16), weights))
    kernel = half.layers[0].qkv.kernel
    kernel[...] = kernel[...].at[: 6 * 16].multiply(64)
    tokens = jnp.asarray([random_prompt(29)], jnp.int32)
    heads = half.layers[0].heads(half.embed(tokens), jnp.ones((1, 1, 8)), jnp.zeros((1, 1, 8)))
    products = np.einsum("bthgd,buhd->bhgtu", np.asarray(heads.q, np.float32), np.asarray(heads.k, np.float32))
    assert np.isfinite(heads.q).all()
    assert np.abs(products).max() > 65504  # the largest float16
    trace = run(half, FULL, [random_prompt(29)], 4, steps=3)
    assert np.isfinite(trace.logits).all()
    assert trace.state.stores[0].k.dtype == jnp.float16


@pytest.mark.parametrize("part", ["embedding", "layer 0", "layer 1", "final norm or head"])
def test_nonfinite_values_are_traced_to_their_part(part):
    broken = tiny("llama")
    tokens = jnp.asarray([PROMPTS[1]], jnp.int32)
    assert broken.head is not None
    param = {
        "embedding": broken.embedding,
        "layer 0": broken.layers[0].down.kernel,
        "layer 1": broken.layers[1].qkv.kernel,
        "final norm or head": broken.head.kernel,
    }[part]
    where = PROMPTS[1][0] if part == "embedding" else 3
    param[...] = param[...].at[where].set(jnp.inf)
    assert find_nonfinite(broken, tokens) == part


@pytest.mark.parametrize(("interval", "steps"), [(128, 16), (6, 6), (100, 10), (17, 1), (0, 16)])
def test_steps_of_a_block_divide_the_interval(model, interval, steps):
    engine, _ = make_engine(model, replace(GKV, interval=interval), longest=32, new=8)
    assert engine.steps == steps


SCRIPT = """
import jax, numpy as np
from models import run, tiny
from jkv.policies import get_policy
prompts = {prompts}
for text in ("gkv:budget=12,window=4,interval=6", "h2o:budget=12,interval=6", "full"):
    trace = run(tiny("llama"), get_policy(text), prompts, 12)
    print(trace.tokens.tolist())
    dtypes = {{str(x.dtype) for x in jax.tree.leaves(trace.state)}}
    assert not any(name.endswith("64") for name in dtypes), dtypes
"""


@pytest.mark.parametrize(
    "setting",
    [{"JAX_ENABLE_X64": "1", "JAX_NUMPY_RANK_PROMOTION": "raise"}, {"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"}],
)
def test_settings_of_jax_do_not_change_the_answer(model, greedy, setting):
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(prompts=PROMPTS)],
        env={**os.environ, **setting, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    policies = (GKV, get_policy("h2o:budget=12,interval=6"))
    expected = [run(model, policy, PROMPTS, 12).tokens for policy in policies] + [greedy.tokens]
    assert done.stdout.splitlines() == [str(tokens.tolist()) for tokens in expected]
