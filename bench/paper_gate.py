"""The compile gate over the rows of the papers' tables."""

from collections.abc import Iterable, Iterator

from bench.apart import run_apart
from bench.compile_gate import SECONDS, judge, measure_on_cpu
from bench.gate_rows import Row
from bench.models import MODELS
from bench.paper_rows import CARD, INTERVAL, PaperRow
from bench.predict import Moved

PROGRAMS = {"decode": "decode", "compact_store": "compaction"}


def compile_rows(rows: Iterable[PaperRow], processes: int) -> Iterator[tuple[PaperRow, Moved, tuple[str, ...]]]:
    """Compiles each row's programs for the papers' card, those that rows share once.

    Yields:
        A row, what its programs move, and what the gate has against them.

    Raises:
        ValueError: a program did not compile.
    """
    rows = list(rows)
    wanted = {row.name: {program: _gate_row(row, program) for program in _programs(row)} for row in rows}
    distinct = list(dict.fromkeys(gate for gates in wanted.values() for gate in gates.values()))
    verdicts = {}
    waiting = list(rows)
    for outcome in run_apart(measure_on_cpu, distinct, processes=processes, seconds=SECONDS):
        verdicts[outcome.item] = judge(outcome)
        if outcome.value is None:
            raise ValueError(f"{outcome.item} did not compile: {outcome.error}")
        for row in [row for row in waiting if all(gate in verdicts for gate in wanted[row.name].values())]:
            waiting.remove(row)
            mine = {program: verdicts[gate] for program, gate in wanted[row.name].items()}
            compacted = 0.0
            if "compact_store" in mine:
                compacted = mine["compact_store"].figures.moved * MODELS[row.model].num_layers / INTERVAL
            problems = [f"{PROGRAMS[p]} {text}" for p, verdict in mine.items() for text in verdict.problems]
            yield row, Moved(ratio=mine["decode"].figures.ratio, compacted=compacted), tuple(problems)


def _programs(row: PaperRow) -> tuple[str, ...]:
    return ("decode", "compact_store") if row.evicts else ("decode",)


def _gate_row(row: PaperRow, program: str) -> Row:
    # cuDNN cannot be asked for a program where there is no GPU; the split kernel moves the same bytes.
    policy = "full" if row.policy.endswith("=flash") else row.policy
    return Row(gpu=CARD, program=program, model=row.model, policy=policy, shape=row.shape)
