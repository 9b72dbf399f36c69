"""``python -m jkv.compare``: what policies do to a model's predictions, beside full attention on the same text."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from jkv import cli
from jkv.api import load
from jkv.comparison import Comparison, compare, format_mean, mean_and_error, share_of_way
from jkv.jsonl import write_whole
from jkv.oracle import Oracle
from jkv.passages import read_passages, write_passages
from jkv.policies import describe, get_policy

EXAMPLES = """examples:
  python -m jkv.compare gkv:budget=128 snapkv:budget=128 streamingllm:budget=128
  python -m jkv.compare gkv:budget=256 --oracle --text book.txt --output kl.jsonl --plot kl.png
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parse(arguments)
    cli.keep_programs()
    llm = load(options.model, dtype=options.dtype, revision=options.revision, implementation=options.implementation)
    size = {"count": options.sequences, "length": options.length}
    if options.text:
        texts = read_passages(llm, options.text, **size)
    else:
        _say("text: what the model writes by itself, kept for the next time; --text FILE takes another")
        texts = write_passages(llm, **size, seed=options.seed)
    _say(
        f"model: {llm.checkpoint.name}, {llm.dtype}; {len(texts)} texts of {options.length} tokens, the first "
        f"{options.prompt_tokens} of each as the prompt"
    )
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=options.length - options.prompt_tokens)
        found = compare(
            llm,
            texts,
            options.policies,
            prompt=options.prompt_tokens,
            greedy=options.greedy,
            oracle=options.oracle,
            progress=lambda tokens: progress.update(task, completed=tokens),
        )
    lines = [describe_comparison(each, found) for each in found]
    if options.json:
        print(json.dumps({"model": llm.checkpoint.name, "policies": lines}))
    else:
        # Wide enough not to cut names where the output is no terminal.
        Console(width=max(Console().width, 140)).print(make_table(lines))
    if options.output:
        write_lines(options.output, found, lines)
    if options.plot:
        draw(options.plot, found, options.prompt_tokens)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(
        prog="python -m jkv.compare",
        description="Feeds the same text to full attention and to policies, through the decode path, and tells how far "
        "their predictions of the next token are apart.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("policies", nargs="+", metavar="POLICY", help="as for jkv.generate: gkv:budget=128, ...")
    cli.add_model_options(parser)
    text = parser.add_argument_group("text")
    text.add_argument("--text", type=Path, metavar="FILE", help="plain text; default: what the model writes by itself")
    text.add_argument("--sequences", type=int, default=8, metavar="N", help="texts (default: %(default)s)")
    text.add_argument("--length", type=int, default=768, metavar="N", help="tokens of each (default: %(default)s)")
    text.add_argument(
        "--prompt-tokens", type=int, default=128, metavar="N", help="tokens read as the prompt (default: %(default)s)"
    )
    text.add_argument("--seed", type=int, default=0, help="of what the model writes by itself")
    what = parser.add_argument_group("comparison")
    what.add_argument(
        "--greedy",
        type=int,
        default=192,
        metavar="N",
        help="tokens to decode greedily, to see when policies part from full attention; 0 is none (default: 192)",
    )
    what.add_argument(
        "--oracle",
        action="store_true",
        help="place each evicting policy between random tokens (0) and those that the next tokens attend to most (1)",
    )
    show = parser.add_argument_group("output")
    show.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    show.add_argument("--output", type=Path, metavar="FILE.jsonl", help="a line for each policy and text")
    show.add_argument("--plot", type=Path, metavar="FILE", help="draw KL along the text (.png, .svg, .pdf)")
    show.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    for name in options.policies:
        get_policy(name)
    if options.sequences < 1 or options.prompt_tokens < 1 or options.greedy < 0:
        raise ValueError("--sequences and --prompt-tokens must be at least 1, and --greedy at least 0")
    if options.length < options.prompt_tokens + 2:
        raise ValueError(
            f"--length {options.length} leaves nothing to compare after --prompt-tokens {options.prompt_tokens}"
        )
    if options.text and not options.text.is_file():
        raise ValueError(f"--text {options.text}: there is no such file")
    for path in (options.output, options.plot):
        if path and not path.parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")
    if options.plot and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install matplotlib")
    return options


def describe_comparison(found: Comparison, others: Sequence[Comparison]) -> dict[str, Any]:
    """The means of a comparison, with standard errors over the texts."""
    (kl, kl_error), (nll, nll_error) = mean_and_error(found.kl), mean_and_error(found.delta_nll)
    agrees, agrees_error = mean_and_error(found.agrees)
    return {
        "policy": found.name,
        "fields": dict(describe(found.policy)),
        "texts": len(found.kl),
        "tokens": int(np.sum(~np.isnan(found.kl))),
        "kl": kl,
        "kl_error": kl_error,
        "delta_nll": nll,
        "delta_nll_error": nll_error,
        "agrees": agrees,
        "agrees_error": agrees_error,
        "diverges": None if found.diverges is None else found.diverges.tolist(),
        "share_of_way": None if isinstance(found.policy, Oracle) else share_of_way(found, others),
    }


def make_table(lines: Sequence[dict[str, Any]]) -> Table:
    """The summary for people."""
    table = Table(box=SIMPLE_HEAD, caption="means over texts ± standard error; KL in nats, to full attention")
    table.add_column("policy", no_wrap=True)
    titles = ["KL", "delta NLL", "same top token"]
    titles += ["greedy parts at"] if any(line["diverges"] for line in lines) else []
    titles += ["random 0 to oracle 1"] if any(line["share_of_way"] is not None for line in lines) else []
    for title in titles:
        table.add_column(title, justify="right")
    for line in lines:
        cells = [
            format_mean(line[name], line[f"{name}_error"], form)
            for name, form in (("kl", ".4f"), ("delta_nll", "+.4f"), ("agrees", ".1%"))
        ]
        if "greedy parts at" in titles:
            cells.append("" if line["diverges"] is None else f"{np.mean(line['diverges']):.1f}")
        if "random 0 to oracle 1" in titles:
            cells.append("" if line["share_of_way"] is None else f"{line['share_of_way']:.2f}")
        table.add_row(line["policy"], *cells)
    return table


def write_lines(path: Path, found: Sequence[Comparison], lines: Sequence[dict[str, Any]]) -> None:
    """A line for each policy, and one for each of its texts, token by token; the file is there whole or not at all."""
    written: list[dict[str, Any]] = []
    for comparison, line in zip(found, lines, strict=True):
        written.append(line)
        for index, (kl, nll, agrees) in enumerate(
            zip(comparison.kl, comparison.delta_nll, comparison.agrees, strict=True)
        ):
            there = ~np.isnan(kl)
            parts = {"kl": kl, "delta_nll": nll, "agrees": agrees}
            values = {name: [float(f"{x:.6g}") for x in part[there]] for name, part in parts.items()}
            written.append({"policy": comparison.name, "text": index, **values})
    write_whole(path, "".join(json.dumps(line) + "\n" for line in written))


def draw(path: Path, found: Sequence[Comparison], prompt: int) -> None:
    """KL along the text, the mean over texts and 16 neighbouring tokens, one line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    window = 16
    for comparison in found:
        kl = np.nanmean(comparison.kl, axis=0)
        count = len(kl) // window * window
        if not count:
            window, count = 1, len(kl)
        smooth = kl[:count].reshape(-1, window).mean(axis=1)
        position = prompt + window * (np.arange(len(smooth)) + 0.5)
        bound = isinstance(comparison.policy, Oracle)
        axis.plot(position, smooth, ls="--" if bound else "-", lw=1.2, label=comparison.name)
    axis.set(xlabel="position in the text, tokens", ylabel="KL to full attention, nats")
    axis.set_yscale("symlog", linthresh=1e-3)
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
