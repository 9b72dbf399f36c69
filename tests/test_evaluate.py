"""Problems, verdicts on answers, passkeys, and `python -m jkv.evaluate`."""

import json
import math
import threading
from fractions import Fraction
from importlib.util import find_spec

import jax
import numpy as np
import pytest

import jkv
from checkpoints import config, save_hf
from jkv import cli
from jkv.commands import evaluate as command
from jkv.evaluation import Verdict, judge, summarize
from jkv.grading import Grade, Grader, last_box, majority
from jkv.jsonl import read_answers
from jkv.passkey import make_cases, score_passkeys
from jkv.problems import PRESETS, Problem, read_problems

needs_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify: .[eval]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("evaluate") / "tiny", config(num_hidden_layers=2), seed=0)


@pytest.fixture(scope="module")
def llm(folder):
    return jkv.load(folder)


# Problems


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"problem": "1+1?", "answer": "2"}, Problem(1, "1+1?", "2")),
        ({"question": "1+1?", "answer": "One and one.\n#### 1,002"}, Problem(1, "1+1?", "1,002")),
        ({"ID": 60, "Problem": "1+1?", "Solution": "...", "Answer": 2}, Problem(60, "1+1?", "2")),
        (
            {"unique_id": "test/1.json", "problem": "1+1?", "solution": r"\boxed{2}", "answer": r"\frac42"},
            Problem("test/1.json", "1+1?", r"\frac42"),
        ),
    ],
)
def test_every_layout_of_a_problem_is_read(tmp_path, line, problem):
    (tmp_path / "problems.jsonl").write_text("\n" + json.dumps(line) + "\n")
    (found,) = read_problems(str(tmp_path / "problems.jsonl"))
    assert found == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problems"),
        ('{"problem": "a"}', ":1: needs a text in 'problem' or 'question', and an 'answer'"),
        ('{"problem": "a", "answer": ["2"]}', ":1: needs a text"),
        ('{"problem": "a", "answer": "1"}\n["b"]', ":2: must be an object"),
        ('{"problem": "a", "answer": "1"}\n{"problem"', ":2: not JSON"),
        ('{"id": 2, "problem": "a", "answer": "1"}\n{"problem": "b", "answer": "1"}', ":2: id 2 is that of an earlier"),
    ],
)
def test_a_bad_problem_is_refused_by_its_line(tmp_path, text, message):
    (tmp_path / "problems.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"problems\.jsonl") as refusal:
        read_problems(str(tmp_path / "problems.jsonl"))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_papers_ask_as_they_say():
    problem = Problem(1, "What is {x}?", "2")
    assert PRESETS["plain"].ask(problem, chat=True) == PRESETS["gkv"].ask(problem, chat=True) == "What is {x}?"
    assert PRESETS["gkv"].ask(problem, chat=False).endswith("\\boxed{}.\n\nWhat is {x}?")
    assert PRESETS["deepseek"].ask(problem, chat=True).startswith("What is {x}?\nPlease reason")
    assert all((preset.temperature, preset.top_p) == (0.6, 0.95) for preset in PRESETS.values())


# Verdicts


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{7} and then \boxed{8", r"\boxed{7}"),
        (r"\boxed {\{1, 2\}} \fbox{a\}}", r"\fbox{a\}}"),
        (r"the answer is 5", None),
        (r"\boxed5", None),
    ],
)
def test_the_last_box_counts(text, box):
    assert last_box(text) == box


# In several notations; some equal one another.
ANSWERS = [
    *(
        "2",
        "2.0",
        "-2",
        r"\frac{1}{2}",
        "0.5",
        r"\dfrac12",
        r"50\%",
        "1,002",
        "1002",
        r"3\sqrt{2}",
        r"\sqrt{18}",
        "(1, 2)",
    ),
    *(
        r"\{1, 2\}",
        r"\{2, 1\}",
        "[1, 2]",
        "x=2",
        "x^2 + 2x + 1",
        "(x+1)^2",
        r"\text{Evelyn}",
        r"2\pi",
        "6.28",
        r"90^\circ",
    ),
]


@needs_math_verify
def test_verdicts_are_those_of_math_verify():
    from math_verify import parse, verify

    quiet = {"parsing_timeout": 0}
    golds = [(gold, parse(f"${gold}$", **quiet)) for gold in ANSWERS[::2]]
    found = [(answer, parse(rf"\boxed{{{answer}}}", **quiet)) for answer in ANSWERS]
    right = 0
    with Grader() as grader:
        for gold, expected in golds:
            for answer, value in found:
                grade = grader.grade(rf"First \boxed{{77}}. Then it is \boxed{{{answer}}}.", gold)
                verdict = verify(expected, value, timeout_seconds=0)
                assert (grade.correct, grade.timed_out) == (verdict, False), (gold, answer)
                assert grade.extracted == rf"\boxed{{{answer}}}"
                right += verdict
    assert len(golds) * len(found) == 242 and 20 < right < 80


@needs_math_verify
def test_an_answer_that_takes_too_long_is_wrong_and_the_next_one_is_graded():
    """From another thread, where math-verify's own limit does not work."""
    grades = []

    def grade() -> None:
        with Grader(seconds=2) as grader:
            grades.extend(grader.grade(answer, "0.5") for answer in (r"\boxed{9^{9^{9^9}}}", r"\boxed{\frac12}", None))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    slow, right, none = grades
    assert slow.timed_out and not slow.correct
    assert right.correct and not right.timed_out and right.value == "1/2"
    assert none == Grade(correct=False)


def test_equal_answers_vote_together():
    def grades(*values: str | None) -> list[Grade]:
        return [Grade(correct=value in ("1/2", "0.5"), value=value) for value in values]

    assert majority(grades("3", "1/2", "3", "0.5", "1/2")) and majority(grades("1/2", "3"))
    assert not majority(grades("3", "1/2")) and not majority(grades(None, None, None))
    assert majority(grades(None, None, "0.5"))


def line(sample: int, text: str, *, id: int = 1, ended: bool = True, tokens: int = 10) -> dict:
    """A line of an answers file, of a model that thinks from the start."""
    thought, mark, answer = text.partition("</think>")
    return {
        "id": id,
        "sample": sample,
        "reasoning": thought if mark or not ended else None,
        "answer": answer if mark else (text if ended else None),
        "finish_reason": "stop" if ended else "length",
        "prompt_tokens": 5,
        "new_tokens": tokens,
    }


@needs_math_verify
def test_what_is_thought_is_no_answer():
    lines = [
        line(0, r"maybe \boxed{41}</think>It is \boxed{42}."),
        line(1, r"it is \boxed{42}, or</think>\boxed{41} or \boxed{42}"),
        line(2, r"it is \boxed{42}", ended=False),
        line(3, r"it is \boxed{42}"),  # the end of text came before that of the reasoning
        line(4, r"hm</think>The answer, 42, follows from 4", ended=False),
        line(5, r"hm</think>It is \boxed{42}, since", ended=False),
        line(6, r"hm</think>The answer is 42"),
        line(7, r"hm \boxed{42}</think>I do not know."),
    ]
    verdicts = list(judge([Problem(1, "?", "42")], lines[::-1], thinking=True))
    assert [verdict.sample for verdict in verdicts] == list(range(8))
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False, False, True, True, False]
    assert [verdict.truncated for verdict in verdicts] == [False, False, True, True, True, True, False, False]
    assert verdicts[2].value is verdicts[3].value is verdicts[4].value is verdicts[7].value is None


def test_the_numbers():
    def verdict(id: int, sample: int, value: str | None, **changes: object) -> Verdict:
        given = {"truncated": value is None, "expected": "1", "prompt_tokens": 1, "new_tokens": 10 * id, **changes}
        return Verdict(id=id, sample=sample, correct=value == "1", value=value, **given)

    found = summarize(
        [
            *(verdict(1, sample, value) for sample, value in enumerate(("1", "1", "2", None))),
            *(verdict(2, sample, value) for sample, value in enumerate(("3", "3", "1", "2"))),
            *(verdict(3, sample, value) for sample, value in enumerate((None, "1", "1", "1"))),
        ]
    )
    shares = [Fraction(1, 2), Fraction(1, 4), Fraction(3, 4)]
    assert found["pass_at_1"] == pytest.approx(0.5)
    assert found["pass_at_1_error"] == pytest.approx(math.sqrt(sum((share - 0.5) ** 2 for share in shares) / 2 / 3))
    assert found["maj_at_4"] == pytest.approx(2 / 3) and found["pass_at_1_ended"] == pytest.approx(0.6)
    assert (found["problems"], found["samples"], found["answers"], found["truncated"]) == (3, 4, 12, 2)
    assert (found["no_value"], found["new_tokens"]) == (2, 20)
    alone = summarize([verdict(1, 0, "1")])
    assert alone["pass_at_1_error"] is None and "maj_at_1" not in alone


# Passkeys


@pytest.fixture(scope="module")
def cases(llm):
    return make_cases(llm, count=3, length=330)


def test_keys_are_hidden_at_all_depths(llm, cases):
    for index, case in enumerate(cases):
        key = llm.tokenizer.decode(case.digits)
        text = llm.tokenizer.decode(case.context)
        assert len(key) == 5 and key.isdecimal() and text.count(key) == 2
        assert 270 < len(case.context) + len(case.question) <= 330
        assert abs(text.index(key) / len(text) - (index + 0.5) / 3) < 0.2
    assert make_cases(llm, count=3, length=330) == cases
    with pytest.raises(ValueError, match="have no room"):
        make_cases(llm, count=1, length=120)
    with pytest.raises(ValueError, match="longer than the 512"):
        make_cases(llm, count=1, length=510)


def test_full_attention_remembers_as_a_forward_pass_does(llm, cases):
    found = score_passkeys(llm, "full", cases, "seen")
    for index, case in enumerate(cases):
        text = [*case.context, *case.question, *case.digits]
        likely = np.asarray(jax.nn.log_softmax(llm.logits(np.array([text]))[0]))[-6:-1]
        assert found.nll[index] == pytest.approx(-likely[np.arange(5), case.digits].mean(), abs=1e-4)
        right = likely.argmax(axis=1) == case.digits
        assert (found.digits[index], found.whole[index]) == (pytest.approx(right.mean()), right.all())
    # What is seen when nothing is cut makes no difference.
    unseen = score_passkeys(llm, "full", cases, "unseen")
    np.testing.assert_allclose(unseen.nll, found.nll, atol=1e-4)


def test_what_a_policy_cuts_shows(llm, cases):
    policy = "snapkv:budget=24,window=8,interval=16"
    seen, unseen = (score_passkeys(llm, policy, cases, variant) for variant in ("seen", "unseen"))
    full = score_passkeys(llm, "full", cases, "seen")
    assert np.min(np.abs(seen.nll - full.nll)) > 1e-3 and np.min(np.abs(seen.nll - unseen.nll)) > 1e-3
    enough = score_passkeys(llm, "snapkv:budget=400,window=8,interval=16", cases, "unseen")
    np.testing.assert_allclose(enough.nll, full.nll, atol=1e-4)
    selected = score_passkeys(llm, "quest:budget=400,page=8,dense=0", cases, "seen")
    np.testing.assert_allclose(selected.nll, full.nll, atol=1e-4)


# The command


@pytest.fixture
def run(folder, llm, capsys, monkeypatch):
    monkeypatch.setattr(command, "load", lambda *_, **__: llm)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run(command.main, [*map(str, arguments), "--model", str(folder)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [{"id": f"p{n}", "problem": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


OPTIONS = ("--samples", 2, "--slots", 3, "--max-new-tokens", 24, "--policy", "gkv:budget=16,window=8,interval=4")


@needs_math_verify
def test_a_results_folder(run, problems, tmp_path):
    results = tmp_path / "new" / "results"
    code, out, err = run(problems, *OPTIONS, "--output", results)
    assert code == 0, err
    assert "(preset gkv)" in err and "temperature 0.6, top_p 0.95" in err and "pass at 1" in out
    assert sorted(path.name for path in results.iterdir()) == [
        *("answers.jsonl", "graded.jsonl", "manifest.json", "summary.json")
    ]
    answers = {(row["id"], row["sample"]): row for row in read_answers(results / "answers.jsonl")}
    graded = read_answers(results / "graded.jsonl")
    assert [(row["id"], row["sample"]) for row in graded] == [(f"p{n}", s) for n in range(3) for s in range(2)]
    assert answers.keys() == {(row["id"], row["sample"]) for row in graded}
    assert len({tuple(row["token_ids"]) for row in answers.values()}) > 3  # they are drawn
    length = graded[0]["prompt_tokens"] + graded[0]["new_tokens"]
    assert graded[0]["kept_share"] == pytest.approx(16 / length) and graded[0]["read_share"] > graded[0]["kept_share"]
    summary = json.loads((results / "summary.json").read_text())
    assert summary["pass_at_1"] == np.mean([row["correct"] for row in graded])
    assert summary["truncated"] == sum(row["truncated"] for row in graded)
    manifest = json.loads((results / "manifest.json").read_text())
    assert manifest["generation"]["temperature"] == 0.6 and manifest["policy"]["budget"] == 16

    # A run that was killed: some answers, and one cut off.
    numbers, lines = summary, (results / "answers.jsonl").read_bytes().splitlines(keepends=True)
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "answers.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    code, _, err = run(problems, *OPTIONS, "--output", killed)
    assert code == 0 and "2 of 6 answers are there already" in err
    assert sorted((killed / "answers.jsonl").read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert (killed / "graded.jsonl").read_bytes() == (results / "graded.jsonl").read_bytes()
    assert json.loads((killed / "summary.json").read_text()) == numbers

    # Repeated from its manifest, and begun with fewer problems.
    code, _, err = run("--rerun", results / "manifest.json", "--output", tmp_path / "again", "--limit", 1)
    assert code == 2 and "the prompts are not those of the manifest" in err
    code, _, err = run(problems, *OPTIONS, "--output", tmp_path / "again", "--limit", 1)
    assert code == 0, err
    code, out, err = run("--rerun", results / "manifest.json", "--output", tmp_path / "again", "--json")
    assert code == 0 and "2 of 6 answers are there already" in err
    assert json.loads(out) == numbers
    assert sorted((tmp_path / "again" / "answers.jsonl").read_bytes().splitlines(keepends=True)) == sorted(lines)

    # Other settings never mix.
    code, _, err = run(problems, *OPTIONS, "--temperature", 1, "--output", results)
    assert code == 2 and "drawn with other settings" in err


def test_passkeys(run, tmp_path):
    options = ("--limit", 2, "--length", 300, "--policy", "snapkv:budget=24,window=8,interval=16", "--json")
    code, out, err = run("passkey", *options, "--output", tmp_path / "results")
    assert code == 0, err
    summary = json.loads(out)
    lines = read_answers(tmp_path / "results" / "answers.jsonl")
    assert [(line["text"], line["variant"]) for line in lines] == [
        (0, "seen"),
        (1, "seen"),
        (0, "unseen"),
        (1, "unseen"),
    ]
    assert summary["unseen_nll"] == pytest.approx(np.mean([line["nll"] for line in lines[2:]]))
    assert json.loads((tmp_path / "results" / "summary.json").read_text()) == summary
    code, again, _ = run("--rerun", tmp_path / "results" / "manifest.json", "--json")
    assert (code, json.loads(again)) == (0, summary)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no task; name a JSONL file"),
        (("nowhere.jsonl", "--output", "x"), "nowhere.jsonl: there is no such file"),
        (("nowhere.jsonl",), "no folder for the answers; give one with --output"),
        (("nowhere.jsonl", "--output", "x", "--length", 9), "--length is for the task passkey"),
        (("nowhere.jsonl", "--output", "x", "--limit", 0), "--limit 0 must be at least 1"),
        (("nowhere.jsonl", "--output", "x", "--samples", 0), "--samples 0"),
        (("nowhere.jsonl", "--output", "x", "--preset", "r1"), "invalid choice: 'r1'"),
        (("nowhere.jsonl", "--output", "x", "--top-p", 7), "top_p=7"),
        (("nowhere.jsonl", "--output", __file__), "is a file; name a folder"),
        (("passkey", "--policy", "gvk"), "policy 'gvk' does not exist"),
        (("passkey", "--temperature", 1), "passkeys are asked for in one way"),
        (("passkey", "--length", 100), "have no room"),
        (("passkey", "--rerun", "nowhere.json"), "manifest nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(run, monkeypatch, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*options)
    assert (code, out) == (2, "") and message in err and err.splitlines()[-1].startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_named(run, problems, tmp_path, monkeypatch):
    monkeypatch.setattr("jkv.grading.find_spec", lambda name: None)
    monkeypatch.setattr("jkv.problems.find_spec", lambda name: None)
    code, _, err = run(problems, "--output", tmp_path / "results")
    assert code == 2 and "pip install 'jkv[eval]'" in err
    with pytest.raises(ValueError, match="pip install datasets"):
        read_problems("org/name:test")
