"""What `bench.throughput` writes: sentences, tables, lines of JSON and a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.cpu_decode import format_markdown
from bench.gpu_target import TARGETS
from bench.machine import describe_machine
from bench.paper_rows import CARD, PAPERS, PROTOCOLS, PaperRow
from bench.predict import Prediction
from jkv.plan import format_bytes
from jkv.policies import describe

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A row of a table and what was predicted of it.

    Attributes:
        same, largest: of full attention at the same batch and at the largest that fits `CARD`; None where none does.
        problems: what the compile gate has against its programs; None where they were not compiled.
    """

    row: PaperRow
    own: Prediction
    same: Prediction
    largest: Prediction | None
    problems: tuple[str, ...] | None = None


def describe_predicted(found: Predicted) -> str:
    """A row's config, memory, ceilings and the paper's figure, for people."""
    row, own = found.row, found.own
    engine = own.work.engine
    fields = ", ".join(f"{name} {value}" for name, value in describe(engine.policy))
    lines = [
        row.name,
        f"  {row.method} in the {row.paper.removesuffix('-paper')} paper: {row.tokens_per_second} tokens/s",
        f"  protocol: {PROTOCOLS[row.paper]}",
        f"  model {row.model}, random weights, {engine.spec.dtype}; policy {row.text} ({fields})",
        f"  batch {row.batch}, prompts of {row.prompt:,} tokens, answers of {row.new:,}",
        f"  memory {format_bytes(own.memory)}: "
        + ", ".join(f"{name} {format_bytes(peak.total)}" for name, peak in own.peaks.items()),
        f"  kv held {format_bytes(own.kv_held)}, kv read in a step {format_bytes(own.kv_read)} in the mean",
    ]
    for gpu, target in TARGETS.items():
        fits = "fits" if own.fits(gpu) else "does not fit"
        lines.append(
            f"  {target.name}: {fits}; at most {own.ceiling(gpu):,.0f} tokens/s, {own.decode_ceiling(gpu):,.0f} "
            f"decoding alone; full attention {found.same.decode_ceiling(gpu):,.0f}"
        )
    if found.largest is not None:
        rate = found.largest.decode_ceiling(CARD)
        lines.append(f"  full attention at its largest batch on the first, {found.largest.work.batch}: {rate:,.0f}")
    if found.problems is not None:
        traffic = own.traffic
        assert traffic is not None
        lines.append(f"  compiled: a step moves {traffic.ratio:.3f} of what it must; {_verdict(found)}")
    return "\n".join(lines)


def write_predicted(found: Sequence[Predicted], folder: Path = RESULTS) -> None:
    """Writes `predicted.md` and `predicted.jsonl`."""
    machine = describe_machine()
    with (folder / "predicted.jsonl").open("w") as file:
        for item in found:
            file.write(json.dumps(_record(item)) + "\n")
    names = ", ".join(target.name for target in TARGETS.values())
    parts = [
        "# Predicted throughput of the papers' rows\n",
        f"Predicted, not measured: no GPU took part (jax {machine['jax']}, commit {machine['commit']}).\n",
        f"- `at most`: new tokens a second, decoding alone, on {names}. A step takes the time of its bytes at the "
        "card's bandwidth, or that of its products at the card's peak if that is longer. The bytes are what it must "
        "move, averaged over the answer, times `moved`, which is what the compiled step moves over what it must.\n"
        f"- `with prompts`: on {TARGETS[CARD].name}, the products that read the prompts included.\n"
        "- memory: of the fullest program; 95 % of a card's can be used.\n"
        f"- `full`: full attention, decoding, at the same batch and at the largest that fits {TARGETS[CARD].name}.\n"
        "- gate: what the compile gate says of the row's programs, compiled for that card.\n",
    ]
    for paper in PAPERS:
        rows = [item for item in found if item.row.paper == paper]
        if rows:
            parts += [f"\n## {paper}\n", f"Protocol: {PROTOCOLS[paper]}\n", format_markdown([_cells(r) for r in rows])]
    fits = {gpu: sum(item.own.fits(gpu) for item in found) for gpu in TARGETS}
    parts.append("\nFits: " + ", ".join(f"{TARGETS[g].name} {n} of {len(found)}" for g, n in fits.items()) + ".\n")
    (folder / "predicted.md").write_text("\n".join(parts))


def _cells(item: Predicted) -> dict[str, str]:
    own, row = item.own, item.row
    ceilings = {f"{gpu} at most": _rate(own.decode_ceiling(gpu), own.fits(gpu)) for gpu in TARGETS}
    largest = item.largest
    return {
        "row": row.name,
        "memory GiB": f"{own.memory / 2**30:.1f}",
        "kv read a step GB": f"{own.kv_read / 1e9:.2f}",
        "moved": "" if own.traffic is None else f"{own.traffic.ratio:.3f}",
        **ceilings,
        "with prompts": _rate(own.ceiling(CARD), own.fits(CARD)),
        "paper": f"{row.tokens_per_second:,.0f}",
        "at most / paper": f"{own.decode_ceiling(CARD) / row.tokens_per_second:.1f}",
        "full, same": _rate(item.same.decode_ceiling(CARD), item.same.fits(CARD)),
        "full, largest": "" if largest is None else f"{largest.decode_ceiling(CARD):,.0f} (b{largest.work.batch})",
        "gate": "" if item.problems is None else _verdict(item),
    }


def _rate(rate: float, fits: bool) -> str:
    return f"{rate:,.0f}" if fits else f"({rate:,.0f}) does not fit"


def _verdict(item: Predicted) -> str:
    return "; ".join(item.problems) if item.problems else "passes"


def _record(item: Predicted) -> dict[str, Any]:
    own = item.own
    return {
        **asdict(item.row),
        "policy_text": item.row.text,
        "predicted": True,
        "memory_bytes": own.memory,
        "kv_bytes_held": own.kv_held,
        "kv_bytes_read": own.kv_read,
        "step_bytes": own.step,
        "compaction_bytes": own.compacted,
        "moved": None if own.traffic is None else asdict(own.traffic),
        "fits": {gpu: own.fits(gpu) for gpu in TARGETS},
        "ceiling": {gpu: own.ceiling(gpu) for gpu in TARGETS},
        "decode_ceiling": {gpu: own.decode_ceiling(gpu) for gpu in TARGETS},
        "full_same_batch": {gpu: item.same.decode_ceiling(gpu) for gpu in TARGETS},
        "full_largest_batch": None if item.largest is None else item.largest.work.batch,
        "problems": item.problems,
    }


MEASURED = (
    ("row", "name"),
    ("batch", "batch"),
    ("tokens/s", "tokens_per_second"),
    ("decoding", "decode_tokens_per_second"),
    ("with whole answers", "whole_tokens_per_second"),
    ("share of floor", "share_of_floor"),
    ("paper", "paper_tokens_per_second"),
    ("of paper", "of_paper"),
    ("full, same batch", "full_same_batch"),
    ("full, largest", "full_largest_batch"),
)


def describe_measured(line: dict[str, Any]) -> str:
    """A measured row in one line."""
    parts = (f"{title} {text}" for title, key in MEASURED[2:] if (text := _number(line.get(key))))
    return f"{line['name']}: {', '.join(parts)}"


def format_measured(lines: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of measured rows."""
    return format_markdown([{title: _number(line.get(key)) for title, key in MEASURED} for line in lines])


def write_measured(lines: Sequence[dict[str, Any]], about: str, folder: Path = RESULTS) -> None:
    """Writes `throughput.md`, and `throughput.png` where matplotlib is installed; the lines are there already."""
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    (folder / "throughput.md").write_text(f"# Throughput\n\n{about}\n\n{machine}.\n\n{format_measured(lines)}\n")
    if find_spec("matplotlib"):
        draw(lines, folder / "throughput.png")


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second against the batch, one line for each policy and budget; the papers' points are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(line["model"] for line in lines))
    figure, axes = plt.subplots(1, len(models), figsize=(6 * len(models), 4.5), squeeze=False, layout="constrained")
    for model, axis in zip(models, axes[0], strict=True):
        groups: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if line["model"] == model:
                groups.setdefault(f"{line['policy']} {line['prompt']}+{line['new']}", []).append(line)
        for label, group in groups.items():
            ordered = sorted(group, key=lambda line: line["batch"])
            batches = [line["batch"] for line in ordered]
            drawn = axis.plot(batches, [line["best"] for line in ordered], marker="o", label=label)[0]
            papers = [(line["batch"], line["paper_tokens_per_second"]) for line in ordered]
            papers = [point for point in papers if point[1]]
            if papers:
                axis.plot(*zip(*papers, strict=True), marker="o", mfc="none", ls=":", color=drawn.get_color())
        axis.set(title=model, xlabel="batch", ylabel="tokens a second", xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend(fontsize=7, title="measured; hollow: the paper's", title_fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
