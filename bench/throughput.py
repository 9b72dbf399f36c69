"""Tokens a second of whole runs: the rows of the papers' tables, or any other; and what each could reach.

    python -m bench.throughput --list
    python -m bench.throughput --row gkv/qwen-7b/b128/k512 --dry-run      what it takes and could reach, on three GPUs
    python -m bench.throughput --row gkv/qwen-7b/b128/k512 --new 512      on this device, with answers cut short
    python -m bench.throughput --model FOLDER --policy gkv:budget=128 --batch 8 --prompt 128 --new 256
    python -m bench.throughput --row gkv-paper --row specontext-paper --dry-run --compile --write

The tables' models have random weights unless `--model` names real ones; prompts are random too, and answers have their
full length whatever is drawn, unless `--input` gives problems, which end where the model ends them. Beside each policy
stands full attention at the same batch, and at the largest that fits the device. Results are written to `bench/results`
line by line, with a table and a plot.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.models import MODELS
from bench.paper_gate import compile_rows
from bench.paper_rows import CARD, PROTOCOLS, PaperRow, find_rows, paper_rows
from bench.predict import Prediction, Work, largest_that_fits, predict
from bench.throughput_jobs import Bench, Job
from bench.throughput_report import (
    RESULTS,
    Predicted,
    describe_measured,
    describe_predicted,
    write_measured,
    write_predicted,
)
from jkv import cli
from pallas_kernels.dispatch import A100, plan_for


def main(arguments: Sequence[str] | None = None) -> int:
    """Lists, predicts or measures rows; returns the exit code."""
    options = _parse(arguments)
    if options.list:
        for row in paper_rows().values():
            print(f"{row.name:38}{row.text:36}{row.prompt:>6} + {row.new:<6}{row.tokens_per_second:>8} tokens/s")
    elif options.dry_run:
        found = list(predict_rows(find_rows(options.row), options.jobs if options.compile else 0))
        if options.write:
            write_predicted(found, options.out)
    else:
        measure_jobs(make_jobs(options), options)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(
        prog="python -m bench.throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--list", action="store_true", help="list the rows of the papers' tables, and end")
    what.add_argument("--row", nargs="+", default=[], metavar="NAME", help="rows by name, or all of a table: gkv-paper")
    what.add_argument("--model", help="of the tables, with random weights; or as in jkv.generate, with its own")
    what.add_argument("--policy", nargs="+", default=["full"], metavar="POLICY")
    what.add_argument("--batch", nargs="+", type=int, default=[8], metavar="N", help="texts decoded together")
    what.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    what.add_argument("--new", type=int, help="tokens of an answer; cuts those of a table's row short")
    what.add_argument("--texts", type=int, metavar="N", help="through as many slots as a batch has (default: a batch)")
    what.add_argument("--input", type=Path, metavar="FILE.jsonl", help="problems to answer, each to its own end")
    what.add_argument("--no-baselines", action="store_true", help="leave full attention out")
    show = parser.add_argument_group("output")
    show.add_argument("--dry-run", action="store_true", help="predict rows of the tables; nothing runs")
    show.add_argument("--compile", action="store_true", help="with --dry-run: compile them for the papers' card, too")
    show.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compiles at once")
    show.add_argument("--write", action="store_true", help="with --dry-run: write predicted.md and predicted.jsonl")
    show.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if not (options.list or options.row or options.model):
        raise ValueError("nothing to do; give --row NAME, or --model with --policy and --batch, or --list")
    if options.dry_run and not options.row:
        raise ValueError("--dry-run is for rows of the tables (--row); jkv.generate --dry-run plans any other run")
    if (options.compile or options.write) and not options.dry_run:
        raise ValueError("--compile and --write go with --dry-run; what is measured is always written")
    if options.input and (options.model is None or options.model in MODELS):
        raise ValueError("--input has text, which a model with random weights cannot read; give --model FOLDER")
    if not options.out.is_dir():
        raise ValueError(f"--out {options.out}: there is no such folder; make it first")
    for number in (*options.batch, options.prompt, options.new or 2, options.texts or 1):
        if number < 1:
            raise ValueError(f"{number}: --batch, --prompt, --new and --texts must be at least 1")
    return options


def predict_rows(rows: Sequence[PaperRow], processes: int) -> Iterator[Predicted]:
    """Predicts rows and prints each; compiles them first, so many at once, if `processes` is not 0."""
    compiled = compile_rows(rows, processes) if processes else ((row, None, None) for row in rows)
    fulls: dict[Any, Prediction] = {}

    def full(work: Work, batch: int) -> Prediction:
        key = (work.engine, work.prompt, batch)
        if key not in fulls:
            fulls[key] = predict(replace(work, batch=batch))
        return fulls[key]

    largest: dict[Any, int] = {}
    for row, moved, problems in compiled:
        implementation = plan_for("eager" if row.policy.endswith("=eager") else None, A100)
        work = Work(engine=row.engine(implementation), batch=row.batch, prompt=row.prompt, new=row.new)
        plain = replace(work, engine=row.engine(plan_for(None, A100))).full
        if plain.engine not in largest:
            largest[plain.engine] = largest_that_fits(plain, CARD)
        most = largest[plain.engine]
        found = Predicted(
            row=row,
            own=predict(work, moved),
            same=full(plain, row.batch),
            largest=full(plain, most) if most else None,
            problems=problems,
        )
        print(describe_predicted(found), flush=True)
        yield found


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """What the options ask for."""
    if options.row:
        return [
            Job(
                name=row.name,
                model=options.model or row.model,
                policy=row.text,
                batch=row.batch,
                prompt=row.prompt,
                new=min(options.new or row.new, row.new),
                whole=row.new,
                paper=row,
            )
            for row in find_rows(options.row)
        ]
    new = options.new or 256
    sizes = {"prompt": options.prompt, "new": new, "whole": new}
    return [
        Job(name=f"{policy}/b{batch}/{options.prompt}-{new}", model=options.model, policy=policy, batch=batch, **sizes)
        for policy in options.policy
        for batch in options.batch
    ]


def measure_jobs(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Measures jobs, prints and writes each, and the table and plot at the end."""
    bench = Bench(texts=options.texts, problems=options.input, baselines=not options.no_baselines)
    lines = []
    with (options.out / "throughput.jsonl").open("w") as file:
        for job in jobs:
            lines.append(bench.measure(job))
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
            print(describe_measured(lines[-1]), flush=True)
    papers = dict.fromkeys(PROTOCOLS[job.paper.paper] for job in jobs if job.paper)
    about = " ".join(["Weights are random unless a model is named.", *(f"Protocol: {text}" for text in papers)])
    write_measured(lines, about, options.out)


if __name__ == "__main__":
    sys.exit(cli.run(main))
