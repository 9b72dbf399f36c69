"""Pictures of the JSONL files that the benches write: any of their numbers, against the budget or each other.

    python -m bench.plot bench/results/quality.jsonl --y kl seen_digits --output quality.png
    python -m bench.plot results.jsonl --x tokens_per_second --y kl --output pareto.png

A policy is a line through its rows, in the order of x; rows without a budget are horizontal lines. Standard errors are
drawn where a file has them, as NAME_error.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jkv import cli
from jkv.jsonl import read_answers

TITLES = {
    "budget": "budget, tokens per kv head",
    "kl": "KL to full attention, nats",
    "delta_nll": "delta NLL, nats a token",
    "seen_digits": "passkey digits, question seen",
    "unseen_digits": "passkey digits, question not seen",
    "tokens_per_second": "tokens/s",
}
LOGARITHMIC = ("budget", "kl", "tokens_per_second")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws."""
    parser = cli.Parser(
        prog="python -m bench.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--x", default="budget", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--y", nargs="+", required=True, metavar="NAME", help="one picture beside the other for each")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .pdf")
    options = parser.parse_args(arguments)
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib; pip install matplotlib")
    for path in options.files:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    rows = [row for path in options.files for row in read_answers(path)]
    for name in (options.x, *options.y):
        if not any(isinstance(row.get(name), int | float) for row in rows):
            known = sorted({key for row in rows for key, value in row.items() if isinstance(value, int | float)})
            raise ValueError(f"no row has a number {name!r}; there are {', '.join(known)}")
    draw(options.output, rows, options.y, x=options.x)
    return 0


def draw(path: Path, rows: Sequence[dict[str, Any]], ys: Sequence[str], *, x: str = "budget") -> None:
    """One picture for each of `ys`, a line for each name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(ys), figsize=(6 * len(ys), 5), layout="constrained", squeeze=False)
    names = list(dict.fromkeys(row["name"] for row in rows))
    for axis, y in zip(axes[0], ys, strict=True):
        for index, name in enumerate(names):
            own = sorted((row for row in rows if row["name"] == name and y in row), key=lambda row: row.get(x) or 0)
            style = {"color": f"C{index % 10}", "ls": "-" if index < 10 else "--", "label": name}
            if own and not own[0].get(x):
                axis.axhline(own[0][y], **{**style, "color": "black", "ls": ":"})
            elif own:
                error = [row.get(f"{y}_error") or 0 for row in own]
                axis.errorbar(
                    [row[x] for row in own], [row[y] for row in own], error, marker="o", ms=3, lw=1.2, **style
                )
        if x in LOGARITHMIC:
            axis.set_xscale("log", base=2)
        if y in LOGARITHMIC and all(row[y] > 0 for row in rows if y in row):
            axis.set_yscale("log")
        axis.set(xlabel=TITLES.get(x, x), ylabel=TITLES.get(y, y))
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(cli.run(main))
