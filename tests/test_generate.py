"""`python -m jkv.generate`, run in this process where it can be."""

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jkv
import weights
from checkpoints import config, save_hf
from jkv import cli
from jkv.commands import generate as command
from jkv.plan import format_bytes
from jkv.policies import describe, entry, names

TEXT = "the quick brown fox"
NEW = 12
EVICT = "gkv:budget=16,window=8,interval=4"
PROMPTS = [{"id": "a", "prompt": "one"}, {"prompt": "the lazy dog"}, {"id": "c", "problem": "12 + 30 = "}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("generate") / "tiny", config(num_hidden_layers=1), seed=0)


@pytest.fixture(scope="module")
def loaded():
    """Models that are loaded, with their compiled programs."""
    return {}


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def results(self) -> list[dict[str, Any]]:
        """The answers that --json printed."""
        assert self.code == 0, self.err
        return json.loads(self.out)["results"]

    @property
    def ids(self) -> list[list[int]]:
        return [result["token_ids"] for result in sorted(self.results, key=lambda row: (str(row["id"]), row["sample"]))]


@pytest.fixture
def main(monkeypatch, capsys, loaded):
    """Runs the command; models are loaded and compiled once."""

    def load(checkpoint: weights.Checkpoint, **options: Any) -> jkv.LLM:
        key = checkpoint.path, options["dtype"], options["implementation"]
        loaded[key] = loaded.get(key) or jkv.load(checkpoint, **options)
        return loaded[key]

    def main(*arguments: Any, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.run(command.main, list(map(str, arguments)))
        return Ran(code, *capsys.readouterr())

    monkeypatch.setattr(command, "load", load)
    return main


@pytest.fixture
def run(main, folder):
    """Runs it with the tiny model, without a chat template, for few tokens, unless told otherwise."""

    def run(*arguments: Any, model: Path = folder, raw: bool = True, new: int = NEW, stdin: str = "") -> Ran:
        return main("--model", model, *["--raw"] * raw, "--max-new-tokens", new, *arguments, stdin=stdin)

    return run


@pytest.fixture
def llm(folder, loaded, run):
    run("-p", TEXT)
    return loaded[folder, None, None]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def with_generation(tmp_path: Path, **generation: Any) -> Path:
    """A copy of the tiny model with another generation config."""
    folder = save_hf(tmp_path / "other", config(num_hidden_layers=1), seed=0)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# One prompt


def test_an_answer_goes_to_stdout_and_the_rest_to_stderr(run, llm):
    ran = run("--prompt", TEXT, "--policy", EVICT)
    expected = jkv.generate(llm, TEXT, raw=True, policy=EVICT, config=jkv.GenerationConfig(max_new_tokens=NEW))[0]
    assert (ran.code, ran.out) == (0, expected.text + "\n")
    lines = ran.err.splitlines()
    assert lines[0].startswith("model: ") and lines[0].endswith("float32")
    assert lines[1].startswith("policy: gkv:") and "budget=16" in lines[1] and "lam=0.5" in lines[1]
    assert jkv.get_policy(lines[1].removeprefix("policy: ")) == jkv.get_policy(EVICT)
    assert lines[2] == "sampling: greedy, seed 0 (default)"
    assert lines[3].startswith(f"{expected.prompt_tokens} prompt + {NEW} new tokens; prefill ")
    assert "tokens/s" in lines[3] and "compile" in lines[3] and "after the command" in lines[3]
    assert lines[4].startswith(f"kv held {format_bytes(2 * 2 * 16 * 4 * 20)} ") and "of 20 slots" in lines[4]
    assert len(lines) == 5


def test_streaming_prints_each_piece_as_it_comes(run, monkeypatch):
    printed = []
    whole = run("-p", TEXT, "--no-stream").out
    monkeypatch.setattr("builtins.print", lambda *words, **options: printed.append((*words, options)))
    run("-p", TEXT, "--stream")
    pieces = [entry[0] for entry in printed if entry[-1] == {"end": "", "flush": True}]
    assert len(pieces) > 5
    assert whole == "## 1 0\n" + "".join(pieces) + "\n"


def test_json_holds_answers_and_statistics(run, llm):
    ran = run("-p", TEXT, "--json", "--samples", 2, "--temperature", 1)
    report = json.loads(ran.out)
    settings = jkv.GenerationConfig(max_new_tokens=NEW, temperature=1.0)
    expected = jkv.generate(llm, TEXT, raw=True, samples=2, config=settings)
    assert ran.ids == [list(result.tokens) for result in expected] and len(set(map(tuple, ran.ids))) == 2
    for row, result in zip(sorted(report["results"], key=lambda row: row["sample"]), expected, strict=True):
        assert (row["id"], row["text"], row["answer"]) == (1, result.text, result.answer)
        assert (row["new_tokens"], row["prompt_tokens"]) == (NEW, result.prompt_tokens)
        assert row["finish_reason"] == "length"
    stats = report["stats"]
    assert stats["tokens_per_second"] == stats["decoded_tokens"] / stats["decode_seconds"]
    assert stats["new_tokens"] == 2 * NEW


def test_a_prompt_from_stdin(run):
    assert run("-p", "-", "--json", stdin=TEXT + "\n").ids == run("-p", TEXT, "--json").ids


def test_the_chat_template_is_used_unless_raw(run, llm):
    chat = run("-p", "hi", "--json", raw=False).results[0]
    assert chat["prompt_tokens"] == len(llm.encode("hi"))
    system = run("-p", "hi", "--json", "--system", "be brief", raw=False).results[0]
    assert system["prompt_tokens"] == len(llm.encode("hi", system="be brief"))
    ran = run("-p", "hi", "--json", "--template-arg", "enable_thinking=false", raw=False)
    assert ran.results[0]["prompt_tokens"] == len(llm.encode("hi", arguments={"enable_thinking": False}))
    assert "note" not in ran.err
    ran = run("-p", "hi", "--json", "--template-arg", "colour=red", raw=False)
    assert ran.err.startswith("note: the chat template does not use colour\n")


def test_every_sampling_option_is_used_and_printed(run, llm):
    options = (
        "--temperature 0.9 --top-k 40 --top-p 0.8 --min-p 0.02 --repetition-penalty 1.3 --seed 7 --stop q --stop zz"
    )
    ran = run("-p", TEXT, "--json", "--ignore-eos", *options.split())
    settings = jkv.GenerationConfig(
        max_new_tokens=NEW,
        temperature=0.9,
        top_k=40,
        top_p=0.8,
        min_p=0.02,
        repetition_penalty=1.3,
        seed=7,
        stop=("q", "zz"),
        ignore_eos=True,
    )
    assert ran.ids == [list(jkv.generate(llm, TEXT, raw=True, config=settings)[0].tokens)]
    header = "sampling: temperature 0.9, top_k 40, top_p 0.8, min_p 0.02, repetition_penalty 1.3, seed 7 (options)"
    assert header in ran.err.splitlines()


def test_precedence_over_the_generation_config(run, tmp_path):
    model = with_generation(tmp_path, do_sample=True, temperature=0.6, top_p=0.95)
    asked = run("-p", TEXT, "--json", model=model)
    assert "sampling: temperature 0.6, top_p 0.95, seed 0 (generation_config.json)\n" in asked.err
    plain = run("-p", TEXT, "--json", "--temperature", 0, "--top-p", 1, model=model)
    assert "sampling: greedy, seed 0 (generation_config.json and options)\n" in plain.err
    assert plain.ids == run("-p", TEXT, "--json").ids != asked.ids


def test_end_tokens_and_stop_strings(run, tmp_path):
    free = run("-p", TEXT, "--json").results[0]
    end = free["token_ids"][4]
    assert free["token_ids"].index(end) == 4
    model = with_generation(tmp_path, eos_token_id=[1, end])
    ended = run("-p", TEXT, "--json", model=model).results[0]
    assert (ended["token_ids"], ended["finish_reason"]) == (free["token_ids"][:5], "stop")
    assert run("-p", TEXT, "--json", "--ignore-eos", model=model).ids == [free["token_ids"]]
    stop = free["text"][3:5]
    stopped = run("-p", TEXT, "--json", "--stop", stop).results[0]
    assert (stopped["text"], stopped["finish_reason"]) == (free["text"].partition(stop)[0], "stop")


def test_notes(run):
    assert "nothing was evicted" in run("-p", TEXT, "--policy", "gkv").err
    assert "nothing was evicted" not in run("-p", TEXT, "--policy", EVICT).err
    assert "nothing was evicted" not in run("-p", TEXT).err
    prompt = "x " * 255
    assert "note: prompt 1: at most 1 new tokens, the model reads 512 in all\n" in run("-p", prompt).err


def test_dtype_is_printed(run):
    assert "bfloat16\n" in run("-p", TEXT, "--dtype", "bfloat16").err


def test_the_embedded_model_is_said_to_be_used(main, folder, monkeypatch):
    opened = weights.open_checkpoint(folder)
    monkeypatch.setattr(weights, "open_checkpoint", lambda model, **options: opened if model is None else None)
    ran = main("-p", TEXT, "--raw", "--max-new-tokens", NEW)
    assert ran.code == 0 and "(no --model given: the embedded model)" in ran.err


# Many prompts


def test_answers_of_a_prompts_file(run, prompts, llm):
    ran = run("--input", prompts, "--slots", 2, "--json")
    texts = [row.get("prompt") or row["problem"] for row in PROMPTS]
    expected = jkv.generate(llm, texts, raw=True, config=jkv.GenerationConfig(max_new_tokens=NEW))
    found = {row["id"]: row["token_ids"] for row in ran.results}
    assert found == {key: list(result.tokens) for key, result in zip(("a", 2, "c"), expected, strict=True)}
    printed = run("--input", prompts).out
    assert all(f"## {key} 0\n{result.text}\n" in printed for key, result in zip(("a", 2, "c"), expected, strict=True))
    assert run("--input", prompts, "--stream", "--slots", 1).out == "".join(r.text + "\n" for r in expected)


def test_a_run_goes_on_where_it_ended(run, prompts, tmp_path):
    options = ("--input", prompts, "--samples", 2, "--temperature", 1, "--policy", EVICT)
    whole = tmp_path / "whole.jsonl"
    assert run(*options, "--output", whole).out == ""
    rows = {(row["id"], row["sample"]): row for row in answers(whole)}
    assert set(rows) == {(key, sample) for key in ("a", 2, "c") for sample in range(2)}
    assert len({row["text"] for row in rows.values()}) == 6
    for count in (0, 1, 4, 6):
        part = tmp_path / f"part{count}.jsonl"
        lines = whole.read_bytes().splitlines(keepends=True)
        part.write_bytes(b"".join(lines[:count]) + (lines[count][:30] if count < 6 else b""))
        ran = run(*options, "--output", part, "--json")
        assert len(ran.results) == 6 - count
        assert (f"{count} of 6 answers are there already" in ran.err) == (count > 0)
        assert answers(part)[:count] == answers(whole)[:count] and len(answers(part)) == 6
        assert {(row["id"], row["sample"]): row for row in answers(part)} == rows


def test_answers_of_other_settings_are_not_mixed(run, prompts, tmp_path):
    path = tmp_path / "answers.jsonl"
    options = ("--input", prompts, "--policy", EVICT, "--output", path)
    assert run(*options, raw=False, new=2).code == 0
    before = path.read_bytes()
    for changed in (
        ["--policy", "full"],
        ["--seed", 1],
        ["--max-new-tokens", 3],
        ["--dtype", "bfloat16"],
        ["--system", "be brief"],
        ["--template-arg", "enable_thinking=false"],
        ["--raw"],
    ):
        ran = run(*options, *changed, raw=False, new=2)
        assert ran.code == 2 and "other settings" in ran.err and "give another --output" in ran.err, changed
        assert path.read_bytes() == before


def test_a_killed_run_loses_and_doubles_nothing(run, folder, tmp_path):
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} + {n} = "}) + "\n" for n in range(60)))
    options = ["--input", str(prompts), "--output", str(path), "--slots", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jkv.generate", "--model", folder, "--raw", "--max-new-tokens", "64", *options],
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= 2):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = path.read_bytes().count(b"\n")
    assert 2 <= done < 60
    ran = run(*options, new=64)
    assert f"{done} of 60 answers are there already" in ran.err
    assert sorted(row["id"] for row in answers(path)) == list(range(1, 61))
    fresh = tmp_path / "fresh.jsonl"
    run("--input", prompts, "--output", fresh, new=64)
    assert sorted(path.read_bytes().splitlines()) == sorted(fresh.read_bytes().splitlines())


def test_a_progress_bar_on_a_terminal(run, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert f"{3 * NEW} tokens" in run("--input", prompts, "--output", tmp_path / "answers.jsonl").err


# Files beside the answers


def test_kept_positions_are_saved(run, prompts, tmp_path):
    path = tmp_path / "kept.npz"
    ran = run("--input", prompts, "--policy", EVICT, "--trace-kept", path, "--json")
    with np.load(path, allow_pickle=False) as trace:
        steps, kept, prompt_ids, new_ids = (trace[key] for key in ("steps", "kept", "prompt_ids", "new_ids"))
        assert len(trace.files) == 6
        assert str(trace["policy"]).startswith("GKV: ") and "budget 16" in str(trace["policy"])
        pieces = trace["pieces"]
    assert steps.tolist() == [*range(0, NEW, 4), NEW]
    assert kept.shape == (len(steps), 1, 3, 2, 20)  # layers, rows, heads, slots
    by_id = {row["id"]: row for row in ran.results}
    for row, key in enumerate(("a", 2, "c")):
        length = (prompt_ids[row] >= 0).sum()
        assert length == by_id[key]["prompt_tokens"]
        assert new_ids[row].tolist() == by_id[key]["token_ids"]
        assert ("one", "the lazy dog", "12 + 30 = ")[row] in "".join(pieces[row][:length])
        for index, step in enumerate(steps):
            seen = min(length + step, length + NEW - 1)
            held = kept[index, :, row]
            assert np.all((held >= 0).sum(-1) == min(seen, 16))
            assert held.max() == seen - 1


def test_a_manifest_repeats_a_run(main, run, prompts, tmp_path):
    path = tmp_path / "run.json"
    options = ("--samples", 2, "--temperature", 0.8, "--seed", 5, "--policy", EVICT)
    first = run("--input", prompts, *options, "--json", "--manifest", path)
    manifest = json.loads(path.read_text())
    assert manifest["policy"] == {"class": "GKV"} | {k: v for k, v in describe(jkv.get_policy(EVICT))}
    assert manifest["generation"]["seed"] == 5 and manifest["generation"]["temperature"] == 0.8
    assert manifest["model"]["dtype"] == manifest["arguments"]["dtype"] == "float32"
    assert len(manifest["model"]["sha256"]) == 64
    assert {"jax", "flax", "python"} <= manifest["versions"].keys()
    assert manifest["stats"]["new_tokens"] == sum(len(row) for row in first.ids)
    assert main("--rerun", path).ids == first.ids
    assert main("--rerun", path, "--seed", 6).ids != first.ids
    refused = main("--rerun", path, "--model", save_hf(tmp_path / "other", config(num_hidden_layers=1), seed=1))
    assert refused.code == 2 and "sha256" in refused.err and "use that model" in refused.err
    prompts.write_text(json.dumps({"prompt": "another"}) + "\n")
    refused = main("--rerun", path)
    assert refused.code == 2 and "the prompts are not those of the manifest" in refused.err


def table(text: str) -> dict[str, list[str]]:
    """Rows of the table that --dry-run prints: the policy's value and full attention's."""
    lines = [line for line in text.splitlines()[2:] if line[:1].strip() and line[20:].strip()]
    return {line[:20].strip(): [part.strip() for part in line[20:].split("  ") if part.strip()] for line in lines[:-1]}


@pytest.mark.parametrize("policy", [EVICT, "full", "h2o:budget=25%,floor=8,interval=4"])
def test_a_dry_run_prints_what_a_run_holds(run, prompts, policy):
    options = ("--input", prompts, "--policy", policy, "--slots", 2)
    stats = json.loads(run(*options, "--json").out)["stats"]
    full = json.loads(run("--input", prompts, "--slots", 2, "--json").out)["stats"]
    ran = run(*options, "--dry-run")
    assert ran.code == 0 and "tokens/s" not in ran.err
    rows = table(ran.out)
    for row, key in {
        "weights": "weight_bytes",
        "kv held": "kv_bytes_held",
        "beside the kv": "metadata_bytes_held",
        "kv read per token": "kv_bytes_read_per_token",
    }.items():
        assert rows[row] == [format_bytes(stats[key]), format_bytes(full[key])], row
    assert "\nfits in " in ran.out


def test_a_dry_run_needs_no_prompt(run):
    ran = run("--dry-run", "--slots", 16, "--policy", "gkv:budget=128", new=400)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("16 rows of 400 tokens\n")
    assert table(ran.out)["slots per kv head"] == ["256", "512"]


def test_a_dry_run_for_another_gpu(run):
    options = ("--dry-run", "--policy", "gkv:budget=128", "--memory", "1MB")
    ran = run(*options, "--slots", 400, new=400)
    assert (ran.code, ran.err) == (0, "")
    verdict = re.search(r"\ndoes not fit in 976\.6 KiB; one of these would: --slots (\d+)", ran.out)
    assert verdict, ran.out
    most = verdict[1]
    fits = run(*options, "--slots", "auto", new=400).out
    assert fits.startswith(f"{most} rows of 400 tokens\n") and "\nfits in 976.6 KiB" in fits
    assert "\nrefill " in fits and "\nadmit " in fits  # there may be more rows than slots
    assert "\ndoes not fit" in run(*options, "--slots", int(most) + 1, new=400).out
    # Half precision, unless another is asked for.
    half, single = (
        float(table(run(*options, "--slots", 1, *more).out)["weights"][0].split()[0])
        for more in ((), ("--dtype", "float32"))
    )
    assert half == pytest.approx(single / 2, rel=0.01)


def test_as_many_slots_as_fit(run, prompts):
    assert run("--input", prompts, "--slots", "auto", "--json").ids == run("--input", prompts, "--json").ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "80GiB"), "--memory is for plans"),
        (("--memory", "80", "--dry-run"), "--memory '80' must be a size"),
        (("--slots", "many"), "'many' must be a number or auto"),
        (("--slots", "0"), "--slots 0 must be at least 1"),
        (("--dry-run", "--slots", "auto", "--memory", "1KiB"), "not even one row fits in 1.0 KiB"),
    ],
)
def test_memory_and_slots_that_make_no_sense(run, options, message):
    ran = run("-p", "one", *options)
    assert ran.code == 2 and ran.err.startswith("error: ") and message in ran.err and ran.err.count("\n") == 1


# Policies


def test_policies_are_listed_and_explained(main):
    listed = main("--list-policies").out.splitlines()
    assert [line.split()[0] for line in listed[: len(names())]] == names()
    assert all(len(line.split()) > 3 for line in listed[: len(names())])
    for name in names():
        text = main("--explain", name).out
        policy = entry(name).policy
        assert policy.paper in text and "Exact" in text
        lines = text.splitlines()
        for field, value in describe(policy):
            place = lines.index(f"  {field} = {value!r}")
            assert lines[place + 1].strip(), f"{name}: {field} has no documentation"


def test_a_policy_in_a_file(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        """
from dataclasses import dataclass
import jax.numpy as jnp
from jkv import Evict

@dataclass(frozen=True, kw_only=True)
class Oldest(Evict):
    needs_queries = False
    lead: float = 1.0

    def score(self, slots, queries):
        return -self.lead * slots.pos.astype(jnp.float32)
"""
    )
    options = ("-p", "x " * 20, "--policy", f"{path}:Oldest,budget=16,window=4,interval=4")
    ran = run(*options, "--trace-kept", tmp_path / "kept.npz")
    assert ran.code == 0, ran.err
    with np.load(tmp_path / "kept.npz") as trace:
        assert trace["kept"][-1, 0, 0, 0, :12].tolist() == list(range(12))
    assert f"policy: {path}:Oldest" in ran.err and "budget=16" in ran.err


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seed -1", "seed=-1 must be an integer from 0 to"),
        ("--seed 9223372036854775808", "seed=9223372036854775808 must be"),
        ("--seed x", "argument --seed: invalid int value: 'x'"),
        ("--temperature -1", "temperature=-1.0 must be a finite number >= 0; 0 is greedy"),
        ("--temperature nan", "temperature=nan must be"),
        ("--top-p 2", "top_p=2.0 must be between 0 and 1; 1 is off"),
        ("--top-k -1", "top_k=-1 must be an integer >= 0; 0 is off"),
        ("--min-p nan", "min_p=nan must be"),
        ("--repetition-penalty 0", "repetition_penalty=0.0 must be above 0; 1 is off"),
        ("--max-new-tokens 0", "max_new_tokens=0 must be a whole number of at least 1"),
        ("--stop ''", "a stop string is empty"),
        ("--policy nothing", "policy 'nothing' does not exist"),
        ("--policy gvk", "did you mean 'gkv'"),
        ("--policy gkv:budgte=9", "did you mean 'budget'"),
        ("--policy rkv:budget=8,window=8", "budget is 8; it must be more than sink + window = 0 + 8"),
        ("--policy gkv:budget=abc", "budget is 'abc'; it must be int or float"),
        ("--policy gkv:budget=1.0", "budget is 1.0; it must be"),
        ("--policy gkv:alpha=2", "alpha is 2.0; it must be between 0 and 1"),
        ("--policy none.py:Mine", "policy file none.py does not exist"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--implementation cuda", "argument --implementation: invalid choice: 'cuda'"),
        ("--implementation triton", "implementation 'triton' needs an NVIDIA GPU, and jax finds cpu; use xla"),
        ("--policy full:attention=flash", "implementation 'cudnn' needs an NVIDIA GPU"),
        ("--policy full:attention=fast", "attention is 'fast'; it must be auto or eager or flash or splitk"),
        ("--samples 0", "--samples 0 and --slots 8 must be at least 1"),
        ("--slots 0", "--slots 0 must be at least 1"),
        ("--template-arg x", "--template-arg 'x' must be NAME=VALUE"),
        ("--template-arg x=1", "--raw leaves the chat template out"),
        ("--revision main", "revision 'main' applies to a model of the Hugging Face hub"),
        ("--stream --json", "--stream prints text, which --json"),
        ("--trace-kept kept", "--trace-kept kept: the name must end in .npz"),
        ("--trace-kept none/kept.npz", "the folder none does not exist; make it first"),
        ("--manifest none/run.json", "the folder none does not exist; make it first"),
        ("--rerun none.json", "manifest none.json cannot be read (No such file or directory)"),
        ("--rerun prompts.jsonl", "manifest prompts.jsonl"),
        ("--input prompts.jsonl", "not allowed with argument"),
        ("--nothing", "unrecognized arguments: --nothing; --help lists the options"),
        ("--explain nothing", "policy 'nothing' does not exist; policies are"),
        ("--model none", "model 'none': no such file or folder"),
        ("--model .", "neither config.json nor"),
        (f"--prompt '{'x ' * 300}'", "the model reads at most 512"),
    ],
)
def test_bad_options_are_refused_in_one_line(run, prompts, monkeypatch, options, message):
    monkeypatch.chdir(prompts.parent)
    ran = run("-p", TEXT, "--output", "answers.jsonl", *shlex.split(options))
    refused_in_one_line(ran, message)
    assert not Path("answers.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["-p", " \n"], "", "the prompt is empty; give some text"),
        (["-p", "-"], "\n", "the prompt is empty; give some text"),
        (["-p", TEXT, "--stream", "--samples", "2"], "", "--stream prints one answer as it grows, and there are 2"),
        ([], "", "no prompt; give one with -p TEXT (- reads standard input) or --input FILE.jsonl"),
        (["--input", "none.jsonl"], "", "prompts file none.jsonl: No such file or directory; give the path"),
        (["--input", "bad.jsonl"], "", "bad.jsonl:3: not JSON (Expecting value); write one object a line"),
    ],
)
def test_bad_prompts_are_refused_in_one_line(run, tmp_path, monkeypatch, arguments, stdin, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "a"}\n\n{"prompt":\n')
    refused_in_one_line(run(*arguments, stdin=stdin), message)


def refused_in_one_line(ran: Ran, message: str) -> None:
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1, ran.err
    assert message in ran.err


def test_debug_shows_where_an_error_comes_from(run):
    with pytest.raises(ValueError, match="seed=-1"):
        run("-p", TEXT, "--seed", -1, "--debug")


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "no space left", "kept.npz"), 2, "no space left: 'kept.npz'; give another path"),
    ],
)
def test_failures_from_outside(run, monkeypatch, failure, code, message):
    def fail(*arguments: Any) -> None:
        raise failure

    monkeypatch.setattr(command, "print_report", fail)
    ran = run("-p", TEXT)
    assert ran.code == code and message in ran.err and "Traceback" not in ran.err


# As a process of its own


def test_as_a_process(folder):
    command_line = [sys.executable, "-m", "jkv.generate", "--model", folder, "--raw", "--max-new-tokens", "200"]
    process = subprocess.Popen([*command_line, "-p", TEXT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()  # as `| head -c 1` does
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    refused = subprocess.run([*command_line, "-p", TEXT, "--seed", "-1"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: seed=-1 must be an integer from 0 to 9223372036854775807\n"
