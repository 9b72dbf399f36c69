"""The share of attention that lies on what a policy reads: the figures, and the command that tabulates them."""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from bench.recall import main
from bench.recall_cases import fit
from bench.recall_measure import RECENT, SINKS, Passage, measure, read_passage
from bench.recall_report import count_layers, find_sentences
from checkpoints import config as hf_config
from checkpoints import save_draft, save_hf
from jkv import cli
from jkv.policies import Evict, Policy, describe, entry, get_policy
from jkv.policies.specontext import SpeContext
from models import batch, dense, make_engine, request, tiny
from reads import tell_reads

LENGTH, STEPS = 104, 5
TEXTS = np.random.default_rng(3).integers(2, 64, (2, LENGTH + STEPS), np.int32)
SMALL = {
    "budget": 24,
    "page": 8,
    "dense": 0,
    "chunk": 4,
    "outliers": 1,
    "local": 1,
    "recent": 3,
    "sink": 2,
    "window": 4,
}
NAMES = ("quest", "quest@eval", "shadowkv@efficient", "shadowkv@fold", "specontext@previous", "gkv", "h2o")


def sized(name: str, **sizes: int) -> Policy:
    """A policy with the sizes that it has fields for."""
    policy = entry(name).policy
    return replace(policy, **{key: size for key, size in sizes.items() if key in dict(describe(policy))})


def small(name: str) -> Policy:
    """A policy that reads little, and compacts within the steps if it does at all."""
    policy = sized(name, **SMALL)
    return replace(policy, interval=2) if policy.interval else policy


@pytest.fixture(scope="module")
def passage() -> Passage:
    return read_passage(tiny("qwen2-3"), TEXTS, STEPS)


@pytest.fixture(scope="module")
def attention() -> np.ndarray:
    """True probabilities of the tokens that are fed, float64 `[N, L, B, H, G, T]`, by numpy."""
    model, total = tiny("qwen2-3"), LENGTH + STEPS
    seen = np.tril(np.ones((2, 2, total, total), bool))
    probs = np.stack([dense(model, row.tolist(), seen)[1] for row in TEXTS])
    return np.moveaxis(probs[:, ..., LENGTH:, :], (4, 1), (0, 1))


def test_attention_is_that_of_the_whole_text_read_at_once(passage, attention):
    for step, layers in enumerate(passage.fed):
        for layer, fed in enumerate(layers):
            np.testing.assert_allclose(fed.probs, attention[step, layer], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_of_what_the_policy_lets_attention_read_and_no_more_than_the_best(passage, attention, name):
    policy, reads = tell_reads(small(name))
    reads.sets.clear()
    figures = measure(policy, passage)
    jax.effects_barrier()
    assert figures.recall.shape == attention.shape[:-1] and len(reads.sets) == STEPS * 2
    for (layer, step), sets in reads.sets.items():
        for row, head in np.ndindex(2, 2):
            at = step, layer, row, head
            lists = [sets[row, head, query % sets.shape[2]] for query in range(3)]
            own = [sorted(of) for of in lists]
            expected = [attention[at][query, of].sum() for query, of in enumerate(own)]
            np.testing.assert_allclose(figures.recall[at], expected, atol=1e-4)
            assert figures.tokens[at] == len(set().union(*lists)) < LENGTH
            assert figures.attended[at] == pytest.approx(np.mean([len(of) for of in own]))
            middle = range(SINKS, LENGTH + step - RECENT + 1)
            expected = [attention[at][query, [t for t in of if t in middle]].sum() for query, of in enumerate(own)]
            assert figures.middle[at] == pytest.approx(np.mean(expected), abs=1e-4)
            assert figures.all_middle[at] == pytest.approx(attention[at][:, middle].sum(-1).mean(), abs=1e-4)
    mean = figures.recall.mean(-1)
    assert np.all(figures.best >= mean - 1e-6) and np.all(figures.best < 1)
    assert figures.best.mean() > mean.mean() + 0.02
    if isinstance(policy, Evict):  # compacted after every second token
        expected = np.broadcast_to(policy.budget + np.array([1, 2, 1, 2, 1]).reshape(-1, 1, 1, 1), figures.tokens.shape)
        np.testing.assert_array_equal(figures.tokens, expected)
    if name == "specontext@previous":  # which reads the same number of tokens in every head
        np.testing.assert_allclose(passage.find_best(SMALL["budget"]), figures.best, atol=1e-6)


def test_a_choice_by_the_last_token_is_by_its_true_attention(passage, attention):
    policy, reads = tell_reads(small("specontext@previous"))
    reads.sets.clear()
    measure(policy, passage)
    jax.effects_barrier()
    for step, row, head in np.ndindex(STEPS - 1, 2, 2):
        recent = LENGTH + step + 2 - 3
        score = attention[step, 1, row, head].max(axis=0)[2:recent]
        chosen = (2 + np.argsort(-score, kind="stable")[: 24 - 2 - 3]).tolist()
        assert reads.sets[0, step + 1][row, head, 0] == {0, 1, *chosen, *range(recent, recent + 3)}


@pytest.mark.parametrize("name", ["full", "quest@eval", "shadowkv", "specontext", "h2o"])
def test_reading_everything_has_all_of_the_attention(passage, name):
    figures = measure(sized(name, budget=128, dense=0), passage)
    for found in (figures.recall, figures.best, figures.middle / figures.all_middle):
        np.testing.assert_allclose(found, 1, atol=1e-6)
    expected = np.broadcast_to(LENGTH + 1 + np.arange(STEPS).reshape(-1, 1, 1, 1), figures.tokens.shape)
    np.testing.assert_array_equal(figures.tokens, expected)


def test_a_draft_chooses_as_it_does_in_the_engine(tmp_path):
    # Before the layers of the first step nothing depends on what has been read, so the choice has to be the same.
    model, prompts = tiny(num_layers=3), TEXTS[:, :64]
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    values = hf_config(vocab_size=64, hidden_size=64, **sizes)
    head = str(save_draft(tmp_path, values, layout="official", eagle_aux_hidden_state_layer_ids=[0, 1, 2]))
    policy = SpeContext(budget=12, sink=1, recent=2, head=head).adapt(model.config)
    brought = policy.bring(model.config, "float32")
    telling, reads = tell_reads(policy)
    engine, weights = make_engine(model, telling, longest=64, new=2)
    asked = request()._replace(brought=brought)
    state, out = engine.prefill(weights, *batch(prompts.tolist(), 64, 2), asked)
    engine.decode(weights, state, asked, steps=1)
    jax.effects_barrier()
    passage = read_passage(model, np.concatenate([prompts, out.tokens], axis=1), 1)
    figures = measure(policy, passage, brought)
    assert len({frozenset(of) for of in reads.sets[0, 0].ravel()}) > 1
    for layer, row, head in np.ndindex(3, 2, 2):
        of = sorted(reads.sets[layer, 0][row, head, 0])
        expected = np.asarray(passage.fed[0][layer].probs)[row, head][:, of].sum(-1)
        np.testing.assert_allclose(figures.recall[0, layer, row, head], expected, atol=1e-6)


def test_dense_layers_count_for_none():
    policies = [get_policy("quest:dense=2"), get_policy("gkv"), get_policy("full")]
    assert count_layers(policies, 4).tolist() == [2, 3]
    assert count_layers(policies[1:], 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("quest", "quest:budget=128"),
        ("quest:page=8", "quest:page=8,budget=128"),
        ("specontext", "specontext:budget=128,recent=32"),
        ("specontext:recent=9", "specontext:recent=9,budget=128"),
        ("specontext@paper", "specontext@paper:budget=128"),
        ("gkv", "gkv:budget=120"),
        ("shadowkv", "shadowkv:budget=72,outliers=2"),
        ("shadowkv:outliers=0", "shadowkv:outliers=0,budget=88"),
        ("full", "full"),
    ],
)
def test_a_budget_is_what_a_step_reads(name, fields):
    assert fit(name, 128, 16) == fields


def test_a_policy_is_called_worse_than_blind_only_if_the_rows_can_tell():
    def line(policy: str, of_row: list[float]) -> dict[str, Any]:
        about = {"policy": policy, "budget": 64, "length": 512, "evicts": False}
        return {**about, "of_row": of_row, "recall": np.mean(of_row), "possible": 1.0, "middle": 0.0}

    lines = [
        line("streamingllm", [0.70, 0.80, 0.60, 0.75]),
        line("worse", [0.66, 0.75, 0.56, 0.70]),
        line("unclear", [0.69, 0.82, 0.50, 0.75]),
    ]
    (sentence,) = (text for text in find_sentences(lines) if "streamingllm" in text and text.startswith("Less"))
    assert "read by worse, in the mean over the budget of 64" in sentence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_hf(tmp_path_factory.mktemp("recall") / "tiny", hf_config(), seed=0))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    path, rng = tmp_path_factory.mktemp("recall") / "words.txt", np.random.default_rng(0)
    path.write_text(" ".join(rng.choice(["fox", "dog", "jumps", "over", "lazy", "brown"], 400)), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("drawn", [False, True])
def test_the_command_writes_its_files(folder, words, tmp_path, capsys, monkeypatch, drawn):
    if drawn:
        pytest.importorskip("matplotlib", reason="needs the extra bench: matplotlib")
    else:
        monkeypatch.setattr("bench.recall.find_spec", lambda name: None)
    sizes = ["--lengths", "48", "96", "--budgets", "16", "64", "--steps", "2", "--rows", "2"]
    policies = ["--policies", "quest:dense=1", "streamingllm"]
    assert cli.run(main, ["--model", folder, "--text", words, "--out", str(tmp_path), *sizes, *policies]) == 0
    printed = capsys.readouterr()
    assert {path.name for path in tmp_path.iterdir()} == {"recall.md", "recall.jsonl", *(["recall.png"] * drawn)}
    assert ("matplotlib is missing" in printed.err) != drawn
    report = (tmp_path / "recall.md").read_text(encoding="utf-8")
    assert report in printed.out
    assert ("![" in report) == drawn and "quest:dense=1 at 16: policy Quest: budget is 16" in report
    lines = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    found = {(line["policy"], line["budget"], line["length"]): line for line in lines}
    assert len(found) == len(lines) == 2 * 5
    for line in lines:
        assert line["layers"] == [1] and len(line["of_layer"]) == len(line["of_row"]) == 2
        assert 0 < line["recall"] <= line["possible"] + 1e-6 <= 1 + 2e-6 and line["error"] >= 0
        assert line["machine"]["jax"] == jax.__version__
    assert found["quest:dense=1", 64, 48]["recall"] == pytest.approx(1, abs=1e-6)
    assert found["quest:dense=1", 64, 96]["recall"] < found["best tokens", 64, 96]["recall"] < 1
    assert found["streamingllm", 64, 96]["tokens"] == 63 + 1.5
    if drawn:
        assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_writes_the_same_text_for_the_same_seed(folder, tmp_path):
    texts = []
    for seed in (0, 0, 1):
        options = ["--text-from-model", "--seed", str(seed), "--lengths", "40", "--budgets", "16", "--steps", "2"]
        many = ["--rows", "2", "--policies", "streamingllm", "--out", str(tmp_path), "--model", folder]
        assert cli.run(main, [*options, *many]) == 0
        line = json.loads((tmp_path / "recall.jsonl").read_text().splitlines()[0])
        texts.append(line["text"].rpartition(" ")[2])
        assert f"seed {seed}" in line["text"] and line["of_row"][0] != line["of_row"][1]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "nosuch"], "policy 'nosuch' does not exist"),
        (["--policies", "gkv:budget=64"], "leave the budget out"),
        (["--policies", "quest", "--budgets", "16"], "budget is 16; it must be at least 3 pages"),
        (["--lengths", "600"], "the model reads 512 tokens"),
        (["--lengths", "300", "--rows", "300"], "give a longer text"),
        (["--steps", "0"], "argument --steps: '0' must be a whole number, at least 1"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--text-from-model"], "not allowed with argument --text"),
    ],
)
def test_bad_options_are_one_line(folder, words, tmp_path, capsys, options, message):
    small = ["--model", folder, "--text", words, "--lengths", "32", "--out", str(tmp_path / "out")]
    assert cli.run(main, [*small, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
