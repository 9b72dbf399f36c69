"""What the GPU check does, job by job, each of which a process of its own can be given."""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from bench.gpu_kernels import check_kernel, measure_ceilings, time_kernel
from bench.gpu_operations import OPERATIONS
from bench.machine import describe_machine, find_driver
from jkv.config import ModelConfig
from pallas_kernels import Implementation, dispatch, shapes
from pallas_kernels.shapes import Cache, Heads

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One line of the results.

    Attributes:
        stage: "machine", "check", "time" or "decode".
        operation: of `gpu_operations.OPERATIONS`; for a decode step the policy.
        implementation: as in `dispatch`.
        model, shape: of `shapes`, and of `models` for a decode step; or `TOY`, on CPU, with the kernels interpreted.
        seed: of all numbers.
    """

    stage: str
    operation: str = ""
    implementation: str = ""
    model: str = ""
    shape: str = ""
    seed: int = 0

    def __str__(self) -> str:
        """The job's name."""
        return " ".join(filter(None, (self.stage, self.operation, self.implementation, self.model, self.shape)))

    def is_named(self, words: Sequence[str]) -> bool:
        """Whether one of the words is in the name."""
        return any(word in str(self) for word in words)


@dataclass(frozen=True)
class Task:
    """A job and its time, in seconds.

    Attributes:
        until: when it must have ended, since the epoch.
        needs: before that, when it is not begun any more.
    """

    job: Job
    until: float
    needs: float


class Skipped(Exception):
    """A job that cannot be done here, for which nothing is to blame."""


TOY = "toy"
TOY_HEADS = Heads(kv_heads=2, group=3, head_dim=64)
TOY_CACHE = Cache(batch=2, capacity=40, kept=32, window=4)
TOY_MODEL = ModelConfig(
    model_type="qwen2",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    qkv_bias=True,
)

# Each model and cache size at least once in the first half; caches of full attention are for attention alone.
PAIRS = (
    ("qwen-7b", "b128-k512"),
    ("llama-8b", "b64-k1024"),
    ("qwen-7b", "b1-k2048"),
    ("llama-8b", "b32-k2048"),
    ("smollm2-135m", "b64-k1024"),
    ("qwen-1.5b", "b1-k2048"),
    ("qwen-7b", "b16-full16k"),
    ("llama-8b", "b4-full34k"),
    ("smollm2-135m", "b1-k2048"),
    ("qwen-1.5b", "b128-k512"),
    ("llama-8b", "b1-k2048"),
    ("qwen-7b", "b64-k1024"),
    ("qwen-7b", "b32-k2048"),
    ("llama-8b", "b128-k512"),
    ("llama-8b", "b16-full16k"),
    ("qwen-7b", "b4-full34k"),
)
TIMED = (
    ("qwen-7b", "b128-k512"),
    ("llama-8b", "b64-k1024"),
    ("qwen-7b", "b1-k2048"),
    ("qwen-7b", "b16-full16k"),
    ("llama-8b", "b32-k2048"),
    ("llama-8b", "b4-full34k"),
)
DECODED = (
    ("qwen-7b", "gkv", "b128-k512", "triton"),
    ("qwen-7b", "full", "b16-full16k", "triton"),
    ("qwen-7b", "gkv", "b128-k512", "xla"),
    ("qwen-7b", "full", "b16-full16k", "mosaic"),
    ("qwen-7b", "full", "b16-full16k", "cudnn"),
    ("llama-8b", "gkv", "b64-k1024", "triton"),
    ("llama-8b", "rkv", "b32-k2048", "triton"),
    ("llama-8b", "snapkv", "b64-k1024", "triton"),
    ("llama-8b", "gkv", "b64-k1024", "mosaic"),
    ("llama-8b", "full", "b16-full16k", "xla"),
    ("llama-8b", "full", "b16-full16k", "eager"),
    ("llama-8b", "gkv", "b1-k2048", "triton"),
)
BASELINES = ("xla", "cudnn", "eager")
VARIANTS = ("key_redundancy first", "key_redundancy last")  # as quick as the one that is timed


def check_jobs(seed: int, *, toy: bool) -> list[Job]:
    """Every kernel in every size, each size with numbers of its own."""
    return [
        Job(stage="check", operation=operation, implementation=name, model=model, shape=shape, seed=seed + i)
        for i, (model, shape) in enumerate([(TOY, TOY)] if toy else PAIRS)
        for operation in OPERATIONS
        for name in dispatch.KERNELS[operation.split()[0]]
        if is_wanted(operation, name, shape)
    ]


def time_jobs(seed: int, *, toy: bool) -> list[Job]:
    """Kernels first, then what they are compared with."""
    jobs = [
        Job(stage="time", operation=operation, implementation=name, model=model, shape=shape, seed=seed)
        for model, shape in ([(TOY, TOY)] if toy else TIMED)
        for operation in OPERATIONS
        for name in (*dispatch.KERNELS[operation.split()[0]], "xla")
        if operation not in VARIANTS and is_wanted(operation, name, shape)
    ]
    return sorted(jobs, key=lambda job: job.implementation in BASELINES)


def decode_jobs(seed: int, *, toy: bool) -> list[Job]:
    """Steps of whole models."""
    rows = ((TOY, "gkv", TOY, "triton"), (TOY, "full", TOY, "xla")) if toy else DECODED
    return [
        Job(stage="decode", operation=policy, implementation=name, model=model, shape=shape, seed=seed)
        for model, policy, shape, name in rows
    ]


def is_wanted(operation: str, implementation: str, shape: str) -> bool:
    """Whether an operation and a size meet in the runs of the papers' tables."""
    if shape == TOY:
        return implementation != "mosaic" or operation == "decode_attention"  # whose interpreter is slow
    batch, full = shapes.CACHES[shape].batch, "full" in shape
    match operation.split():
        case ["rms_norm"]:
            return batch == 1
        case ["prefill_attention"]:
            return batch <= 64 and not full
        case ["decode_attention", "probs"]:
            return not full and implementation != "cudnn"
        case ["decode_attention"]:
            return True
        case _:
            return not full


def work(task: Task) -> Figures:
    """Does one job: its figures and the seconds that it "took", or why it was "skipped".

    What is wrong is said by "problem" among the figures.
    """
    left = task.until - time.time()
    if left < task.needs:
        return {"skipped": "no time left"}
    signal.alarm(math.ceil(left))  # ends the process, whatever it is doing
    start = time.perf_counter()
    try:
        return {**do_job(task.job), "took": time.perf_counter() - start}
    except Skipped as reason:
        return {"skipped": str(reason)}
    finally:
        signal.alarm(0)


def do_job(job: Job) -> Figures:
    """The figures of a job.

    Raises:
        Skipped: it cannot be done here.
    """
    toy = job.model == TOY
    if toy:
        jax.config.update("jax_platforms", "cpu")
    if job.stage == "machine":
        return describe_gpu(toy=toy)
    implementation = choose_implementation(job, toy=toy)
    cache = TOY_CACHE if toy else shapes.CACHES[job.shape]
    if job.stage == "decode":
        # Imported here, so that kernels can be checked where not all that the models need is installed.
        from bench.gpu_decode import time_decode
        from bench.models import MODELS

        config = TOY_MODEL if toy else MODELS[job.model]
        return time_decode(config, job.operation, cache, implementation, job.seed)
    heads = TOY_HEADS if toy else shapes.MODELS[job.model]
    what = job.operation, heads, cache, implementation, job.seed
    if job.stage == "check":
        return check_kernel(*what)
    return time_kernel(*what, spread=0) if toy else time_kernel(*what)


def choose_implementation(job: Job, *, toy: bool) -> Implementation:
    """The implementation of a job.

    Raises:
        Skipped: it is not in this release of jax, or cannot be interpreted.
    """
    name: Any = job.implementation
    if toy and (name == "cudnn" or (name == "mosaic" and job.stage == "time")):
        raise Skipped(f"{name} needs a GPU")
    operation = "decode_attention" if job.stage == "decode" else job.operation.split()[0]
    try:
        dispatch.find(operation, Implementation(name))
    except ValueError as error:
        raise Skipped(str(error)) from error
    if toy:
        return Implementation(name, elsewhere=("triton", "xla"), gpu=dispatch.H200, interpret=True)
    return dispatch.choose(name, jax.devices()[0], "bfloat16")


def describe_gpu(*, toy: bool) -> Figures:
    """What the results depend on, and what the card reaches.

    Raises:
        Skipped: there is no GPU.
    """
    platform = jax.devices()[0].platform
    if platform != "gpu" and not toy:
        raise Skipped(f"jax finds {platform} and no GPU")
    sizes = {"copied": 1 << 20, "side": 64} if toy else {"copied": 2 << 30, "side": 8192}
    return {**describe_machine(), "driver": find_driver(), **measure_ceilings(**sizes)}
