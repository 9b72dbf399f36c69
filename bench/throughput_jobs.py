"""The jobs of `bench.throughput`: a batch of texts on one model under one policy, and full attention beside it."""

import functools
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import jkv
from bench.engines import DTYPE, make_engine
from bench.gpu_decode import random_weights
from bench.machine import describe_machine
from bench.models import MODELS
from bench.paper_rows import PaperRow
from bench.predict import Work, predict
from bench.throughput_measure import describe_run, random_prompts, run_texts
from jkv.config import ModelConfig
from jkv.jsonl import read_prompts
from jkv.loop import Programs, bucket
from jkv.memory import largest_batch
from jkv.plan import format_bytes, memory_limit
from jkv.policies import describe, get_policy
from pallas_kernels.dispatch import choose

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."  # the G-KV paper's


@dataclass(frozen=True, kw_only=True)
class Job:
    """A batch of texts to run.

    Attributes:
        name: of a table's row, or made of the options.
        model: of `models.MODELS`, or as the user gave it.
        policy: text form.
        batch: rows decoded together.
        prompt: tokens of each prompt; with problems, of the longest at most.
        new, whole: tokens of each answer, and of it if it had not been cut short.
        paper: the table's row, if it is one.
    """

    name: str
    model: str
    policy: str
    batch: int
    prompt: int
    new: int
    whole: int
    paper: PaperRow | None = None


@dataclass(frozen=True)
class Model:
    """What decodes; `llm` is None where the weights are random."""

    config: ModelConfig
    weights: nnx.State
    dtype: str
    llm: jkv.LLM | None = None


@functools.lru_cache(maxsize=1)
def open_model(name: str) -> Model:
    """A model of the tables with random weights, or one that `jkv.load` finds."""
    if name in MODELS:
        return Model(MODELS[name], random_weights(MODELS[name], 0), DTYPE)
    llm = jkv.load(name)
    return Model(llm.checkpoint.config, llm.weights, llm.dtype, llm)


@dataclass
class Bench:
    """Runs jobs, and keeps their programs and what full attention took.

    Attributes:
        texts: how many go through the slots; None is a batch, or all problems.
        problems: JSONL file of prompts, which end where the model ends them.
        baselines: run full attention, too.
    """

    texts: int | None
    problems: Path | None
    baselines: bool
    programs: Programs = field(default_factory=Programs)
    _full: dict[Any, float] = field(default_factory=dict)

    def measure(self, job: Job) -> dict[str, Any]:
        """The line of a job.

        Raises:
            ValueError: it does not fit the device.
        """
        model = open_model(job.model)
        work = make_work(job, model)
        peak, most = predict(work).memory, self._largest(work)
        if work.batch > most:
            raise ValueError(
                f"{job.name} takes {format_bytes(peak)} and the device has {format_bytes(memory_limit())}: "
                f"the largest batch is {most}"
            )
        ran = self._run(work, job, model)
        line = {
            **asdict(replace(job, paper=None)),
            "policy_fields": dict(describe(work.engine.policy)),
            "weights": "random" if model.llm is None else model.llm.checkpoint.name,
            "dtype": model.dtype,
            "implementation": work.engine.spec.implementation.name,
            "memory_bytes": peak,
            **ran,
            **(self._run_full(work, job, model) if self.baselines else {}),
            "paper_tokens_per_second": job.paper and job.paper.tokens_per_second,
            "of_paper": job.paper and ran["best"] / job.paper.tokens_per_second,
            "machine": describe_machine(),
        }
        return line

    def _run(self, work: Work, job: Job, model: Model) -> dict[str, Any]:
        count = self.texts or (None if self.problems else work.batch)
        if self.problems:
            assert model.llm is not None
            prompts, eos = read_problems(model.llm, self.problems, work.prompt)[:count], model.llm.eos_ids
        else:
            prompts, eos = random_prompts(work, count or work.batch), ()
        ran = run_texts(work, model.weights, prompts, eos=eos, programs=self.programs)
        return describe_run(ran, work, replace(work, new=job.whole))

    def _run_full(self, work: Work, job: Job, model: Model) -> dict[str, Any]:
        """Full attention at the same batch, if that fits, and at its own largest, up to four times the batch."""
        most = min(self._largest(work.full), 4 * work.batch)
        return {
            "full_same_batch": self._rate_full(work.batch, work, job, model) if work.batch <= most else None,
            "full_largest_batch": self._rate_full(most, work, job, model) if most else None,
            "full_largest": most,
        }

    def _rate_full(self, batch: int, work: Work, job: Job, model: Model) -> float:
        work = replace(work.full, batch=batch)
        key = (work.engine, work.prompt, work.new, job.whole, batch)
        if key not in self._full:
            self._full[key] = self._run(work, job, model)["best"]
        return self._full[key]

    def _largest(self, work: Work) -> int:
        platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
        return largest_batch(work.engine, prompt=bucket(work.prompt), memory=memory_limit(), platform=platform)


def make_work(job: Job, model: Model) -> Work:
    """The batch of a job."""
    policy = get_policy(job.policy)
    if model.llm is not None:
        policy = model.llm.prepare(policy)
    engine = make_engine(
        model.config,
        policy,
        choose(policy.implementation, jax.devices()[0], model.dtype),
        prompt=job.prompt,
        longest=job.prompt + job.whole,
        dtype=model.dtype,
    )
    return Work(engine=engine, batch=job.batch, prompt=job.prompt, new=job.new)


def read_problems(llm: jkv.LLM, path: Path, longest: int) -> list[list[int]]:
    """Prompts of a JSONL file as token ids, the G-KV paper's system message before each.

    Raises:
        ValueError: one is longer than `longest` tokens.
    """
    items = read_prompts(path)
    prompts = [llm.encode(item.prompt, system=SYSTEM if isinstance(item.prompt, str) else None) for item in items]
    for item, prompt in zip(items, prompts, strict=True):
        if len(prompt) > longest:
            raise ValueError(f"{path}: prompt {item.id} has {len(prompt)} tokens; raise --prompt {longest}")
    return prompts
