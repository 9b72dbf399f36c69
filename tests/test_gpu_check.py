"""The check of kernels on a GPU, where there is none."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import gpu_jobs, gpu_kernels, gpu_operations, gpu_report
from bench.apart import Outcome
from bench.gpu_check import make_line, plan
from bench.gpu_jobs import TOY_CACHE, TOY_HEADS, Job, Task
from pallas_kernels import dispatch, shapes

ROOT = Path(__file__).parent.parent
JOB = Job(stage="check", operation="compact", implementation="triton", model="toy", shape="toy")


def run_check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the check with the session's compilation cache."""
    names = ("compilation_cache_dir", "compilation_cache_max_size", "persistent_cache_min_compile_time_secs")
    settings = {f"JAX_{name.upper()}": getattr(jax.config, f"jax_{name}") for name in names}
    environment = os.environ | {name: str(value) for name, value in settings.items() if value is not None}
    command = [sys.executable, "-m", "bench.gpu_check", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def read_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "gpu_check_toy.jsonl").read_text().splitlines()]


def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(tmp_path):
    done = run_check("--out", tmp_path)
    assert done.returncode == 2
    printed = done.stdout + done.stderr
    assert printed.count("\n") == 1 and "no GPU" in printed
    assert not list(tmp_path.iterdir())


def test_words_that_no_line_has_are_refused(tmp_path):
    done = run_check("--toy", "--only", "nothing", "--out", tmp_path)
    assert done.returncode == 2 and "nothing" in done.stderr.splitlines()[-1]


def test_a_part_of_it_in_small(tmp_path):
    done = run_check("--toy", "--only", "compact", "cudnn", "full", "--out", tmp_path, "--commit", "abc")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(tmp_path)
    assert {line["status"] for line in lines} == {"ok", "skipped"}
    assert all(line["machine"]["commit"] == "abc" and line["machine"]["jax"] == jax.__version__ for line in lines)
    check, *timed = (line for line in lines if line["operation"] == "compact")
    assert check["wrong"] == check["unsteady"] == 0
    assert [line["implementation"] for line in timed] == ["triton", "xla"]
    (decode,) = (line for line in lines if line["stage"] == "decode")
    for line in (*timed, decode):
        assert line["moved"] > 0 and line["floor"] > 0 and math.isfinite(line["over_floor"])
    assert "| compact | triton |" in (tmp_path / "gpu_check_toy.md").read_text()


@pytest.mark.slow
def test_all_of_it_in_small(tmp_path):
    done = run_check("--toy", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checked = {(line["operation"].split()[0], line["implementation"]) for line in read_lines(tmp_path)}
    assert checked >= {(op, name) for op, names in dispatch.KERNELS.items() for name in names}


def test_every_kernel_is_checked_and_timed_in_real_sizes():
    wanted = {(op, name) for op, names in dispatch.KERNELS.items() for name in names}
    for stage, pairs in zip(plan(0, toy=False)[:2], (gpu_jobs.PAIRS, gpu_jobs.TIMED), strict=True):
        assert wanted <= {(job.operation.split()[0], job.implementation) for job in stage.jobs}
        assert {(job.model, job.shape) for job in stage.jobs} == set(pairs)
    assert {shape for _, shape in gpu_jobs.PAIRS} == set(shapes.CACHES)


@pytest.mark.parametrize("operation", gpu_operations.OPERATIONS)
def test_the_reference_passes_its_own_check(operation):
    case = gpu_operations.make_case(operation, 1, TOY_HEADS, TOY_CACHE, poison=1e4)
    assert not gpu_kernels.compare(case, dispatch.XLA)["problem"]


def spoil(operation: str, change) -> str:
    """What is found of an operation whose implementation gives something else than its reference."""
    case = gpu_operations.make_case(operation, 1, TOY_HEADS, TOY_CACHE, poison=1e4)

    def function(*, implementation, **arguments):
        result = case.function(**arguments, implementation="xla")
        return result if implementation == "xla" else change(result)

    return gpu_kernels.compare(replace(case, function=function), dispatch.XLA)["problem"]


def test_faults_are_found():
    calls = itertools.count()

    def drift(x):
        call = jax.pure_callback(lambda: np.int32(next(calls)), jax.ShapeDtypeStruct((), jnp.int32))
        return x.at[0, 0, 0].add(call)

    assert "relative error 0.03" in spoil("window_scores probs", lambda x: 1.03 * x)
    assert "relative error nan" in spoil("window_scores probs", lambda x: x.at[0, 0, 0].set(jnp.nan))
    assert "relative error" in spoil(
        "key_redundancy", lambda x: jnp.where(x > 0, 1 / jnp.sum(x > 0, -1, keepdims=True), 0)
    )
    assert "1 numbers differ" in spoil("select_top", lambda x: x.at[0, 0, 0].add(1))
    assert "1 numbers differ" in spoil("decode_attention", lambda x: x._replace(k=x.k.at[1, 1, 39, 3].add(1)))
    assert "change from call to call" in spoil("select_top", drift)


def test_timed_calls_all_happen():
    case = gpu_operations.make_case("compact", 0, TOY_HEADS, TOY_CACHE)
    case = replace(case, function=lambda arrays, index, implementation: tuple(x + 1 for x in arrays))
    start = [{"arrays": (jnp.zeros(3),), "index": jnp.zeros(1)} for _ in range(2)]
    after, _ = gpu_kernels.go_round(case, dispatch.XLA, start)
    assert [float(x["arrays"][0][0]) for x in after] == [gpu_kernels.ROUNDS] * 2


@pytest.mark.parametrize(
    ("value", "error", "status"),
    [
        ({"error": 0.0, "problem": ""}, "", "ok"),
        ({"problem": "3 numbers differ"}, "", "failed"),
        (None, "its process was ended by SIGSEGV: it said nothing", "failed"),
        (None, "its process was ended by SIGALRM: it said nothing", "skipped"),
        ({"skipped": "no time left"}, "", "skipped"),
    ],
)
def test_what_becomes_of_a_job(value, error, status):
    line = make_line(Outcome(Task(JOB, 0.0, 0.0), value, error))
    assert line["status"] == status
    assert JOB.operation in gpu_report.format_line(line)
    assert f"1 {status}" in gpu_report.format_report([line], {"device": "cpu"}, 1.0)


def test_a_job_is_not_begun_when_it_is_too_late():
    assert gpu_jobs.work(Task(JOB, time.time() + 5, needs=8)) == {"skipped": "no time left"}


def test_floors():
    machine = {"device": "NVIDIA H200", "bandwidth": 4e12, "flops": 8e14}
    line = {"seconds": 3e-6, "moved": 4e6, "flops": 16e8}
    gpu_report.add_floors(line, machine)
    assert line["floor"] == pytest.approx(2e-6) and line["over_floor"] == pytest.approx(1.5)
    assert line["over_nominal"] == pytest.approx(3e-6 * 4.8e12 / 4e6)
    line = {"step": 1.0, "moved": 4e12}
    gpu_report.add_floors(line, machine | {"device": "cpu"})
    assert line["over_floor"] == pytest.approx(1.0) and "over_nominal" not in line
