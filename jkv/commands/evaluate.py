"""``python -m jkv.evaluate``: how many problems a model solves under a policy, or how many passkeys it remembers."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jkv import cli
from jkv.api import LLM, load
from jkv.commands.answering import describe_result, open_answers, print_header, print_report, progress, say, tokens_read
from jkv.comparison import format_mean, mean_and_error
from jkv.evaluation import judge, summarize
from jkv.grading import Grader
from jkv.jsonl import read_answers, write_whole
from jkv.manifest import check_same, hash_prompts, parse_again, read_manifest, write_manifest
from jkv.passkey import VARIANTS, make_cases, score_passkeys
from jkv.policies import format_policy, get_policy
from jkv.problems import PRESETS, Problem, read_problems
from jkv.run import GenerationConfig, Result, Run

PASSKEY = "passkey"
TEXTS, LENGTH = 24, 512  # of the passkey task
EXAMPLES = """examples:
  python -m jkv.evaluate aime24.jsonl --preset deepseek --samples 16 --policy gkv:budget=2048 --output results/gkv
  python -m jkv.evaluate HuggingFaceH4/MATH-500:test --limit 100 --policy rkv:budget=1024 --output results/rkv
  python -m jkv.evaluate passkey --length 1024 --policy gkv:budget=128

The folder holds manifest.json (what was run), answers.jsonl (every answer, as it ends: a run that was killed goes on),
graded.jsonl (the verdict on each) and summary.json.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parse_again(_parser(), arguments)
    _check(options)
    asks = options.task != PASSKEY
    problems = read_problems(options.task) if asks else []
    cli.keep_programs()
    llm = load(options.model, dtype=options.dtype, revision=options.revision, implementation=options.implementation)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    summary = _solve(options, llm, problems) if asks else _remember(options, llm)
    if options.output:
        write_whole(options.output / "summary.json", json.dumps(summary, indent=2) + "\n")
        say(f"results: {options.output}")
    if options.json:
        print(json.dumps(summary))
    else:
        Console(width=max(Console().width, 100)).print(_make_table(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m jkv.evaluate",
        description="Lets a model solve problems under a policy, and grades its answers; or hides passkeys in long "
        "texts, and asks for them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK",
        help="JSONL file with a problem and its answer a line; data set of the hub, as NAME:SPLIT or "
        "NAME:CONFIG:SPLIT; or passkey",
    )
    parser.add_argument("--limit", type=int, metavar="N", help=f"first N problems, or N passkeys (all, or {TEXTS})")
    cli.add_model_options(parser)
    cli.add_policy_option(parser)
    ask = parser.add_argument_group("problems")
    ask.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        help="how to ask and draw: gkv asks for a boxed answer in the system message, deepseek after the problem, "
        "plain not at all; all at temperature 0.6 and top-p 0.95, up to 32,768 tokens (default: gkv)",
    )
    cli.add_batch_options(ask)
    cli.add_template_option(ask)
    cli.add_generation_options(parser)
    parser.add_argument_group("passkeys").add_argument(
        "--length", type=int, metavar="N", help=f"tokens of each text (default: {LENGTH})"
    )
    show = parser.add_argument_group("output")
    show.add_argument("--output", type=Path, metavar="FOLDER", help="folder of results; problems need one")
    show.add_argument("--rerun", type=Path, metavar="FILE", help="repeat what a results folder's manifest.json says")
    show.add_argument("--json", action="store_true", help="print the summary as JSON")
    show.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuses what can be refused before anything is read."""
    if options.task is None:
        raise ValueError("no task; name a JSONL file with problems, a data set of the hub, or passkey")
    get_policy(options.policy)
    drawing = cli.generation_changes(options)
    GenerationConfig(**drawing)
    cli.check_batch_options(options)
    if options.task == PASSKEY:
        if options.preset or options.template_arg or options.samples > 1 or drawing:
            raise ValueError("passkeys are asked for in one way: leave out --preset, --samples and how to draw")
    elif options.length is not None:
        raise ValueError("--length is for the task passkey; --max-new-tokens says how long answers may be")
    elif options.output is None:
        raise ValueError("no folder for the answers; give one with --output")
    else:
        Grader()  # which tells what it lacks
        cli.parse_template_arguments(options.template_arg)
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit {options.limit} must be at least 1")
    if options.output and options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output {options.output}: is a file; name a folder")


def _solve(options: argparse.Namespace, llm: LLM, problems: Sequence[Problem]) -> dict[str, Any]:
    preset = PRESETS[options.preset or "gkv"]
    template, chat = cli.parse_template_arguments(options.template_arg), llm.tokenizer.has_chat_template
    if not chat:
        say("note: the model has no chat template, so problems are given as plain text")
    asked = {"raw": not chat, "system": preset.system if chat else None, "arguments": template}
    prompts = [llm.encode(preset.ask(problem, chat=chat), **asked) for problem in problems]
    own = {name: getattr(preset, name) for name in ("temperature", "top_p", "max_new_tokens")}
    run = llm.run(
        prompts[: options.limit],
        policy=options.policy,
        config=llm.default_config(**{**own, **cli.generation_changes(options)}),
        samples=options.samples,
        slots=options.slots,
    )
    if options.rerun:
        check_same(read_manifest(options.rerun), run.llm, run.prompts)
    print_header(options, run, f"preset {options.preset or 'gkv'}")
    # Answers go on being the same when --limit grows, so all prompts are what they must belong to.
    lines = _draw(options, run, [problem.id for problem in problems[: options.limit]], hash_prompts(prompts))
    say("grading")
    judged = judge(problems, lines, thinking=run.thinks(0))
    verdicts = list(track(judged, "", len(lines), console=Console(stderr=True), disable=not sys.stderr.isatty()))
    graded = []
    for verdict in verdicts:
        length = verdict.prompt_tokens + verdict.new_tokens
        shares = {"kept_share": run.policy.most(length) / length, "read_share": tokens_read(run, length) / length}
        graded.append({**asdict(verdict), **{name: min(share, 1.0) for name, share in shares.items()}})
    write_whole(options.output / "graded.jsonl", "".join(json.dumps(each) + "\n" for each in graded))
    shares = {key: float(np.mean([each[key] for each in graded])) for key in ("kept_share", "read_share")}
    return {
        "task": options.task,
        "policy": options.policy,
        "model": llm.checkpoint.name,
        **summarize(verdicts),
        **shares,
    }


def _draw(options: argparse.Namespace, run: Run, ids: Sequence[str | int], asked: str) -> list[dict[str, Any]]:
    """The lines of the answers file, once it has all of them."""
    path = options.output / "answers.jsonl"
    with open_answers(path, run, ids, asked) as answers, progress(len(run.rows)) as advance:
        for event in run:
            if isinstance(event, Result):
                advance(len(event.tokens))
                answers.write(**describe_result(ids[event.prompt], event))
    if run.rows:
        print_report(run)
    write_manifest(
        options.output / "manifest.json",
        run.llm,
        run.policy,
        run.prompts,
        options,
        generation=asdict(run.config),
        stats=run.stats.report(),
    )
    wanted = set(ids)
    return [line for line in read_answers(path) if line["id"] in wanted and line["sample"] < run.samples]


def _remember(options: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    policy, sizes = llm.prepare(options.policy), {"count": options.limit or TEXTS, "length": options.length or LENGTH}
    cases = make_cases(llm, **sizes)
    prompts = [case.context for case in cases]
    if options.rerun:
        check_same(read_manifest(options.rerun), llm, prompts)
    say(f"model: {llm.checkpoint.name}, {llm.dtype}; policy: {format_policy(options.policy, policy)}")
    summary: dict[str, Any] = {"task": PASSKEY, "policy": options.policy, "model": llm.checkpoint.name, **sizes}
    lines = []
    for variant in VARIANTS:
        say(f"{len(cases)} texts of {sizes['length']} tokens, the question {variant} when the policy cuts them")
        found = score_passkeys(llm, policy, cases, variant)
        for spec in fields(found):
            mean, error = mean_and_error(getattr(found, spec.name))
            summary |= {f"{variant}_{spec.name}": mean, f"{variant}_{spec.name}_error": error}
        for index, values in enumerate(zip(found.digits, found.whole, found.nll, strict=True)):
            names = ("digits", "whole", "nll")
            lines.append({"text": index, "variant": variant, **dict(zip(names, map(float, values), strict=True))})
    if options.output:
        write_whole(options.output / "answers.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_manifest(options.output / "manifest.json", llm, policy, prompts, options)
    return summary


def _make_table(summary: dict[str, Any]) -> Table:
    """The summary for people."""
    table = Table(box=SIMPLE_HEAD, show_header=False)
    for name, value in summary.items():
        if not name.endswith("_error"):
            shown = "-" if value is None else str(value)
            if isinstance(value, float):
                shown = format_mean(value, summary.get(f"{name}_error"), ".4g")
            table.add_row(name.replace("_", " "), shown)
    return table
