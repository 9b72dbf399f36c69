"""Every registered policy on every kind of model: what is kept, what is seen, and that rows do not meet."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache import Prompt, Slots
from jkv.config import CacheSpec
from jkv.models.decoder import Decoder
from jkv.policies import Evict, Policy, describe, entry, names
from models import KINDS, Trace, dense, run, tiny, token_ids, visible
from reads import Reads, tell_reads

BUDGET, WINDOW, SINK, INTERVAL, NEW = 12, 4, 2, 6, 19
# Shorter than the window, longer than the budget by more than an interval, and just below the budget.
LENGTHS = (3, 29, 11)
SPARE = {"sepllm": 1}  # slots of the budget that a policy may leave empty
EVICTORS = [name for name in names() if isinstance(entry(name).policy, Evict)]
SELECTORS = [name for name in names() if name != "full" and name not in EVICTORS]

every_policy = pytest.mark.parametrize("name", names())
every_evictor = pytest.mark.parametrize("name", EVICTORS)
every_selector = pytest.mark.parametrize("name", SELECTORS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def on_models(policies: Sequence[str], *, kinds: int = len(KINDS)) -> pytest.MarkDecorator:
    """Every policy on some kinds of model, and every preset, which differs by its numbers alone, on one of them."""
    pairs = [
        (KINDS[(i + more) % len(KINDS)], name)
        for i, name in enumerate(policies)
        for more in range(1 if "@" in name else kinds)
    ]
    return pytest.mark.parametrize(("kind", "name"), pairs)


@functools.cache
def model_of(kind: str) -> Decoder:
    return tiny(kind)


@functools.cache
def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 64, length).tolist()


def prompts(*lengths: int) -> list[list[int]]:
    return [prompt(length) for length in lengths]


def small(name: str, **changes) -> Policy:
    """The policy with sizes that fit the tiny prompts; `changes` on top where the policy evicts."""
    policy = entry(name).policy.prepare(token_ids)
    values = dict(describe(policy))
    sizes = {"budget": BUDGET, "window": WINDOW, "sink": SINK, "interval": INTERVAL, "recent": 3}
    sizes |= {"page": 4, "dense": 1, "chunk": 2, "rank": 32, "outliers": 1, "local": 1}
    # What is off stays off.
    sizes = {name: min(size, values[name]) for name, size in sizes.items() if name in values}
    return replace(policy, **sizes | (changes if isinstance(policy, Evict) else {}))


@functools.cache
def outcome(name: str, kind: str = "llama", lengths: tuple[int, ...] = LENGTHS) -> Trace:
    """The run that most tests look at."""
    return run(model_of(kind), small(name), prompts(*lengths), NEW)


def seen_by(name: str, kind: str, row: int, total: int, lengths: tuple[int, ...] = LENGTHS) -> np.ndarray:
    """Which tokens each query of a row saw: what had been kept, and of that what a selecting policy read."""
    trace = outcome(name, kind, lengths)
    if name not in SELECTORS:
        return visible(trace, row, lengths[row], total)
    return reads_of(name, kind, lengths).mask(trace.kept[0][2].shape[0], row, lengths[row], total)


@functools.cache
def reads_of(name: str, kind: str, lengths: tuple[int, ...] = LENGTHS) -> Reads:
    """What a selecting policy reads in the run that most tests look at."""
    policy, reads = tell_reads(small(name))
    reads.taken.clear()
    told = run(model_of(kind), policy, prompts(*lengths), NEW)
    jax.effects_barrier()
    np.testing.assert_array_equal(told.logits, outcome(name, kind, lengths).logits)
    return Reads(dict(reads.taken))


def text_of(trace: Trace, row: int, lengths: tuple[int, ...] = LENGTHS) -> list[int]:
    """The tokens of a row that went through the layers: all but the last."""
    sampled = [token for token in trace.tokens[row].tolist() if token >= 0]
    return prompt(lengths[row]) + sampled[:-1]


def worst(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b)))


def check_kept(trace: Trace, name: str, lengths: tuple[int, ...], **changes) -> None:
    """What every evicting policy promises about the positions it keeps."""
    policy, spare = small(name, **changes), SPARE.get(name, 0)
    assert isinstance(policy, Evict)
    for step, seen, positions in trace.kept:
        np.testing.assert_array_equal(seen, np.array(lengths) + step)
        for index in np.ndindex(positions.shape[:3]):
            tokens, held = int(seen[index[1]]), positions[index]
            count = int(np.sum(held >= 0))
            held, empty = held[:count], held[count:]
            assert np.all(empty == -1)
            assert np.all(np.diff(held) > 0), "positions are not in the order of the text"
            most = policy.most(tokens)
            assert count == tokens < most or most - spare <= count <= min(tokens, most)
            first, last = range(min(policy.sink, tokens)), range(max(tokens - policy.protected, 0), tokens)
            assert {*first, *last} <= {*held.tolist()}, "a sink or a window token is gone"
            assert held[-1] == tokens - 1


@every_kind
def test_models_are_not_degenerate(kind):
    trace = outcome("full", kind)
    assert model_of(kind).head is not None
    assert trace.logits.std() > 0.5
    assert min(len(set(row)) for row in trace.tokens.tolist()) >= 5


@on_models(names())
def test_logits_equal_a_dense_model_that_sees_what_was_kept(kind, name):
    trace = outcome(name, kind)
    for row, length in enumerate(LENGTHS):
        text = text_of(trace, row)
        expected, _ = dense(model_of(kind), text, seen_by(name, kind, row, len(text)))
        assert worst(trace.logits[row], expected[length - 1 :]) < 1e-4


@on_models(names())
def test_a_budget_that_holds_the_text_changes_nothing(kind, name):
    lengths = (5, 3, 1)  # with 7 tokens more, no longer than the budget
    assert worst(outcome(name, kind, lengths).logits[:, :8], outcome("full", kind, lengths).logits[:, :8]) <= 1e-5


@on_models(EVICTORS)
def test_a_small_budget_changes_logits(kind, name):
    change = np.abs(outcome(name, kind).logits - outcome("full", kind).logits).max(axis=-1)
    assert np.all(change[:, 0] <= 1e-5)  # the prompt is always read in full
    assert np.all(change[1, 1:] > 1e-3)
    assert np.all(change[:, -1] > 1e-3)


@on_models(names())
def test_a_row_does_not_depend_on_its_batch(kind, name):
    together = outcome(name, kind)
    for row, length in enumerate(LENGTHS):
        alone = run(model_of(kind), small(name), [prompt(length) if i == row else [] for i in range(3)], NEW)
        check_same_row(alone, row, together, row)
        idle = [i for i in range(3) if i != row]
        assert np.all(alone.tokens[idle] == -1)
        assert np.all(np.isfinite(alone.logits[idle]))


@every_policy
def test_a_row_does_not_depend_on_the_size_of_batch_and_block(name):
    policy = small(name)
    for row in (0, 1):
        alone = run(model_of("llama"), policy, prompts(LENGTHS[row]), NEW, steps=policy.interval or 9)
        check_same_row(alone, 0, outcome(name), row)


def check_same_row(a: Trace, i: int, b: Trace, j: int) -> None:
    np.testing.assert_array_equal(a.tokens[i], b.tokens[j])
    assert worst(a.logits[i], b.logits[j]) <= 1e-5
    for (_, _, kept), (_, _, other) in zip(a.kept, b.kept, strict=True):
        np.testing.assert_array_equal(kept[:, i], other[:, j])


@on_models(EVICTORS)
def test_the_cache_never_exceeds_budget_and_interval(kind, name):
    trace = outcome(name, kind)
    assert BUDGET + INTERVAL - SPARE.get(name, 0) <= trace.held.max() <= BUDGET + INTERVAL
    check_kept(trace, name, LENGTHS)
    for store in trace.state.stores:
        assert store.k.shape == (3, 2, BUDGET + INTERVAL, 16)
    np.testing.assert_array_equal(trace.state.pos, np.array(LENGTHS) + NEW - 1)


@on_models(names(), kinds=1)
def test_a_run_repeats_bit_for_bit(kind, name):
    again = run(model_of(kind), small(name), prompts(*LENGTHS), NEW)
    np.testing.assert_array_equal(again.logits, outcome(name, kind).logits)
    assert all(np.array_equal(a[2], b[2]) for a, b in zip(again.kept, outcome(name, kind).kept, strict=True))


@on_models(names(), kinds=1)
def test_a_row_that_ends_leaves_the_others_alone(kind, name):
    model, policy = model_of(kind), small(name)
    ended = run(model, policy, prompts(*LENGTHS), NEW, limit=(NEW, 5, NEW))
    together = outcome(name, kind)
    np.testing.assert_array_equal(ended.logits[[0, 2]], together.logits[[0, 2]])
    np.testing.assert_array_equal(ended.tokens[[0, 2]], together.tokens[[0, 2]])
    np.testing.assert_array_equal(ended.tokens[1, :5], together.tokens[1, :5])
    assert np.all(ended.tokens[1, 5:] == -1)
    # From the compaction after its end, its store does not change.
    before = run(model, policy, prompts(*LENGTHS), NEW, limit=(NEW, 5, NEW), until=INTERVAL + 1)
    for store, later in zip(before.state.stores, ended.state.stores, strict=True):
        jax.tree.map(np.testing.assert_array_equal, held_by_row(store, 1), held_by_row(later, 1))


def held_by_row(store: Any, row: int) -> dict:
    """Everything that a row holds; keys and values stop at its length, what is behind is never read."""
    if not isinstance(store, Slots):
        parts = {spec.name: getattr(store, spec.name) for spec in fields(store) if spec.name != "rope"}
        return held_by_row(parts.pop("exact"), row) | jax.tree.map(lambda x: np.asarray(x[row]), parts)
    filled = np.asarray(store.filled[row])
    whole = {"length": store.length, "pos": store.pos, "window": store.window, "extra": store.extra}
    rest = jax.tree.map(lambda x: np.asarray(x[row]), whole)
    return rest | {"k": np.asarray(store.k[row])[filled], "v": np.asarray(store.v[row])[filled]}


@on_models(names(), kinds=1)
def test_nan_in_a_row_stays_in_that_row(kind, name):
    together = outcome(name, kind)
    used = {*together.tokens.ravel().tolist()}.union(*prompts(*LENGTHS))
    bad = max(set(range(64)) - used)
    model = tiny(kind)
    model.embedding[...] = model.embedding[...].at[bad].set(jnp.nan)
    rows = prompts(*LENGTHS)
    rows[1] = [bad, *rows[1][1:]]
    trace = run(model, small(name), rows, NEW)
    assert not trace.finite[1, 0]
    assert trace.finite[[0, 2]].all()
    np.testing.assert_array_equal(trace.logits[[0, 2]], together.logits[[0, 2]])


@every_policy
@pytest.mark.parametrize("lengths", [(BUDGET - 1, BUDGET, BUDGET + 1), (WINDOW, WINDOW + 1, 1)])
def test_prompts_about_as_long_as_budget_and_window(name, lengths):
    trace, policy = outcome(name, "llama", lengths), small(name)
    for row, length in enumerate(lengths):
        text = text_of(trace, row, lengths)
        expected, _ = dense(model_of("llama"), text, seen_by(name, "llama", row, len(text), lengths))
        assert worst(trace.logits[row], expected[length - 1 :]) < 1e-4
    if isinstance(policy, Evict):
        check_kept(trace, name, lengths)  # a prompt that fits is kept whole and in order


@every_evictor
def test_without_an_interval_only_the_prompt_is_compacted(name):
    policy = small(name, interval=0)
    trace = run(model_of("llama"), policy, prompts(*LENGTHS), NEW, steps=9)
    check_kept(trace, name, LENGTHS)
    assert len(trace.kept) == 1
    np.testing.assert_array_equal(trace.held[-1], trace.held[0] + 9)
    text = text_of(trace, 1)
    expected, _ = dense(model_of("llama"), text, visible(trace, 1, LENGTHS[1], len(text)))
    assert worst(trace.logits[1], expected[LENGTHS[1] - 1 :]) < 1e-4


@every_evictor
def test_a_share_as_budget_grows_with_the_text(name):
    rows = [*prompts(*LENGTHS), []]
    with jax.debug_nans(True):  # nor may an idle row or a padded prompt make one that is masked later
        trace = run(model_of("llama"), small(name, budget=0.4, floor=9), rows, NEW)
    trace.kept = [(step, seen[:3], positions[:, :3]) for step, seen, positions in trace.kept]
    check_kept(trace, name, LENGTHS, budget=0.4, floor=9)
    counts = [int(np.sum(positions[0, 1, 0] >= 0)) for _, _, positions in trace.kept]
    assert counts == [count - SPARE.get(name, 0) for count in (11, 14, 16, 18)]
    text = text_of(trace, 1)
    expected, _ = dense(model_of("llama"), text, visible(trace, 1, LENGTHS[1], len(text)))
    assert worst(trace.logits[1], expected[LENGTHS[1] - 1 :]) < 1e-4


@every_kind
@pytest.mark.parametrize("name", ["snapkv", "snapkv@gkv", "h2o"])
def test_kept_positions_equal_a_choice_made_in_numpy(kind, name):
    trace, policy = outcome(name, kind), small(name)
    assert isinstance(policy, Evict)
    for row, length in enumerate(LENGTHS):
        text = text_of(trace, row)
        _, probs = dense(model_of(kind), text, visible(trace, row, length, len(text)))
        for layer, head in np.ndindex(2, 2):
            held = np.arange(0)
            for step, _, positions in trace.kept:
                seen = length + step
                held = np.append(held, np.arange(held[-1] + 1 if step else 0, seen))
                if len(held) > BUDGET:
                    past, last = np.split(held, [len(held) - policy.protected])
                    attention = probs[layer, head].max(axis=0)[:seen, past]
                    score = attention.sum(axis=0) if name == "h2o" else pooled_mean(attention, policy)
                    best = np.argsort(-score, kind="stable")[: BUDGET - policy.protected]
                    held = np.concatenate([past[np.sort(best)], last])
                found = positions[layer, row, head]
                np.testing.assert_array_equal(found[found >= 0], held)


def pooled_mean(attention: np.ndarray, policy: Policy) -> np.ndarray:
    """The mean over the window's queries, max-pooled."""
    mean, size = attention[-WINDOW:].mean(axis=0), dict(describe(policy))["pool"]
    padded = np.pad(mean, size // 2)
    return np.max([padded[i : i + len(mean)] for i in range(size)], axis=0)


@every_kind
def test_h2o_sums_all_attention_that_a_kept_token_received(kind):
    trace = outcome("h2o", kind)
    for row, length in enumerate(LENGTHS):
        text = text_of(trace, row)
        _, probs = dense(model_of(kind), text, visible(trace, row, length, len(text)))
        expected = probs.max(axis=2).sum(axis=2)
        for layer, store in enumerate(trace.state.stores):
            for head in range(2):
                held = np.asarray(store.pos[row, head, : store.length[row, head]])
                mass = np.asarray(store.extra["mass"][row, head, : len(held)])
                assert worst(mass, expected[layer, head, held]) < 1e-4


def make_prompt(keys: np.ndarray, length: list[int]) -> Prompt:
    """Prompts of random queries and values with given keys `[B, H, T, D]`, two query heads a group."""
    rng = np.random.default_rng(0)
    batch, heads, tokens, size = keys.shape
    q = rng.standard_normal((batch, heads, 2, tokens, size), np.float32)
    v = rng.standard_normal(keys.shape, np.float32)
    k = jnp.asarray(keys, jnp.float32)
    ids = jnp.asarray(rng.integers(2, 64, (batch, tokens)), jnp.int32)
    return Prompt(q=jnp.asarray(q), k=k, v=jnp.asarray(v), k_pre=k, tokens=ids, length=jnp.asarray(length, jnp.int32))


def ingest(policy: Policy, asked: Prompt):
    spec = CacheSpec(num_kv_heads=2, group=2, head_dim=16, max_len=64, max_new=8, max_prompt=56)
    return jax.jit(lambda prompt: policy.ingest(spec, prompt))(asked)


@every_evictor
def test_equal_keys_give_a_choice_and_no_nan(name):
    store = ingest(small(name), make_prompt(np.ones((3, 2, 24, 16)), [24, 0, 20]))
    count = BUDGET - SPARE.get(name, 0)
    np.testing.assert_array_equal(store.length, [[count] * 2, [0] * 2, [count] * 2])
    for row, length in ((0, 24), (2, 20)):
        held = np.asarray(store.pos[row, :, :count])
        assert np.all(np.diff(held) > 0)
        np.testing.assert_array_equal(held[:, -1], length - 1)
    assert all(np.isfinite(x).all() for x in store.extra.values())


def test_gkv_remembers_nothing_until_it_has_to_choose():
    keys = np.random.default_rng(1).standard_normal((3, 2, 24, 16))
    history = ingest(small("gkv"), make_prompt(keys, [BUDGET, BUDGET + 1, 24])).extra["history"]
    np.testing.assert_array_equal(history[0], -1.0)
    past = np.asarray(history[1:, :, : BUDGET - WINDOW])
    assert np.all((past > 0) & (past <= 1))
    np.testing.assert_array_equal(history[1:, :, BUDGET - WINDOW :], -1.0)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "snapkv@gkv"])
def test_equal_scores_go_to_the_earliest(name):
    # Every key gets the same attention from a query; earlier keys get it from more queries, or from as many.
    policy = small(name)
    assert isinstance(policy, Evict)
    window = policy.protected
    store = ingest(policy, make_prompt(np.ones((1, 2, 24, 16)), [24]))
    expected = [*range(BUDGET - window), *range(24 - window, 24)]
    np.testing.assert_array_equal(store.pos[0, :, :BUDGET], [expected] * 2)


@dataclass(frozen=True, kw_only=True)
class Scripted(Evict):
    """Scores that do not come from the model."""

    budget: int = BUDGET
    window: int = WINDOW
    sink: int = SINK
    interval: int = INTERVAL
    kind: str = "late"

    def score(self, slots, queries):
        late = slots.pos.astype(jnp.float32)
        odd = slots.pos % 2 == 1
        return {
            "late": late,
            "nan": jnp.where(odd, jnp.nan, -late),
            "inf": jnp.where(odd, jnp.inf, -late),
            "drop": jnp.where(odd, -jnp.inf, late),
            "bfloat16": late.astype(jnp.bfloat16),
            "shape": late[..., :-1],
        }[self.kind]


def held_by(kind: str, length: int = 29) -> list[int]:
    store = ingest(Scripted(kind=kind), make_prompt(np.ones((1, 2, 32, 16)), [length]))
    held = np.asarray(store.pos[0])
    np.testing.assert_array_equal(held[0], held[1])
    return held[0][held[0] >= 0].tolist()


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("late", [0, 1, *range(19, 29)]),
        ("bfloat16", [0, 1, *range(19, 29)]),
        ("nan", [0, 1, 2, 4, 6, 8, 10, 12, 25, 26, 27, 28]),
        ("inf", [0, 1, 3, 5, 7, 9, 11, 13, 25, 26, 27, 28]),
        ("drop", [0, 1, 14, 16, 18, 20, 22, 24, 25, 26, 27, 28]),
    ],
)
def test_sinks_and_window_outrank_every_score(kind, kept):
    assert held_by(kind) == kept


def test_a_score_of_minus_infinity_drops_a_token_that_the_budget_would_hold():
    assert held_by("drop", 14) == [0, 1, 2, 4, 6, 8, 10, 11, 12, 13]


def test_a_score_of_the_wrong_shape_names_its_policy():
    with pytest.raises(ValueError, match=r"policy Scripted: score .*\(1, 2, 31\).*\(1, 2, 32\)"):
        held_by("shape")


def test_an_evicting_policy_needs_a_score():
    with pytest.raises(TypeError, match="Evict has no score method"):
        ingest(Evict(budget=BUDGET, window=WINDOW), make_prompt(np.ones((1, 2, 32, 16)), [29]))
