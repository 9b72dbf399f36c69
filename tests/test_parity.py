"""Logits and greedy tokens are those of transformers: live where torch is there, and against recordings everywhere."""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import jkv
import models
import parity_cases as cases
from checkpoints import config, save_hf
from jkv.config import ModelConfig
from weights import content_hash, load_parameters, open_checkpoint
from weights.hub import embedded_file

TOLERANCE, EMBEDDED_TOLERANCE = 2e-4, 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Writes the checkpoint of a case, and answers its prompts: a function of the case's name, kept for the module."""

    @functools.cache
    def answer(name: str) -> tuple[Path, models.Trace]:
        case = cases.CASES[name]
        folder = save_hf(tmp_path_factory.mktemp(name), case.config, seed=case.seed)
        prompts = [case.prompt[:length].tolist() for length in cases.LENGTHS]
        trace = models.run(
            load_parameters(open_checkpoint(folder)),
            jkv.get_policy("full"),
            prompts,
            cases.NEW,
            longest=max(cases.LENGTHS),
            steps=cases.NEW - 1,
            prefill_block=case.block,
        )
        return folder, trace

    return answer


@pytest.fixture(scope="module")
def recorded():
    with np.load(cases.TINY) as arrays:
        names = arrays["names"].tolist()
        assert names == list(cases.CASES), "the cases have changed; run goldens.make_goldens"
        return {name: {key: arrays[key][index] for key in arrays.files} for index, name in enumerate(names)}


@pytest.mark.parametrize("name", cases.CASES)
def test_tiny_models_answer_as_recorded(tiny, recorded, name):
    golden = recorded[name]
    assert cases.CASES[name].hash_weights() == golden["sha256"], "the weights have changed; run goldens.make_goldens"
    assert golden["logits"].std() > 1
    assert all(len(set(row)) >= 5 for row in golden["ids"].tolist())
    trace = tiny(name)[1]
    np.testing.assert_array_equal(trace.tokens, golden["ids"])
    np.testing.assert_allclose(trace.logits[:, 0, cases.COLUMNS], golden["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parity
@pytest.mark.parametrize("name", cases.CASES)
def test_tiny_models_answer_as_transformers(tiny, name):
    pytest.importorskip("torch", reason="needs the parity extra")
    folder, trace = tiny(name)
    model = cases.load_reference(folder)
    for row, length in enumerate(cases.LENGTHS):
        drawn = trace.tokens[row]
        text = np.concatenate([cases.CASES[name].prompt[:length], drawn[:-1]])
        logits = cases.forward(model, text)[length - 1 :]
        np.testing.assert_allclose(trace.logits[row], logits, rtol=0, atol=TOLERANCE, err_msg=f"length {length}")
        # Each token is the best after those before it: the text is the greedy one.
        np.testing.assert_array_equal(drawn, logits.argmax(-1), err_msg=f"length {length}")


ROPES = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": cases.extended("linear"),
    "llama3": cases.extended("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": cases.extended("yarn", attention_factor=1.3),
}


@pytest.mark.parametrize("rope", ROPES)
def test_both_spellings_of_a_config_mean_the_same(tmp_path, rope):
    new = config("qwen2", **ROPES[rope])
    old = cases.old_spelling(new)
    assert "rope_parameters" not in old and "dtype" not in old
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new) != ModelConfig.from_hf(config("qwen2"))
    folders = [save_hf(tmp_path / spelling, text) for spelling, text in (("new", new), ("old", old))]
    tokens = np.arange(2, 72, dtype=np.int32)[None]
    first, second = (jkv.load(folder).logits(tokens) for folder in folders)
    np.testing.assert_array_equal(first, second)


def test_rope_settings_change_logits(tmp_path):
    """A reader that skipped one of them would be noticed."""
    tokens = np.arange(2, 72, dtype=np.int32)[None]
    texts = [config("qwen2"), *(config("qwen2", **rope) for rope in ROPES.values())]
    logits = [
        jkv.load(save_hf(tmp_path / str(number), text)).logits(tokens)[0, -1] for number, text in enumerate(texts)
    ]
    for first in range(len(logits)):
        for second in range(first):
            assert np.abs(logits[first] - logits[second]).max() > 10 * TOLERANCE


@dataclass(frozen=True)
class Embedded:
    """What the embedded model says.

    Attributes:
        text, chat: token ids of the text and of the question.
        logits: of the text, float32 `[T, V]`.
        drawn: greedy tokens after the question.
    """

    llm: jkv.LLM
    text: list[int]
    chat: list[int]
    logits: np.ndarray
    drawn: list[int]


@pytest.fixture(scope="module")
def embedded():
    try:
        llm = jkv.load(embedded_file(), dtype="float32")
    except ValueError as missing:
        pytest.skip(str(missing))
    text, chat = llm.encode(cases.TEXT, raw=True), llm.encode(cases.QUESTION)
    result = jkv.generate(llm, cases.QUESTION, config=jkv.GenerationConfig(max_new_tokens=cases.EMBEDDED_NEW))[0]
    assert len(set(result.tokens)) > 50
    return Embedded(llm, text, chat, llm.logits(np.array([text]))[0], list(result.tokens))


def test_the_embedded_model_answers_as_recorded(embedded):
    with np.load(cases.EMBEDDED) as golden:
        assert content_hash(embedded.llm.checkpoint) == golden["sha256"], "another file; run goldens.make_goldens"
        assert embedded.text == golden["text"].tolist()
        assert embedded.chat == golden["chat"].tolist()
        assert len(golden["ids"]) == cases.EMBEDDED_NEW
        assert embedded.drawn == golden["ids"].tolist()
        logits = embedded.logits[cases.EMBEDDED_ROWS, cases.EMBEDDED_COLUMNS]
        np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=EMBEDDED_TOLERANCE)


@pytest.mark.parity
def test_the_embedded_model_answers_as_transformers(embedded):
    pytest.importorskip("torch", reason="needs the parity extra")
    pytest.importorskip("accelerate", reason="needs the parity extra")
    path = embedded.llm.checkpoint.path
    model = cases.load_reference(path.parent, gguf_file=path.name)
    np.testing.assert_allclose(embedded.logits, cases.forward(model, embedded.text), rtol=0, atol=EMBEDDED_TOLERANCE)
    text = embedded.chat + embedded.drawn[:-1]
    assert embedded.drawn == cases.forward(model, text)[len(embedded.chat) - 1 :].argmax(-1).tolist()
