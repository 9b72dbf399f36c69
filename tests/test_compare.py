"""Policies beside full attention on the same text: the decode path fed with many tokens at once, and the command."""

import json
import math
from importlib.util import find_spec

import jax
import numpy as np
import pytest

import jkv
from checkpoints import config, save_hf
from jkv import cli, teacher
from jkv.commands import compare as command
from jkv.comparison import compare, find_bounds, mean_and_error, share_of_way
from jkv.engine import State
from jkv.oracle import Oracle, Witness, foresee
from jkv.passages import write_passages
from jkv.policies import Evict, Policy, entry, get_policy, names
from jkv.policies.random import Random
from jkv.teacher import block_size, feed, reads_everything
from models import KINDS, batch, make_engine, request, snapshot, tiny
from test_policies import EVICTORS, INTERVAL, prompt, small

# Rows of three lengths: one ends inside the second interval, one inside a block.
LENGTHS, FED = (3, 29, 11), (18, 9, 13)
FAST = [name for name in names() if reads_everything(entry(name).policy)]


def fed(policy: Policy, size: int, kind: str = "llama") -> tuple[np.ndarray, State]:
    """Logits `[B, N, V]` of given tokens that are fed `size` at a time, and the state at the end."""
    prompts = [prompt(length) for length in LENGTHS]
    engine, weights = make_engine(tiny(kind), policy, longest=32, new=24)
    state, _ = engine.prefill(weights, *batch(prompts, 32, 24), request())
    tokens = np.random.default_rng(5).integers(2, 64, (len(FED), max(FED)), np.int32)
    logits = []
    for start in range(0, max(FED), size):
        count = np.clip(np.array(FED) - start, 0, size).astype(np.int32)
        state, out = feed(engine, weights, state, tokens[:, start : start + size], count, request())
        logits.append(snapshot(out))
        if policy.interval and (start + size) % policy.interval == 0:
            state = engine.compact(state)
    return np.concatenate(logits, axis=1), state


@pytest.fixture
def one_by_one(monkeypatch):
    """Has every policy fed through the decode step."""
    monkeypatch.setattr(teacher, "reads_everything", lambda policy: False)
    yield
    feed.clear_cache()


@pytest.mark.parametrize("name", FAST)
def test_many_tokens_at_once_are_one_token_at_a_time(name, one_by_one, monkeypatch):
    kind, policy = KINDS[FAST.index(name) % len(KINDS)], small(name)
    expected, state = fed(policy, INTERVAL, kind)
    monkeypatch.undo()
    feed.clear_cache()
    for size in (INTERVAL, 2):
        found, other = fed(policy, size, kind)
        for row, count in enumerate(FED):
            np.testing.assert_allclose(found[row, :count], expected[row, :count], atol=1e-5)
        np.testing.assert_array_equal(other.pos, state.pos)
        for one, two in zip(state.stores, other.stores, strict=True):
            np.testing.assert_array_equal(one.length, two.length)
            np.testing.assert_array_equal(one.pos, two.pos)
            for key in one.extra:
                np.testing.assert_allclose(one.extra[key], two.extra[key], atol=1e-5)
    if isinstance(policy, Evict):
        assert np.max(state.stores[0].length) < max(FED) + LENGTHS[0]  # or nothing was evicted


def test_which_policies_can_be_fed_many_at_once():
    assert {"full", *EVICTORS} == set(FAST)
    assert block_size(get_policy("full")) == block_size(get_policy("gkv")) == 32
    assert block_size(get_policy("gkv:interval=24")) == 24 and block_size(get_policy("gkv:interval=37")) == 1
    assert block_size(get_policy("gkv:interval=74")) == 2


# Oracles


def test_the_witness_adds_up_the_attention_of_what_is_fed():
    _, state = fed(Witness(), 6)
    for store in state.stores:
        mass = np.asarray(store.extra["mass"])
        group = tiny().config.group
        np.testing.assert_allclose(
            mass.sum(axis=2), np.broadcast_to(np.array(FED)[:, None] * group, mass.shape[:2]), rtol=1e-4
        )
        assert np.all(mass[0, :, 21:] == 0)


def test_the_oracle_keeps_what_will_be_attended_to():
    model, rng = tiny(), np.random.default_rng(0)
    policy = Oracle(budget=5, interval=4)
    engine, weights = make_engine(model, policy, longest=32, new=24)
    state, _ = engine.prefill(weights, *batch([prompt(29), prompt(3)], 32, 24), request())
    assert np.asarray(state.stores[0].length)[:, 0].tolist() == [29, 3]
    mass = rng.random((2, 2, 40), np.float32)
    store = jax.tree.map(lambda x: x, foresee(state.stores[0], mass))
    kept = np.asarray(policy.compact(store, np.ones(2, bool)).pos)
    for head in range(2):
        assert kept[0, head, :5].tolist() == sorted(np.argsort(mass[0, head, :29])[-5:].tolist())
        assert kept[1, head, :4].tolist() == [0, 1, 2, -1]


# Comparing


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("compare") / "tiny", config(), seed=0)


@pytest.fixture(scope="module")
def llm(folder):
    return jkv.load(folder)


def texts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(2, 300, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def compared(llm):
    policies = ["full", "gkv:budget=20,window=8,interval=16", "gkv:budget=400", "quest:budget=12,page=4,dense=0"]
    return compare(llm, texts(97, 61, 90), policies, prompt=24, greedy=24, oracle=True)


def test_full_attention_beside_itself_and_beside_budgets_that_are_never_reached(compared):
    full, _, enough, *_ = compared
    assert np.nanmax(full.kl) == 0 and np.nanmax(np.abs(full.delta_nll)) == 0 and np.nanmin(full.agrees) == 1
    assert np.nanmax(enough.kl) <= 1e-6 and np.nanmax(np.abs(enough.delta_nll)) < 1e-4
    assert full.diverges.tolist() == enough.diverges.tolist() == [24, 24, 24]


def test_what_is_compared_are_the_texts(compared):
    for each in compared:
        assert each.kl.shape == each.delta_nll.shape == each.agrees.shape == (3, 97 - 24 - 1)
        assert np.sum(~np.isnan(each.kl), axis=1).tolist() == [72, 36, 65]


def test_a_divergence_is_that_of_the_distributions(llm, compared):
    """Against the logits of two runs over the whole text, the policy's caches not being involved in the first."""
    text, gkv = texts(97, 61, 90), compared[1]
    tokens = np.array([text[0]], np.int32)
    full = jax.nn.log_softmax(llm.logits(tokens)[0].astype(np.float64))
    # Nothing has left the cache before the first interval ended, but of the prompt.
    assert np.nanmax(gkv.kl[0]) > 0.1
    nll = -np.asarray(full)[np.arange(24, 96), text[0][25:]]
    evicted = nll + gkv.delta_nll[0]
    assert evicted.mean() != pytest.approx(nll.mean(), abs=1e-3) and np.all(evicted > 0)


def test_a_policy_between_random_and_oracle(compared):
    by_name = {each.name: each for each in compared}
    worst, best = by_name["random:budget=20,interval=16"], by_name["oracle:budget=20,interval=16"]
    kl = [mean_and_error(each.kl)[0] for each in (worst, compared[1], best)]
    assert kl[0] > kl[1] > kl[2] > 0
    assert share_of_way(worst, compared) == 0 and share_of_way(best, compared) == 1
    assert share_of_way(compared[1], compared) == pytest.approx((kl[0] - kl[1]) / (kl[0] - kl[2]))
    assert share_of_way(compared[0], compared) is None and share_of_way(compared[3], compared) is None
    assert best.diverges is None and worst.diverges.max() <= 24


def test_policies_beside_others_are_as_alone(llm, compared):
    (alone,) = compare(llm, texts(97, 61, 90), [compared[1].name], prompt=24)
    np.testing.assert_allclose(alone.kl, compared[1].kl, atol=1e-5)
    (row,) = compare(llm, texts(61), [compared[1].name], prompt=24)
    np.testing.assert_allclose(row.kl[0], compared[1].kl[1, :36], atol=1e-5)
    assert row.diverges is None


def test_bounds_for_each_size_once():
    policies = [get_policy(text) for text in ("gkv:budget=64", "snapkv:budget=64", "h2o:budget=25%,interval=8", "full")]
    bounds = find_bounds(policies)
    assert list(bounds) == [
        *("random:budget=64", "oracle:budget=64"),
        *("random:budget=0.25,interval=8", "oracle:budget=0.25,interval=8"),
    ]
    assert [type(policy) for policy in bounds.values()] == [Random, Oracle] * 2


def test_means_and_errors():
    values = np.array([[1.0, 3.0, math.nan], [4.0, 4.0, 4.0]])
    assert mean_and_error(values) == (3.0, pytest.approx(1.0))
    assert mean_and_error(values[:1])[1] is None


def test_texts_that_cannot_be_compared(llm):
    with pytest.raises(ValueError, match=r"text 1 has 25 tokens; it must have two more than the prompt's 24"):
        compare(llm, texts(40, 25), ["full"], prompt=24)
    with pytest.raises(ValueError, match="the 512 that the model reads"):
        compare(llm, texts(600), ["full"], prompt=24)


# The command


@pytest.fixture
def run(folder, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run(command.main, [*map(str, arguments), "--model", str(folder)])
        return code, *capsys.readouterr()

    return run


def test_the_command(run, tmp_path):
    lines, plot = tmp_path / "kl.jsonl", tmp_path / "kl.png"
    drawn = ("--plot", plot) if find_spec("matplotlib") else ()
    options = ("--sequences", 2, "--length", 96, "--prompt-tokens", 24, "--greedy", 20, "--oracle")
    code, out, err = run("gkv:budget=20,window=8,interval=16", *options, "--output", lines, *drawn)
    assert code == 0, err
    assert "text: what the model writes by itself" in err and "gkv:budget=20" in out and "oracle" in out and "±" in out
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["policy"] for record in records if "text" not in record] == [
        *("gkv:budget=20,window=8,interval=16", "random:budget=20,interval=16", "oracle:budget=20,interval=16")
    ]
    summary, first, second = records[:3]
    assert len(first["kl"]) == len(second["agrees"]) == 71 and summary["tokens"] == 142
    assert summary["kl"] == pytest.approx(np.mean([*first["kl"], *second["kl"]]), rel=1e-4)
    assert plot.exists() == bool(drawn) and not list(tmp_path.glob("*.part"))
    # The text is the same the next time.
    again = json.loads(run("gkv:budget=20,window=8,interval=16", *options, "--json")[1])
    assert again["policies"][0] == summary


def test_text_from_a_file(run, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    options = ("--text", path, "--length", 64, "--prompt-tokens", 16, "--greedy", 0, "--json")
    code, out, err = run("streamingllm:budget=16,interval=8", *options, "--sequences", 3)
    (line,) = json.loads(out)["policies"]
    assert code == 0 and (line["texts"], line["tokens"]) == (3, 3 * 47) and "by itself" not in err
    code, _, err = run("full", *options, "--sequences", 3000)
    assert code == 2 and f"{path} has " in err and "ask for less" in err
    path.write_bytes(b"\xff\xfe\xfa")
    assert "not UTF-8 text" in run("full", *options)[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("gvk",), "policy 'gvk' does not exist"),
        (("full", "--length", 20, "--prompt-tokens", 19), "--length 20 leaves nothing to compare"),
        (("full", "--sequences", 0), "--sequences and --prompt-tokens must be at least 1"),
        (("full", "--text", "nowhere.txt"), "--text nowhere.txt: there is no such file"),
        (("full", "--output", "nowhere/x.jsonl"), "the folder nowhere does not exist"),
        (("full", "--length", 1000), "the 512 that the model reads"),
        (("full", "--length", 12, "--prompt-tokens", 4), "too short for what they begin with"),
    ],
)
def test_what_cannot_be_compared_is_refused(run, options, message):
    code, out, err = run(*options)
    assert (code, out) == (2, "") and message in err and err.splitlines()[-1].startswith("error: ")


def test_a_plot_needs_matplotlib(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    code, _, err = run("full", "--plot", tmp_path / "kl.png")
    assert code == 2 and "pip install matplotlib" in err


@pytest.mark.slow
def test_on_real_text_random_is_far_worse_and_the_oracle_better():
    llm = jkv.load()
    written = write_passages(llm, count=4, length=512, seed=0)
    policies = [f"{name}:budget=128" for name in ("snapkv@gkv", "gkv", "streamingllm")]
    found = compare(llm, written, policies, prompt=128, oracle=True)
    kl = {each.name: mean_and_error(each.kl)[0] for each in found}
    assert kl["random:budget=128"] > 3 * max(kl[name] for name in policies)
    assert kl["oracle:budget=128"] < min(kl[name] for name in policies)
