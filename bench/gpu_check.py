"""Checks and times the kernels, and the decode step of whole models, on the GPU at hand.

    python -m bench.gpu_check                all of it, in under 8 minutes
    python -m bench.gpu_check --minutes 4    the most important part
    python -m bench.gpu_check --only compact cudnn      the lines with one of these in their names
    python -m bench.gpu_check --toy          in small, with the kernels interpreted, where there is no GPU

Weights and caches are random. Kernels are compared with their references in float32, with slots that must not matter
poisoned; all times are also given over the floor, the time that the bytes which must move take, or the products if
they take longer, at what a plain copy and a large product reach on this card.

Results are written line by line to `gpu_check.jsonl`, and as a table to `gpu_check.md`. The exit code is 1 if a kernel
failed, whatever else was measured, and 2 if there is no GPU.
"""

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

from bench.apart import Outcome, run_apart
from bench.gpu_jobs import TOY, Figures, Job, Task, check_jobs, decode_jobs, time_jobs, work
from bench.gpu_report import add_floors, format_line, format_report

RESULTS = Path(__file__).parent / "results"
MACHINE_SECONDS = 90.0


@dataclass(frozen=True)
class Stage:
    """Jobs of one kind; what is not done in time is skipped.

    Attributes:
        share: of all the time, by whose end the stage is over.
        needs: seconds that a job takes, at most as a rule.
        limit: seconds after which one is given up.
        processes: at once; what is timed has the card for itself.
    """

    jobs: Sequence[Job]
    share: float
    needs: float
    limit: float
    processes: int = 1


@dataclass
class Results:
    """The lines so far.

    Attributes:
        file: where they are written as they come.
        machine: what is written in each of them.
    """

    file: TextIO
    machine: Figures
    lines: list[Figures] = field(default_factory=list)

    def add(self, outcome: Outcome[Task, Figures]) -> None:
        """Writes what became of a job."""
        line = make_line(outcome)
        if line["status"] != "skipped":
            add_floors(line, self.machine)
        self.lines.append(line)
        self.file.write(json.dumps({**line, "machine": self.machine}) + "\n")
        self.file.flush()
        print(format_line(line), flush=True)


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="what takes longer is left out")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="lines with one of these in their names")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--seed", type=int, help="of all numbers; default: another one each time")
    parser.add_argument("--commit", help="for a copy of the code without its git folder")
    parser.add_argument("--toy", action="store_true", help="in small, on CPU")
    options = parser.parse_args()
    start, seconds = time.time(), 60 * options.minutes
    seed = secrets.randbelow(2**20) if options.seed is None else options.seed
    stages = plan(seed, toy=options.toy)
    if options.only:
        stages = [replace(stage, jobs=[job for job in stage.jobs if job.is_named(options.only)]) for stage in stages]
        if not any(stage.jobs for stage in stages):
            parser.error(f"--only {' '.join(options.only)}: no line has any of these in its name")
    # For the processes to come: several share the card, and one that died must not have taken all of its memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    machine = describe(toy=options.toy)
    if options.commit:
        machine["commit"] = options.commit
    options.out.mkdir(parents=True, exist_ok=True)
    name = "gpu_check_toy" if options.toy else "gpu_check"
    with (options.out / f"{name}.jsonl").open("w") as file:
        results = Results(file, machine)
        for stage in stages:
            tasks = [Task(job, start + stage.share * seconds, stage.needs) for job in stage.jobs]
            for outcome in run_apart(work, tasks, processes=stage.processes, seconds=stage.limit):
                results.add(outcome)
    report = format_report(results.lines, machine, time.time() - start)
    (options.out / f"{name}.md").write_text(report)
    print(f"\n{report}")
    sys.exit(any(line["status"] == "failed" for line in results.lines))


def describe(*, toy: bool) -> Figures:
    """The machine, from a process of its own; without a GPU this is the end."""
    task = Task(Job(stage="machine", model=TOY if toy else ""), until=time.time() + MACHINE_SECONDS, needs=0.0)
    line = make_line(next(run_apart(work, [task], processes=1, seconds=MACHINE_SECONDS)))
    print(format_line(line), flush=True)
    if line["status"] != "ok":
        sys.exit(2 if line["status"] == "skipped" else 1)
    return {key: line[key] for key in line if key not in ("status", "took", *asdict(task.job))}


def make_line(outcome: Outcome[Task, Figures]) -> Figures:
    """What became of a job."""
    figures = outcome.value or {"problem": outcome.error}
    if "SIGALRM" in outcome.error:
        figures = {"skipped": "ran out of time"}
    status = "skipped" if "skipped" in figures else "failed" if figures.get("problem") else "ok"
    return {"status": status, **asdict(outcome.item.job), **figures}


def plan(seed: int, *, toy: bool) -> list[Stage]:
    """The stages, the most important first."""
    return [
        Stage(check_jobs(seed, toy=toy), share=0.3, needs=8.0, limit=90.0, processes=1 if toy else 6),
        Stage(time_jobs(seed, toy=toy), share=0.5, needs=8.0, limit=90.0),
        Stage(decode_jobs(seed, toy=toy), share=1.0, needs=40.0, limit=150.0),
    ]


if __name__ == "__main__":
    main()
