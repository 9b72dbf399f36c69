"""``python -m jkv.show``: a page, or a picture, of what a run's caches have kept."""

import argparse
import base64
import json
import sys
import zlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jkv import cli
from jkv.commands.answering import say
from jkv.jsonl import write_whole
from jkv.trace import Trace, read_trace, share_held

EXAMPLES = """examples:
  python -m jkv.generate -p "Why is the sky blue?" --policy gkv:budget=64 --trace-kept kept.npz
  python -m jkv.show kept.npz

The page needs no network: it shows the text, coloured by how many layers and heads hold each token, at any compaction,
and a map of layers and heads by position.
"""
MOST_RECORDS = 2**16 - 1  # that a page's numbers have room for


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parse(arguments)
    trace = read_trace(options.trace)
    rows = len(trace.prompt_ids)
    if not 1 <= options.row <= rows:
        raise ValueError(f"--row {options.row}: {options.trace} has rows 1 to {rows}")
    page = options.output or options.trace.with_suffix(".html")
    write_whole(page, make_page(trace))
    say(f"{page}: {rows} {'row' if rows == 1 else 'rows'}, {page.stat().st_size / 1e6:.1f} MB; open it in a browser")
    if options.png:
        draw(options.png, trace, options.row - 1)
        say(f"{options.png}: row {options.row}")
    if options.step is not None:
        _print_step(trace, options.row - 1, options.step)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(
        prog="python -m jkv.show",
        description="Shows which tokens the caches of a run have kept, from the file that --trace-kept has saved.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="FILE.npz", help="from jkv.generate --trace-kept")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="the page (default: beside the trace)")
    parser.add_argument("--png", type=Path, metavar="FILE.png", help="draw one row's map as a picture too")
    parser.add_argument("--row", type=int, default=1, metavar="N", help="row of --png and --step (default: 1)")
    parser.add_argument("--step", type=int, metavar="N", help="print the text as held after so many decoded tokens")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    for path in (options.output, options.png):
        if path and not path.parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")
    if options.png and find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib; pip install matplotlib")
    return options


def make_page(trace: Trace) -> str:
    """The page: a template with the trace in it; of each layer, head and token the record at which it was dropped.

    Raises:
        ValueError: the trace has more records than a page can hold.
    """
    if len(trace.steps) > MOST_RECORDS:
        raise ValueError(f"a page holds {MOST_RECORDS} records, and this trace has {len(trace.steps)}")
    rows: list[dict[str, Any]] = []
    for row in range(len(trace.prompt_ids)):
        drops = trace.drops(row).astype("<u2")
        layers, heads, _ = drops.shape
        rows.append(
            {
                "prompt": trace.lengths(row)[0],
                "tokens": trace.tokens(row),
                "layers": layers,
                "heads": heads,
                "births": trace.births(row).tolist(),
                "drops": base64.b64encode(zlib.compress(drops.tobytes(), 9)).decode(),
            }
        )
    data = json.dumps({"policy": trace.policy, "steps": trace.steps.tolist(), "rows": rows}, separators=(",", ":"))
    template = (files("jkv.commands") / "show.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/null", data.replace("<", "\\u003c"))  # the text may hold the end of a script


def draw(path: Path, trace: Trace, row: int) -> None:
    """For how long each layer and head held each token, and below it the share of them that did, by record."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    prompt, _ = trace.lengths(row)
    drops, births = trace.drops(row), trace.births(row)
    count = len(trace.steps)
    life = np.where(births < count, (drops - births) / np.maximum(count - births, 1), np.nan)
    layers, heads, length = life.shape
    figure, (above, below) = plt.subplots(2, figsize=(12, 7), layout="constrained", sharex=True)
    interval = trace.steps[1] if count > 1 else 1
    images = (
        (above, life.reshape(layers * heads, length), layers, "layer", "share of the records since it was there"),
        (below, share_held(trace, row), count * interval, "tokens decoded", "share of layers and heads that hold it"),
    )
    for axis, values, last, label, title in images:
        extent = (0, length, last, 0)
        image = axis.imshow(values, aspect="auto", interpolation="nearest", vmin=0, vmax=1, extent=extent)
        axis.axvline(prompt, color="red", lw=0.8)
        axis.set_ylabel(label)
        figure.colorbar(image, ax=axis, label=title)
    below.set_xlabel("position in the text; the answer begins at the red line")
    above.set_title(trace.policy, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _print_step(trace: Trace, row: int, step: int) -> None:
    """The text of a row as its caches held it: what no layer and head has is a dot."""
    record = int(np.searchsorted(trace.steps, step, side="right")) - 1
    if record < 0:
        raise ValueError(f"--step {step} must be at least 0")
    shares = share_held(trace, row)[record]
    words = [
        piece if share > 0 else "·"
        for piece, share in zip(trace.tokens(row), shares, strict=True)
        if not np.isnan(share)
    ]
    held = shares[~np.isnan(shares)]
    say(f"after {trace.steps[record]} decoded tokens: {np.mean(held > 0):.1%} of {len(held)} tokens are held somewhere")
    sys.stdout.write("".join(words) + "\n")
