"""Compiles every kernel and every program of the engine for three GPUs, on a machine that has none.

    python -m bench.compile_gate                all of it, in about half an hour of two cores
    python -m bench.compile_gate --quick        the part that any change may break, in a few minutes
    python -m bench.compile_gate --only h2o     the rows that have all these words in their names

Refuses, with exit code 1 and the lines named: any copy of a cache or of weights; a kernel that spills registers, or
takes more shared memory than the GPU has; a decode step that needs much more workspace than its logits, moves much more
than the weights and the cache once, or takes too many kernels a layer; a program that takes other memory than is
predicted. Among the rows are programs that it must refuse.
Needs the extra `gate`, and the assembler `ptxas`.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from bench.apart import Outcome, run_apart
from bench.gate_controls import CONTROLS
from bench.gate_figures import Figures, measure
from bench.gate_operations import OPERATIONS
from bench.gate_rows import RUNS, SELECTING, Row, all_rows, quick_rows
from bench.gpu_target import TARGETS
from bench.machine import describe_machine
from bench.models import MODELS

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
MOST_TEMP = 64 * MIB  # of a decode step, beside its logits
MOST_TRAFFIC = 1.10  # times the floor, of a decode step
MOST_LAUNCHES = 12  # of a layer, in a decode step; one more where parts of a row's attention are combined
# Where a step chooses what it reads.
MOST_TRAFFIC_SELECTED, MOST_LAUNCHES_SELECTED = 1.15, 20
MOST_OFF = 0.10  # of the bytes that are predicted without compiling
SECONDS = 900.0  # for one row


@dataclass(frozen=True)
class Verdict:
    """What the gate has to say about a row.

    Attributes:
        figures: None when the program did not compile.
        problems: why it is refused; none lets it through.
    """

    row: Row
    figures: Figures | None
    problems: tuple[str, ...]


def main() -> None:
    """Runs the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the rows")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows with all of these in their names")
    parser.add_argument("--implementation", help="as in jkv.generate; default: the one that runs there unasked")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compiles at once")
    parser.add_argument("--write", action="store_true", help="write bench/results/compile_gate.md and .json")
    options = parser.parse_args()
    # Says that this process runs on CPU, so that jax does not look for a GPU's driver.
    jax.config.update("jax_platforms", "cpu")
    chosen = (quick_rows if options.quick else all_rows)(options.implementation)
    controls = (Row(gpu=control.gpu, program=name) for name, control in CONTROLS.items())
    rows = [row for row in (*controls, *chosen) if all(word in str(row) for word in options.only)]
    start = time.perf_counter()
    verdicts = []
    # Mosaic keeps kernels within a process, whichever GPU they were compiled for.
    fresh = options.implementation == "mosaic"
    for outcome in run_apart(measure_on_cpu, rows, processes=options.jobs, seconds=SECONDS, fresh=fresh):
        verdicts.append(judge(outcome))
        print(format_line(verdicts[-1]), flush=True)
    verdicts.sort(key=lambda verdict: rows.index(verdict.row))
    failed = [verdict for verdict in verdicts if verdict.problems]
    print(f"\n{len(rows)} rows, {len(failed)} refused, {time.perf_counter() - start:.0f} s")
    for verdict in failed:
        print(f"REFUSED {verdict.row}: {'; '.join(verdict.problems)}")
    if options.write:
        write_results(verdicts, sys.argv[1:])
    sys.exit(bool(failed))


def measure_on_cpu(row: Row) -> Figures:
    """`measure`, in a process that leaves the machine's own GPU alone and compiles what it is asked to."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a program out of a cache leaves no dump
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # the one way to learn of the registers of its kernels
    return measure(row)


def judge(outcome: Outcome[Row, Figures]) -> Verdict:
    """The verdict on a row; on a control, whether it was refused for what it was made for."""
    row, figures = outcome.item, outcome.value
    problems = (outcome.error,) if figures is None else tuple(find_problems(row, figures))
    if row.program in CONTROLS:
        wanted = CONTROLS[row.program].refused_for
        found = any(re.search(wanted, problem) for problem in problems)
        problems = (
            () if found else (f"should have been refused for {wanted!r}; found: {'; '.join(problems) or 'none'}",)
        )
    return Verdict(row, figures, problems)


def find_problems(row: Row, figures: Figures) -> Iterator[str]:
    """Why a row is refused."""
    program = figures.program
    for copy in program.copies:
        yield f"copies {copy}"
    if figures.donated < figures.cache:
        yield f"takes over {figures.donated / MIB:.1f} of {figures.cache / MIB:.1f} MiB of cache"
    for name in program.unread:
        yield f"registers and spills of {name} could not be read"
    for kernel in program.kernels:
        if kernel.spilled and kernel.name in program.called:  # XLA's own fusions are what its release makes them
            yield f"{kernel.name} spills {kernel.spilled} bytes a thread"
        if (kernel.shared or 0) > TARGETS[row.gpu].gpu.shared_memory:
            yield f"{kernel.name} takes {kernel.shared} bytes of shared memory"
    if figures.predicted is not None and abs(figures.predicted - 1) > MOST_OFF:
        yield f"takes {1 / figures.predicted:.2f} times the memory that is predicted"
    if row.program in OPERATIONS and row.implementation not in ("xla", "eager") and not program.called:
        yield "calls no kernel of its own"
    if row.program == "decode":
        yield from find_decode_problems(row, figures)


def find_decode_problems(row: Row, figures: Figures) -> Iterator[str]:
    """Why a decode step is refused beside that."""
    run, selects = RUNS[row.shape], row.shape in SELECTING
    traffic = MOST_TRAFFIC_SELECTED if selects else MOST_TRAFFIC
    launches = MOST_LAUNCHES_SELECTED if selects else MOST_LAUNCHES + (run.batch == 1)
    # A score for each token and query head, where tokens are chosen one by one.
    beside = figures.logits + (run.batch * MODELS[row.model].num_heads * run.capacity * 4 if selects else 0)
    if figures.temp - beside > MOST_TEMP:
        yield f"needs {(figures.temp - beside) / MIB:.1f} MiB beside its logits, more than {MOST_TEMP // MIB}"
    if figures.ratio > traffic:
        yield f"moves {figures.ratio:.2f} times the floor, more than {traffic}"
    if (figures.per_layer or 0) > launches:
        yield f"launches {figures.per_layer:g} kernels a layer, more than {launches}"
    for loop in figures.program.open_loops:
        yield f"the host waits for {loop}, whose length depends on data"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "temp MiB": lambda f: f"{f.temp / MIB:.1f}",
    "donated MiB": lambda f: f"{f.donated / MIB:.1f}",
    "copies": lambda f: str(len(f.program.copies)),
    "launches": lambda f: str(f.launches),
    "a layer": lambda f: "" if f.per_layer is None else f"{f.per_layer:g}",
    "moved / floor": lambda f: f"{f.ratio:.3f}",
    "predicted memory": lambda f: "" if f.predicted is None else f"{f.predicted:.3f}",
    "registers": lambda f: _largest(f, "registers"),
    "shared": lambda f: _largest(f, "shared"),
    "spilled": lambda f: str(max((kernel.spilled for kernel in f.program.kernels), default=0)),
}


def _largest(figures: Figures, attribute: str) -> str:
    """Of the kernels that are not XLA's own; empty where the program has none."""
    ours = [kernel for kernel in figures.program.kernels if kernel.name in figures.program.called]
    return str(max(getattr(kernel, attribute) or 0 for kernel in ours)) if ours else ""


def format_line(verdict: Verdict) -> str:
    """A row as the gate prints it when it is done."""
    state = "REFUSED" if verdict.problems else "ok"
    if verdict.figures is None:
        return f"{state:8}{verdict.row}"
    figures = ", ".join(f"{name} {value(verdict.figures)}" for name, value in COLUMNS.items() if value(verdict.figures))
    return f"{state:8}{verdict.row}: {figures}"


def format_markdown(verdicts: Sequence[Verdict]) -> str:
    """A table for each GPU."""
    parts = []
    for gpu in dict.fromkeys(verdict.row.gpu for verdict in verdicts):
        head = ["program", "model", "policy", "shape", *COLUMNS, ""]
        parts += [f"\n## {TARGETS[gpu].name}\n", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
        for verdict in verdicts:
            row, figures = verdict.row, verdict.figures
            if row.gpu == gpu and row.program not in CONTROLS:
                values = [value(figures) if figures else "" for value in COLUMNS.values()]
                cells = [row.program, row.model, row.policy, row.shape, *values, "; ".join(verdict.problems)]
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts)


def describe_verdict(verdict: Verdict) -> dict[str, Any]:
    """A row's figures as plain values; of its kernels those that are not XLA's own."""
    row: dict[str, Any] = {**asdict(verdict.row), "problems": verdict.problems}
    if verdict.figures is not None:
        program = verdict.figures.program
        row |= {**asdict(verdict.figures), "ratio": round(verdict.figures.ratio, 4)}
        row["program"] = verdict.row.program
        row["copies"], row["open_loops"], row["heaviest"] = program.copies, program.open_loops, program.heaviest
        row["kernels"] = [asdict(kernel) for kernel in program.kernels if kernel.name in program.called]
    return row


def write_results(verdicts: Sequence[Verdict], command: Sequence[str]) -> None:
    """Writes all figures to `bench/results`."""
    machine = describe_machine()
    refused = sum(bool(verdict.problems) for verdict in verdicts)
    controls = [verdict.row for verdict in verdicts if verdict.row.program in CONTROLS and not verdict.problems]
    lines = [
        "# Compile gate\n",
        f"`python -m bench.compile_gate {' '.join(command)}`: {len(verdicts)} rows, {refused} refused. Compiled with "
        f"jax {machine['jax']} at commit {machine['commit']}, without a GPU: nothing here was timed, and the matrix "
        "products have tiles that XLA takes without trying any, their sums not split.\n",
        "A decode row is one step of a model at its whole depth, put together from depths of two and four layers; "
        "registers and shared memory are those of the kernels in `pallas_kernels`.\n",
        "Rows that must be refused were: " + ", ".join(map(str, controls)) if controls else "",
    ]
    rows = [describe_verdict(verdict) for verdict in verdicts]
    (RESULTS / "compile_gate.md").write_text("\n".join(lines) + format_markdown(verdicts) + "\n")
    (RESULTS / "compile_gate.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
