"""Figures of the GPU check for people: what a time means on this card, lines, and tables."""

from collections.abc import Sequence
from typing import Any

from bench.gpu_target import TARGETS

Figures = dict[str, Any]


def add_floors(line: Figures, machine: Figures) -> None:
    """Adds floors to a line with a time, in seconds, and the time over each of them.

    `floor`: at the bandwidth of a copy and the speed of a product as measured. `nominal_floor`: of the bytes alone, at
    the bandwidth of the card's data sheet, where it is known.
    """
    seconds = line.get("seconds", line.get("step"))
    if seconds is None:
        return
    line["floor"] = max(line["moved"] / machine["bandwidth"], line.get("flops", 0) / machine["flops"])
    line["over_floor"] = seconds / line["floor"]
    nominal = find_bandwidth(machine["device"])
    if nominal:
        line["nominal_floor"] = line["moved"] / nominal
        line["over_nominal"] = seconds / line["nominal_floor"]


def find_bandwidth(device: str) -> float | None:
    """Bytes a second of a card's memory by its data sheet."""
    return next((target.bandwidth for name, target in TARGETS.items() if name.upper() in device), None)


def format_line(line: Figures) -> str:
    """A line as it is printed when it comes."""
    name = " ".join(str(line[key]) for key in ("stage", "operation", "implementation", "model", "shape") if line[key])
    figures = ", ".join(filter(None, (f"{key} {value}" for key, value in cells_of(line).items() if value)))
    return f"{line['status']:8}{name}: {line.get('skipped') or line.get('problem') or figures}"


def cells_of(line: Figures) -> dict[str, str]:
    """The figures of a line by the heads of their columns."""
    if line["status"] == "skipped":
        return {}
    match line["stage"]:
        case "machine":
            return {key: str(line.get(key)) for key in ("device", "driver", "python", "jax", "jaxlib", "commit")} | {
                "copy TB/s": _number(line, "bandwidth", 1e-12),
                "products TFLOP/s": _number(line, "flops", 1e-12),
            }
        case "check":
            return {"error": f"{line['error']:.1e}" if "error" in line else ""} | {
                key: str(line.get(key, "")) for key in ("wrong", "unsteady")
            }
        case "time":
            return {
                "us": _number(line, "seconds", 1e6),
                "fastest": _number(line, "fastest", 1e6),
                "floor us": _number(line, "floor", 1e6),
                "over floor": _number(line, "over_floor"),
                "over nominal": _number(line, "over_nominal"),
            }
    return {
        "step ms": _number(line, "step", 1e3),
        "floor ms": _number(line, "floor", 1e3),
        "over floor": _number(line, "over_floor"),
        "over nominal": _number(line, "over_nominal"),
        "compaction ms": _number(line, "compaction", 1e3),
        "ms a token": _number(line, "token", 1e3),
        "tokens/s": _number(line, "tokens_per_second"),
        "first s": _number(line, "first"),
    }


def format_report(lines: Sequence[Figures], machine: Figures, seconds: float) -> str:
    """What was measured and on what, as Markdown."""
    about = ", ".join(
        f"{key} {value}" for key, value in cells_of({**machine, "stage": "machine", "status": "ok"}).items()
    )
    counts = {status: sum(line["status"] == status for line in lines) for status in ("ok", "failed", "skipped")}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    parts = ["# GPU check\n", f"{about}.\n", f"{len(lines)} lines in {seconds:.0f} s: {summary}.\n"]
    parts += [f"- {format_line(line)}" for line in lines if line["status"] == "failed"]
    parts += ["\n## Kernels against their references\n", *format_table(worst_checks(lines))]
    for stage, title in (("time", "Time of a kernel"), ("decode", "Decode step of a model")):
        rows = [
            {
                **{key: str(line[key]) for key in ("operation", "implementation", "model", "shape")},
                **cells_of(line),
            }
            for line in lines
            if line["stage"] == stage and line["status"] != "skipped"
        ]
        parts += [f"\n## {title}\n", *format_table(rows)]
    skipped = {line["skipped"]: 0 for line in lines if line["status"] == "skipped"}
    for line in lines:
        if line["status"] == "skipped":
            skipped[line["skipped"]] += 1
    if skipped:
        parts += ["\n## Skipped\n", *(f"- {count}: {reason}" for reason, count in skipped.items())]
    return "\n".join(parts) + "\n"


def worst_checks(lines: Sequence[Figures]) -> list[dict[str, str]]:
    """For each kernel the worst of its checks."""
    groups: dict[tuple[str, str], list[Figures]] = {}
    for line in lines:
        if line["stage"] == "check" and line["status"] != "skipped":
            groups.setdefault((line["operation"], line["implementation"]), []).append(line)
    return [
        {
            "operation": operation,
            "implementation": implementation,
            "checks": str(len(group)),
            "failed": str(sum(line["status"] == "failed" for line in group)),
            "largest error": f"{max(line.get('error', float('nan')) for line in group):.1e}",
            "wrong": str(sum(line.get("wrong", 0) for line in group)),
            "unsteady": str(sum(line.get("unsteady", 0) for line in group)),
        }
        for (operation, implementation), group in groups.items()
    ]


def format_table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Rows with the same columns as a Markdown table."""
    if not rows:
        return ["None."]
    head = list(rows[0])
    body = [head, ["---"] * len(head), *(list(row.values()) for row in rows)]
    return ["| " + " | ".join(cells) + " |" for cells in body]


def _number(line: Figures, key: str, scale: float = 1.0) -> str:
    return f"{line[key] * scale:.4g}" if line.get(key) is not None else ""
