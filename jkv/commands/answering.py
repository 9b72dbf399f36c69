"""What commands that draw answers share: what they print before and after, progress, and the answers file."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jkv.jsonl import Answers
from jkv.plan import format_bytes
from jkv.policies import format_policy
from jkv.run import Result, Run
from jkv.sampling import Sampling

FAR = 2**30  # tokens; longer than any text


def print_header(options: argparse.Namespace, run: Run, asked: str | None = None) -> None:
    """Says which model, which policy with all its fields, and how answers are drawn; `asked` is who asks for that."""
    checkpoint, config = run.llm.checkpoint, run.config
    embedded = " (no --model given: the embedded model)" if options.model is None else ""
    say(f"model: {checkpoint.name}{embedded}, {checkpoint.format} {checkpoint.path}, {run.llm.dtype}")
    say(f"policy: {format_policy(options.policy, run.policy)}")
    values = ((spec, getattr(config, spec.name)) for spec in fields(Sampling))
    drawn = ["greedy"] * config.greedy + [f"{spec.name} {value}" for spec, value in values if value != spec.default]
    if asked is None and checkpoint.generation.get("do_sample"):
        asked = "generation_config.json"
    given = any(getattr(options, spec.name) is not None for spec in fields(Sampling))
    source = " and ".join(filter(None, (asked, "options" if given else None))) or "default"
    say(f"sampling: {', '.join(drawn)}, seed {config.seed} ({source})")


@contextmanager
def open_answers(path: Path, run: Run, ids: Sequence[str | int], *prompting: Any) -> Iterator[Answers]:
    """The answers file of a run, which then draws only the answers that it lacks.

    Args:
        path: the file.
        run: its rows are set.
        ids: of the prompts.
        prompting: how prompts were made; answers to other ones are refused.
    """
    model = run.llm.checkpoint
    meant = [model.name, model.revision, run.llm.dtype, repr(run.policy), repr(run.config), *prompting]
    answers = Answers(path, hashlib.sha256(json.dumps(meant).encode()).hexdigest()[:12])
    everything = range(len(ids) * run.samples)
    run.rows = [row for row in everything if (ids[row // run.samples], row % run.samples) not in answers.done]
    if len(run.rows) < len(everything):
        say(f"{path}: {len(everything) - len(run.rows)} of {len(everything)} answers are there already")
    try:
        yield answers
    finally:
        answers.close()


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar of answers on a terminal; what it gives is called with the tokens of each that has ended."""
    if quiet or not sys.stderr.isatty():
        yield lambda tokens: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens=0)
        counted = 0

        def advance(tokens: int) -> None:
            nonlocal counted
            counted += tokens
            progress.update(task, advance=1, tokens=counted)

        yield advance


def print_report(run: Run) -> None:
    """Says what a run took and held."""
    stats, plan = run.stats, run.stats.plan
    speed = f"{stats.tokens_per_second:.1f} tokens/s" if stats.tokens_per_second else "no token decoded"
    since = stats.first_token_at - psutil.Process().create_time() if stats.first_token_at else 0.0
    say(
        f"{stats.prompt_tokens} prompt + {stats.new_tokens} new tokens; prefill {stats.prefill_seconds:.2f} s, decode "
        f"{stats.decode_seconds:.2f} s ({speed}), compile {stats.compile_seconds:.2f} s; first token {since:.1f} s "
        "after the command"
    )
    say(
        f"kv held {format_bytes(plan.kv_held)} (+ {format_bytes(plan.metadata_held)} beside it) for {run.slots} "
        f"rows of {plan.capacity} slots; kv read {format_bytes(plan.kv_read)} a token at most, "
        f"{' + '.join(f'{count} {part}' for part, count in plan.tokens_read.items())} tokens per kv head"
    )
    if run.policy.most(FAR) < FAR:
        if run.policy.most(stats.longest_text) >= stats.longest_text:
            say("note: no text outgrew the budget, so nothing was evicted")
    elif tokens_read(run, FAR) < FAR and tokens_read(run, stats.longest_text) >= stats.longest_text:
        say("note: no text outgrew the budget, so every step read all of it")


def tokens_read(run: Run, length: int) -> int:
    """Most tokens per kv head that a step reads of a text of that length."""
    return sum(run.policy.tokens_read(run.engine.spec, length).values())


def describe_result(id: str | int, result: Result) -> dict[str, Any]:
    """A line of an answers file."""
    return {
        "id": id,
        "sample": result.sample,
        "text": result.text,
        "reasoning": result.reasoning,
        "answer": result.answer,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.tokens),
        "token_ids": list(result.tokens),
    }


def say(text: str) -> None:
    """Prints to standard error."""
    print(text, file=sys.stderr, flush=True)
