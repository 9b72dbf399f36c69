"""``python -m jkv.generate``: answers prompts with a model, under a policy."""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import weights
from jkv import cli
from jkv.api import LLM, half_precision, load, resolve_dtype
from jkv.commands.dry_run import describe_run
from jkv.jsonl import Answers, Item, read_prompts
from jkv.manifest import check_same, read_manifest, write_manifest
from jkv.models.decoder import Decoder
from jkv.plan import format_bytes, memory_limit, parse_bytes
from jkv.policies import format_policy, get_policy
from jkv.run import GenerationConfig, Piece, Result, Run
from jkv.sampling import Sampling
from jkv.text import load_tokenizer
from pallas_kernels.dispatch import H100

EXAMPLES = """examples:
  python -m jkv.generate -p "Why is the sky blue?" --policy gkv:budget=256
  python -m jkv.generate --model Qwen/Qwen3-0.6B --policy rkv:budget=1024 --input prompts.jsonl --output answers.jsonl
"""
FAR = 2**30  # tokens; longer than any text
# Options that say how to run, not what: a manifest does not keep them.
TRANSIENT = ("rerun", "manifest", "debug", "dry_run", "memory", "list_policies", "explain", "trace_kept")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parse(arguments)
    if options.list_policies or options.explain:
        print(cli.explain(options.explain) if options.explain else cli.list_policies())
        return 0
    _check(options)
    items = _read_items(options)
    _check_rows(options, len(items) * options.samples)
    cli.keep_programs()
    checkpoint = weights.open_checkpoint(options.model, revision=options.revision, with_weights=not options.dry_run)
    if options.dry_run:
        print(_dry_run(options, checkpoint, items))
        return 0
    run = _start(options, load(checkpoint, dtype=options.dtype, implementation=options.implementation), items)
    _print_header(options, run)
    kept: dict[int, list[np.ndarray]] = {}  # of each row, after its prompt and after every interval
    if options.trace_kept:
        run.on_kept = lambda row, _, positions: kept.setdefault(row.id, []).append(positions)
    with _open_answers(options, run) as answers:
        results = _answer(options, run, items, answers)
    _print_report(run)
    if options.trace_kept and kept:
        _save_trace(options.trace_kept, run, kept, results)
    if options.json:
        answers_json = [_row(items[result.prompt], result) for result in results]
        print(json.dumps({"results": answers_json, "stats": run.stats.report()}, ensure_ascii=False))
    if options.manifest:
        write_manifest(options.manifest, run, _repeatable(options, run))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m jkv.generate",
        description="Answers prompts with a Llama, Qwen2 or Qwen3 model on a budgeted KV cache.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_model_options(parser)
    cli.add_policy_option(parser)
    prompt = parser.add_argument_group("prompt")
    one = prompt.add_mutually_exclusive_group()
    one.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads it from standard input")
    one.add_argument("--input", type=Path, metavar="FILE", help="JSONL file with a prompt, problem or messages a line")
    prompt.add_argument("--system", metavar="TEXT", help="system message")
    prompt.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    prompt.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value for the chat template, as enable_thinking=false (may be repeated)",
    )
    cli.add_generation_options(parser)
    batch = parser.add_argument_group("batch")
    batch.add_argument("--samples", type=int, default=1, metavar="N", help="answers for each prompt (default: 1)")
    batch.add_argument(
        "--slots",
        type=_parse_slots,
        default=8,
        metavar="N",
        help="answers decoded together; when one ends, its slot is given to the next; auto is as many as fit in memory "
        "(default: 8)",
    )
    batch.add_argument(
        "--longest-first", action="store_true", help="begin with the longest prompts (default: in the order given)"
    )
    batch.add_argument(
        "--output", type=Path, metavar="FILE", help="JSONL file of answers; a run that was killed goes on"
    )
    show = parser.add_argument_group("output")
    show.add_argument("--json", action="store_true", help="print answers and statistics as one JSON object")
    show.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, help="print the answer as it grows (default: for one prompt)"
    )
    show.add_argument("--trace-kept", type=Path, metavar="FILE.npz", help="save the text positions the cache has kept")
    show.add_argument(
        "--manifest", type=Path, metavar="FILE", help="write what this run was, so that --rerun repeats it"
    )
    show.add_argument("--rerun", type=Path, metavar="FILE", help="repeat the run of a manifest")
    show.add_argument(
        "--dry-run", action="store_true", help="print the bytes that the run would hold and read, and end"
    )
    show.add_argument(
        "--memory",
        metavar="SIZE",
        help="with --dry-run: plan for a GPU that has so much, as 80GiB (default: for this device)",
    )
    show.add_argument("--list-policies", action="store_true", help="list policies and presets, and end")
    show.add_argument("--explain", metavar="NAME", help="tell what a policy does and which fields it has, and end")
    show.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rerun:
        known = vars(options).keys()
        given = read_manifest(options.rerun)["arguments"]
        if unknown := given.keys() - known:
            raise ValueError(f"manifest {options.rerun} has options this version does not know: {', '.join(unknown)}")
        parser.set_defaults(**{k: Path(v) if k == "input" and v else v for k, v in given.items()})
        options = parser.parse_args(arguments)
    return options


def _parse_slots(text: str) -> int | None:
    """None is as many as fit."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or auto")
    return None if text == "auto" else int(text)


def _check(options: argparse.Namespace) -> None:
    """Refuses what can be refused before anything is read."""
    get_policy(options.policy)
    GenerationConfig(**cli.generation_changes(options))
    cli.parse_template_arguments(options.template_arg)
    if not (options.prompt is not None or options.input or options.dry_run):
        raise ValueError("no prompt; give one with -p TEXT (- reads standard input) or --input FILE.jsonl")
    if options.memory is not None:
        parse_bytes(options.memory, "--memory")
        if not options.dry_run:
            raise ValueError("--memory is for plans and takes nothing from a run; add --dry-run")
    if options.samples < 1 or (options.slots is not None and options.slots < 1):
        raise ValueError(f"--samples {options.samples} and --slots {options.slots} must be at least 1")
    if options.raw and (options.system is not None or options.template_arg):
        raise ValueError("--raw leaves the chat template out, which --system and --template-arg are for; drop one")
    if options.stream and (options.json or options.output):
        raise ValueError("--stream prints text, which --json and --output have a place of their own for; drop one")
    if options.trace_kept and options.trace_kept.suffix != ".npz":
        raise ValueError(f"--trace-kept {options.trace_kept}: the name must end in .npz")
    for path in (options.trace_kept, options.manifest):
        if path and not path.parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")


def _check_rows(options: argparse.Namespace, rows: int) -> None:
    """Refuses what needs one row at a time."""
    if options.stream and min(rows, options.slots or rows) > 1:
        raise ValueError(f"--stream prints one answer as it grows, and there are {rows}; set --slots 1, or drop it")


def _read_items(options: argparse.Namespace) -> list[Item]:
    if options.input:
        return read_prompts(options.input)
    if options.prompt == "-":
        options.prompt = sys.stdin.read().rstrip("\n")
    if options.prompt is not None and not options.prompt.strip():
        raise ValueError("the prompt is empty; give some text")
    return [Item(id=1, prompt=options.prompt)] if options.prompt is not None else []


def _dry_run(options: argparse.Namespace, checkpoint: weights.Checkpoint, items: Sequence[Item]) -> str:
    """The bytes of the very run that would be started; without a prompt, of a whole batch of answers alone."""
    gpu = H100 if options.memory else None  # which one makes no difference to the bytes
    dtype = resolve_dtype(checkpoint, options.dtype or (half_precision(checkpoint) if gpu else None))
    llm = LLM(
        checkpoint=checkpoint,
        dtype=dtype,
        tokenizer=load_tokenizer(checkpoint.tokenizer or checkpoint.path),
        decoder=Decoder(checkpoint.config, dtype=dtype),  # shapes, no weights
        implementation=options.implementation,
        gpu=gpu,
    )
    memory = parse_bytes(options.memory, "--memory") if options.memory else memory_limit()
    return describe_run(_start(options, llm, items, memory), name=options.policy, memory=memory)


def _start(options: argparse.Namespace, llm: LLM, items: Sequence[Item], memory: int | None = None) -> Run:
    template = cli.parse_template_arguments(options.template_arg)
    raw = options.raw
    if unused := ([] if raw else llm.tokenizer.unused_arguments(template)):
        _say(f"note: the chat template does not use {', '.join(unused)}")
    run = llm.run(
        [llm.encode(item.prompt, raw=raw, system=options.system, arguments=template) for item in items],
        policy=options.policy,
        config=llm.default_config(**cli.generation_changes(options)),
        samples=options.samples,
        slots=options.slots,
        rows=None if items else range(options.slots or FAR),
        memory=memory,
    )
    if options.rerun and not options.dry_run:  # which has no weights to compare
        check_same(read_manifest(options.rerun), run)
    for index, item in enumerate(items):
        if (limit := run.limit(index)) < run.config.max_new_tokens:
            longest = llm.checkpoint.config.max_position
            _say(f"note: prompt {item.id}: at most {limit} new tokens, the model reads {longest} in all")
    return run


def _print_header(options: argparse.Namespace, run: Run) -> None:
    checkpoint, config = run.llm.checkpoint, run.config
    embedded = " (no --model given: the embedded model)" if options.model is None else ""
    _say(f"model: {checkpoint.name}{embedded}, {checkpoint.format} {checkpoint.path}, {run.llm.dtype}")
    _say(f"policy: {format_policy(options.policy, run.policy)}")
    values = ((spec, getattr(config, spec.name)) for spec in fields(Sampling))
    drawn = ["greedy"] * config.greedy + [f"{spec.name} {value}" for spec, value in values if value != spec.default]
    asked = bool(checkpoint.generation.get("do_sample"))
    given = any(getattr(options, spec.name) is not None for spec in fields(Sampling))
    source = (
        "generation_config.json" + (" and options" if given else "") if asked else "options" if given else "default"
    )
    _say(f"sampling: {', '.join(drawn)}, seed {config.seed} ({source})")


@contextmanager
def _open_answers(options: argparse.Namespace, run: Run) -> Iterator[Answers | None]:
    if options.output is None:
        yield None
        return
    model = run.llm.checkpoint
    meant = [model.name, model.revision, run.llm.dtype, repr(run.policy), repr(run.config)]
    meant += [options.raw, options.system, cli.parse_template_arguments(options.template_arg)]
    answers = Answers(options.output, hashlib.sha256(json.dumps(meant).encode()).hexdigest()[:12])
    try:
        yield answers
    finally:
        answers.close()


def _answer(options: argparse.Namespace, run: Run, items: Sequence[Item], answers: Answers | None) -> list[Result]:
    """Runs, and prints or writes answers as they come."""
    everything = range(len(items) * options.samples)
    if answers is not None:
        run.rows = [
            row for row in everything if (items[row // options.samples].id, row % options.samples) not in answers.done
        ]
        if len(run.rows) < len(everything):
            _say(f"{options.output}: {len(everything) - len(run.rows)} of {len(everything)} answers are there already")
    if options.longest_first:
        run.rows = sorted(run.rows, key=lambda row: -len(run.prompts[row // options.samples]))
    stream = options.stream if options.stream is not None else len(everything) == 1
    stream = stream and not options.json and answers is None
    results: list[Result] = []
    quiet = stream or not sys.stderr.isatty()
    with _progress(quiet, len(run.rows)) as advance:
        for event in run:
            if isinstance(event, Piece):
                if stream:
                    print(event.text, end="", flush=True)
                continue
            advance(len(event.tokens))
            results.append(event)
            if answers is not None:
                row = _row(items[event.prompt], event)
                answers.write(row.pop("id"), row.pop("sample"), **row)
            elif stream:
                print(flush=True)
            elif not options.json:
                print(f"## {items[event.prompt].id} {event.sample}\n{event.text}", flush=True)
    return results


@contextmanager
def _progress(quiet: bool, total: int) -> Iterator[Any]:
    if quiet:
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


def _save_trace(path: Path, run: Run, kept: Mapping[int, Sequence[np.ndarray]], results: Sequence[Result]) -> None:
    """Saves the positions that were kept after the prompt and after every compaction, and the texts they are of.

    A row that has ended is repeated as it was.
    """
    ordered = sorted(results, key=lambda result: (result.prompt, result.sample))
    rows = [kept[result.prompt * run.samples + result.sample] for result in ordered]
    count = max(map(len, rows))
    np.savez_compressed(
        path,
        steps=np.arange(count, dtype=np.int32) * run.policy.interval,
        kept=np.stack([np.stack([*row, *[row[-1]] * (count - len(row))]) for row in rows], axis=2),
        prompt_ids=_pad([run.prompts[result.prompt] for result in ordered]),
        new_ids=_pad([result.tokens for result in ordered]),
    )


def _print_report(run: Run) -> None:
    stats, plan = run.stats, run.stats.plan
    speed = f"{stats.tokens_per_second:.1f} tokens/s" if stats.tokens_per_second else "no token decoded"
    since = stats.first_token_at - psutil.Process().create_time() if stats.first_token_at else 0.0
    _say(
        f"{stats.prompt_tokens} prompt + {stats.new_tokens} new tokens; prefill {stats.prefill_seconds:.2f} s, decode "
        f"{stats.decode_seconds:.2f} s ({speed}), compile {stats.compile_seconds:.2f} s; first token {since:.1f} s "
        "after the command"
    )
    _say(
        f"kv held {format_bytes(plan.kv_held)} (+ {format_bytes(plan.metadata_held)} beside it) for {run.slots} "
        f"rows of {plan.capacity} slots; kv read {format_bytes(plan.kv_read)} a token at most, "
        f"{' + '.join(f'{count} {part}' for part, count in plan.tokens_read.items())} tokens per kv head"
    )
    if run.policy.most(FAR) < FAR:
        if run.policy.most(stats.longest_text) >= stats.longest_text:
            _say("note: no text outgrew the budget, so nothing was evicted")
    elif _read(run, FAR) < FAR and _read(run, stats.longest_text) >= stats.longest_text:
        _say("note: no text outgrew the budget, so every step read all of it")


def _read(run: Run, length: int) -> int:
    """Tokens that a step reads of a text of that length."""
    return sum(run.policy.tokens_read(run.engine.spec, length).values())


def _row(item: Item, result: Result) -> dict[str, Any]:
    return {
        "id": item.id,
        "sample": result.sample,
        "text": result.text,
        "reasoning": result.reasoning,
        "answer": result.answer,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.tokens),
        "token_ids": list(result.tokens),
    }


def _repeatable(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    kept = {key: value for key, value in vars(options).items() if key not in TRANSIENT and key != "output"}
    kept["dtype"] = run.llm.dtype  # which depends on the device where no --dtype is given
    return {key: str(value) if isinstance(value, Path) else value for key, value in kept.items()}


def _pad(rows: Sequence[Sequence[int]]) -> np.ndarray:
    padded = np.full((len(rows), max(len(row) for row in rows)), -1, np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
