"""The papers' rows as configs of ours, what is predicted of them, and the bench that measures."""

import json
from dataclasses import replace
from importlib.util import find_spec

import jax
import pytest

from bench import throughput
from bench.gpu_target import TARGETS
from bench.models import MODELS
from bench.paper_rows import FILE, GKV, INTERVAL, SPECONTEXT, find_rows, paper_caches, paper_rows
from bench.predict import FLOPS, Moved, Work, largest_that_fits, predict
from bench.throughput_jobs import open_model
from bench.throughput_measure import describe_run
from checkpoints import config, save_hf
from jkv import cli
from jkv.policies import Evict
from pallas_kernels import shapes
from pallas_kernels.dispatch import A100, plan_for

ROWS = paper_rows()
HALF = 2  # bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield save_hf(tmp_path_factory.mktemp("throughput") / "tiny", config(), seed=0)
    open_model.cache_clear()


def work_of(name: str) -> Work:
    row = ROWS[name]
    engine = row.engine(plan_for(None, A100))
    return Work(engine=engine, batch=row.batch, prompt=row.prompt, new=row.new)


def test_every_row_of_the_tables_is_there():
    records = json.loads(FILE.read_text())
    assert len(ROWS) == len(records) == 58
    assert [row.tokens_per_second for row in ROWS.values()] == [record["tokens_per_s"] for record in records]
    assert len(find_rows([GKV])) == 26 and len(find_rows([SPECONTEXT])) == 32
    assert find_rows([GKV, "gkv/qwen-7b/b128/k512"]) == find_rows([GKV])
    for row, record in zip(ROWS.values(), records, strict=True):
        assert (row.method, row.batch) == (record["method"], record["batch"])
        assert row.budget == record.get("budget", None if row.policy.startswith("full") else 2048)
        assert (row.prompt, row.new) == (record.get("input_len", 256), record.get("output_len", 16384))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_one_static_config(name):
    row = ROWS[name]
    implementation = plan_for(None, A100)
    engine = row.engine(implementation)
    assert hash(engine) == hash(row.engine(implementation)) and engine == row.engine(implementation)
    assert (engine.config, engine.spec.dtype) == (MODELS[row.model], "bfloat16")
    assert engine.spec.max_len == row.prompt + row.new and engine.spec.max_prompt == row.prompt
    policy = engine.policy
    if row.evicts:
        assert isinstance(policy, Evict) and (policy.budget, policy.interval) == (row.budget, INTERVAL)
        assert policy.capacity(engine.spec) == row.cache.capacity
    elif row.budget:
        assert policy.budget == row.budget  # pyright: ignore[reportAttributeAccessIssue]
    else:
        assert policy.capacity(engine.spec) == row.cache.capacity == row.prompt + row.new


def test_rows_have_the_caches_that_the_kernels_are_tested_with():
    caches = paper_caches()
    shared = caches.keys() & shapes.RUNS.keys()
    assert {"b128-k512", "b64-k1024", "b32-2k16k", "b16-32k2k"} <= shared
    for name in shared:
        assert replace(caches[name], prompt=0) == replace(shapes.RUNS[name], prompt=0)


def test_a_row_that_is_not_there():
    with pytest.raises(ValueError, match="no row 'gkv/llama-70b'; --list names all"):
        find_rows(["gkv/llama-70b"])


def test_bytes_of_a_step_under_full_attention():
    name = "flashinfer/llama-8b/b16/2k-16k"
    config, row, found = MODELS["llama-8b"], ROWS[name], predict(work_of(name))
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * HALF
    assert found.kv_held == row.batch * (row.prompt + row.new) * token
    assert found.kv_read == pytest.approx(row.batch * (row.prompt + row.new / 2) * token, rel=1e-3)
    parameters = 8_030_261_248  # of Llama 3.1 8B
    read = (parameters - config.vocab_size * config.hidden_size) * HALF
    assert found.step == pytest.approx(read + found.kv_read + row.batch * token, rel=1e-4)
    assert found.compacted == 0
    assert found.decode_ceiling("h200") == pytest.approx(row.batch * TARGETS["h200"].bandwidth / found.step)
    assert found.ceiling("h200") < found.decode_ceiling("h200")
    assert found.fits("a100") and found.memory > found.kv_held + parameters * HALF


def test_bytes_of_a_step_that_evicts():
    name = "gkv/qwen-7b/b128/k512"
    config, row, found = MODELS["qwen-7b"], ROWS[name], predict(work_of(name))
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * HALF
    assert found.kv_held == row.batch * (512 + INTERVAL) * token
    assert found.kv_read == pytest.approx(row.batch * (512 + INTERVAL / 2) * token, rel=0.02)
    assert found.compacted == row.batch * token / 2 * (5 * 512 + INTERVAL) / INTERVAL
    assert found.kv_read < predict(work_of(name).full).kv_read / 10
    slower = predict(work_of(name), Moved(ratio=2.0, compacted=0.0))
    rates = [each.decode_ceiling("h100") for each in (found, slower)]
    assert rates[0] == pytest.approx(rates[1] * 2, rel=0.01)


def test_products_may_take_longer_than_bytes():
    work = replace(work_of("gkv/qwen-7b/b128/k512"), batch=1024)
    found = predict(work)
    assert found.flops / FLOPS["a100"] > found.step / TARGETS["a100"].bandwidth
    assert found.decode_ceiling("a100") == pytest.approx(1024 * FLOPS["a100"] / found.flops)
    assert found.decode_ceiling("h200") > found.decode_ceiling("a100")


def test_the_largest_batch_of_full_attention():
    work = work_of("flashinfer/llama-8b/b16/2k-16k")
    most = largest_that_fits(work, "a100")
    assert most >= 16
    assert predict(replace(work, batch=most)).fits("a100") and not predict(replace(work, batch=most + 1)).fits("a100")


@pytest.fixture
def run(capsys):
    """Runs the bench: its exit code, and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run(throughput.main, [str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_rows_are_listed(run):
    code, out, _ = run("--list")
    assert code == 0 and len(out.splitlines()) == 58
    assert "gkv/qwen-7b/b128/k512" in out and "760.74 tokens/s" in out


def test_a_dry_run_says_what_a_row_takes_and_could_reach(run, tmp_path):
    name = "rkv/llama-8b/b16/k2048"
    code, out, _ = run("--row", name, "--dry-run", "--write", "--out", tmp_path)
    assert code == 0
    for text in (
        name,
        "82.33 tokens/s",
        "interval 128",
        "H200 141GB HBM3e: fits",
        "full attention at its largest batch",
    ):
        assert text in out
    line = json.loads((tmp_path / "predicted.jsonl").read_text())
    assert (line["name"], line["predicted"]) == (name, True)
    assert line["decode_ceiling"]["h200"] > line["full_same_batch"]["h200"] > line["tokens_per_second"]
    table = (tmp_path / "predicted.md").read_text()
    assert "Predicted, not measured" in table and name in table


def test_measured_rates_can_be_recomputed(run, folder, tmp_path):
    options = ("--model", folder, "--policy", "gkv:budget=16,window=8,interval=8", "--prompt", 24, "--new", 17)
    code, out, err = run(*options, "--batch", 2, "--texts", 3, "--out", tmp_path)
    assert code == 0, err
    (line,) = [json.loads(line) for line in (tmp_path / "throughput.jsonl").read_text().splitlines()]
    assert line["new_tokens"] == 3 * 17 and line["decoded_tokens"] == 3 * 16
    seconds = line["prefill_seconds"] + line["decode_seconds"]
    assert line["tokens_per_second"] == line["best"] == pytest.approx(51 / seconds)
    assert line["decode_tokens_per_second"] == pytest.approx(48 / line["decode_seconds"])
    assert line["compile_seconds"] > 0 and line["share_of_floor"] is None  # no bandwidth of a CPU is known
    assert line["full_same_batch"] > 0 and line["full_largest_batch"] > 0 and line["full_largest"] == 8
    assert line["policy_fields"]["budget"] == 16 and line["weights"] and line["machine"]["jax"] == jax.__version__
    assert 0 < line["kv_bytes_read"] < line["kv_bytes_held"]
    assert line["name"] in out and line["name"] in (tmp_path / "throughput.md").read_text()
    assert (tmp_path / "throughput.png").exists() == bool(find_spec("matplotlib"))


def test_problems_end_where_the_model_ends_them(run, folder, tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": text}) + "\n" for text in ("1 + 1 = ", "2 + 40 = ", "7 = ")))
    options = ("--model", folder, "--input", problems, "--batch", 2, "--no-baselines", "--out", tmp_path)
    code, _, err = run(*options, "--prompt", 400, "--new", 30)
    assert code == 0, err
    line = json.loads((tmp_path / "throughput.jsonl").read_text())
    assert 3 <= line["new_tokens"] <= 90 and "full_same_batch" not in line
    code, _, err = run(*options, "--prompt", 8, "--new", 30)
    assert code == 2 and "prompt 1 has" in err and "raise --prompt 8" in err


def test_answers_that_were_cut_short(monkeypatch):
    work = work_of("flashinfer/llama-8b/b16/2k-16k")
    monkeypatch.setattr("bench.throughput_measure.find_bandwidth", lambda: 4e12)
    short = replace(work, new=128)
    ran = {"new_tokens": 16 * 128, "decoded_tokens": 16 * 127, "prefill_seconds": 2.0, "decode_seconds": 12.7}
    line = describe_run(ran, short, work)
    steps = [predict(each).step for each in (short, work)]
    assert line["share_of_floor"] == pytest.approx(steps[0] / 4e12 / 0.1)
    whole = 0.1 * steps[1] / steps[0] * (work.new - 1) + 2.0
    assert line["whole_tokens_per_second"] == line["best"] == pytest.approx(16 * work.new / whole)
    assert line["whole_tokens_per_second"] < line["decode_tokens_per_second"]
    assert describe_run(ran, short, short)["whole_tokens_per_second"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to do; give --row NAME"),
        (("--row", "gkv"), "no row 'gkv'"),
        (("--model", "x", "--dry-run"), "--dry-run is for rows"),
        (("--row", "gkv-paper", "--compile"), "--compile and --write go with --dry-run"),
        (("--model", "qwen-7b", "--input", "x.jsonl"), "--input has text, which a model with random weights"),
        (("--model", "x", "--batch", "0"), "0: --batch, --prompt"),
        (("--row", "gkv-paper", "--out", "/nowhere"), "--out /nowhere: there is no such folder"),
    ],
)
def test_what_makes_no_sense_is_refused(run, options, message):
    code, out, err = run(*options)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_run_that_does_not_fit(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("bench.throughput_jobs.memory_limit", lambda: 1 << 20)
    code, _, err = run("--model", folder, "--batch", 64, "--out", tmp_path)
    assert code == 2 and "the device has 1.0 MiB: the largest batch is " in err
