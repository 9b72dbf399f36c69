"""``python -m jkv.generate``: answers prompts with a model, under a policy."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np

import weights
from jkv import cli
from jkv.api import LLM, half_precision, load, resolve_dtype
from jkv.commands.answering import FAR, describe_result, open_answers, print_header, print_report, progress, say
from jkv.commands.dry_run import describe_run
from jkv.jsonl import Answers, Item, read_prompts
from jkv.manifest import check_same, parse_again, read_manifest, write_manifest
from jkv.models.decoder import Decoder
from jkv.plan import memory_limit, parse_bytes
from jkv.policies import get_policy
from jkv.run import GenerationConfig, Piece, Result, Run
from jkv.text import load_tokenizer
from jkv.trace import save_trace
from pallas_kernels.dispatch import H100

EXAMPLES = """examples:
  python -m jkv.generate -p "Why is the sky blue?" --policy gkv:budget=256
  python -m jkv.generate --model Qwen/Qwen3-0.6B --policy rkv:budget=1024 --input prompts.jsonl --output answers.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parse_again(_parser(), arguments)
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
    print_header(options, run)
    kept: dict[int, list[np.ndarray]] = {}  # of each row, after its prompt and after every interval
    if options.trace_kept:
        run.on_kept = lambda row, _, positions: kept.setdefault(row.id, []).append(positions)
    if options.output:
        template = cli.parse_template_arguments(options.template_arg)
        opened = open_answers(options.output, run, [item.id for item in items], options.raw, options.system, template)
    else:
        opened = nullcontext()
    with opened as answers:
        results = _answer(options, run, items, answers)
    print_report(run)
    if options.trace_kept and kept:
        save_trace(options.trace_kept, run, kept, results)
    if options.json:
        answers_json = [describe_result(items[result.prompt].id, result) for result in results]
        print(json.dumps({"results": answers_json, "stats": run.stats.report()}, ensure_ascii=False))
    if options.manifest:
        write_manifest(
            options.manifest,
            run.llm,
            run.policy,
            run.prompts,
            options,
            generation=asdict(run.config),
            samples=run.samples,
            stats=run.stats.report(),
        )
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
    cli.add_template_option(prompt)
    cli.add_generation_options(parser)
    batch = parser.add_argument_group("batch")
    cli.add_batch_options(batch)
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
    show.add_argument(
        "--trace-kept", type=Path, metavar="FILE.npz", help="save the text positions the cache has kept, for jkv.show"
    )
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
    cli.check_batch_options(options)
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
        say(f"note: the chat template does not use {', '.join(unused)}")
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
        check_same(read_manifest(options.rerun), run.llm, run.prompts)
    for index, item in enumerate(items):
        if (limit := run.limit(index)) < run.config.max_new_tokens:
            longest = llm.checkpoint.config.max_position
            say(f"note: prompt {item.id}: at most {limit} new tokens, the model reads {longest} in all")
    return run


def _answer(options: argparse.Namespace, run: Run, items: Sequence[Item], answers: Answers | None) -> list[Result]:
    """Runs, and prints or writes answers as they come."""
    if options.longest_first:
        run.rows = sorted(run.rows, key=lambda row: -len(run.prompts[row // options.samples]))
    stream = options.stream if options.stream is not None else len(items) * options.samples == 1
    stream = stream and not options.json and answers is None
    results: list[Result] = []
    with progress(len(run.rows), quiet=stream) as advance:
        for event in run:
            if isinstance(event, Piece):
                if stream:
                    print(event.text, end="", flush=True)
                continue
            advance(len(event.tokens))
            results.append(event)
            if answers is not None:
                answers.write(**describe_result(items[event.prompt].id, event))
            elif stream:
                print(flush=True)
            elif not options.json:
                print(f"## {items[event.prompt].id} {event.sample}\n{event.text}", flush=True)
    return results
