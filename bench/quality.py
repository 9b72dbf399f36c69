"""What each policy costs at equal budgets: divergence from full attention along a text, and passkeys remembered.

    python -m bench.quality                                      the tables and the plot in bench/results
    python -m bench.quality --text book.txt --budgets 128 --policies gkv snapkv:pool=1 --out /tmp/quality

A row is written as soon as it is measured, and a run that was stopped goes on. The text is what the model writes by
itself under full attention (or a file); `random` and the oracle, which sees the next interval's attention, are the ends
of the scale. Passkeys are asked for with the question seen, and not seen, when the policy cuts the text. Results are
`quality.jsonl`, `quality.md` and, with the extra `bench` (matplotlib), `quality.png`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jkv
from bench.machine import describe_machine
from bench.plot import draw
from bench.recall import count, describe_model
from jkv import cli
from jkv.commands.compare import describe_comparison
from jkv.comparison import compare, format_mean, mean_and_error
from jkv.jsonl import read_answers, write_whole
from jkv.passages import read_passages, write_passages
from jkv.passkey import VARIANTS, make_cases, score_passkeys
from jkv.policies import get_policy

ROOT = Path(__file__).parent.parent
POLICIES = (
    *("gkv", "gkv:pool=7", "rkv", "rkv:pool=1", "snapkv", "snapkv:pool=1", "snapkv@gkv"),
    *("h2o", "streamingllm", "knorm"),
)
# Of a row: title, key, and how it is written.
COLUMNS = (
    *(("KL", "kl", ".4f"), ("delta NLL", "delta_nll", "+.4f"), ("same top token", "agrees", ".1%")),
    *((f"digits, {variant}", f"{variant}_digits", ".1%") for variant in VARIANTS),
    *((f"key nll, {variant}", f"{variant}_nll", ".3f") for variant in VARIANTS),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, and writes the tables and the plot of all there is."""
    options = parse(arguments)
    cli.keep_programs()
    llm = jkv.load(options.model, dtype=options.dtype, revision=options.revision, implementation=options.implementation)
    about = {
        "model": describe_model(llm, options.model),
        "text": options.text.name if options.text else f"written by the model, seed {options.seed}",
        "sizes": [options.sequences, options.length, options.prompt_tokens, options.passkeys, options.passkey_length],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "quality.jsonl"
    rows = read_answers(path) if path.is_file() else []
    if any(row["about"] != about for row in rows):
        raise ValueError(f"{path} holds rows of another model, text or size; give another --out, or remove it")
    done = {(row["budget"], row["name"]) for row in rows}
    with path.open("a", encoding="utf-8") as file:
        for row in measure(llm, options, done):
            rows.append({**row, "about": about})
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    plot = options.out / "quality.png" if find_spec("matplotlib") else None
    if plot:
        draw(plot, rows, ("kl", *(f"{variant}_digits" for variant in VARIANTS)))
    report = format_report(rows, about, plot)
    write_whole(options.out / "quality.md", report)
    print(report)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = cli.Parser(
        prog="python -m bench.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_model_options(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY", help="without their budget")
    group.add_argument("--budgets", nargs="+", type=count, default=[64, 128, 256, 512], metavar="TOKENS")
    group.add_argument("--text", type=Path, metavar="FILE", help="plain text; default: what the model writes by itself")
    group.add_argument("--seed", type=int, default=0, help="of what the model writes by itself")
    group.add_argument("--sequences", type=count, default=8, help="texts; default: %(default)s")
    group.add_argument("--length", type=count, default=768, help="tokens of each; default: %(default)s")
    group.add_argument("--prompt-tokens", type=count, default=128, help="read as the prompt; default: %(default)s")
    group.add_argument("--passkeys", type=count, default=24, help="texts with a passkey; default: %(default)s")
    group.add_argument("--passkey-length", type=count, default=640, help="tokens of each; default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    for budget in options.budgets:
        for name in options.policies:
            get_policy(with_budget(name, budget))
    if options.text and not options.text.is_file():
        raise ValueError(f"--text {options.text}: there is no such file")
    return options


def with_budget(name: str, budget: int) -> str:
    """A policy's text form with a budget."""
    return f"{name}{',' if ':' in name else ':'}budget={budget}"


def measure(llm: jkv.LLM, options: argparse.Namespace, done: set[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    """A row for each budget and policy that is not done, and for the bounds of each budget."""
    sizes = {"count": options.sequences, "length": options.length}
    texts = (
        read_passages(llm, options.text, **sizes) if options.text else write_passages(llm, seed=options.seed, **sizes)
    )
    cases = make_cases(llm, count=options.passkeys, length=options.passkey_length)
    if (0, "full") not in done:
        yield {"name": "full", "budget": 0, **remember(llm, "full", cases)}
    for budget in options.budgets:
        missing = {with_budget(name, budget): name for name in options.policies if (budget, name) not in done}
        if not missing:
            continue
        bounds = (budget, "oracle") not in done
        _say(f"{budget} tokens: {len(missing)} policies along the text")
        found = compare(llm, texts, list(missing), prompt=options.prompt_tokens, oracle=bounds)
        for each in sorted(found, key=lambda each: each.name in missing):  # the bounds first
            name = missing.get(each.name, each.name.partition(":")[0])
            if (budget, name) in done:
                continue
            if name != "oracle":
                _say(f"{each.name}: passkeys")
            keys = {} if name == "oracle" else remember(llm, each.name, cases)
            yield {"name": name, "budget": budget, **describe_comparison(each, [each]), **keys}


def remember(llm: jkv.LLM, policy: str, cases: Sequence[Any]) -> dict[str, float | None]:
    """Shares of digits remembered and their likelihood, by variant."""
    values: dict[str, float | None] = {}
    for variant in VARIANTS:
        found = score_passkeys(llm, policy, cases, variant)
        for name in ("digits", "whole", "nll"):
            mean, error = mean_and_error(getattr(found, name))
            values |= {f"{variant}_{name}": mean, f"{variant}_{name}_error": error}
    return values


def place_on_scale(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """How far a row's KL is on the way from random (0) to the oracle (1) of its budget."""
    ends = {other["name"]: other["kl"] for other in rows if other["budget"] == row["budget"] and "kl" in other}
    if "kl" not in row or not {"random", "oracle"} <= ends.keys():
        return None
    return (ends["random"] - row["kl"]) / (ends["random"] - ends["oracle"])


def format_report(rows: Sequence[dict[str, Any]], about: dict[str, Any], plot: Path | None) -> str:
    """The tables, as Markdown."""
    sequences, length, prompt, passkeys, passkey_length = about["sizes"]
    lines = [
        "# What policies cost at equal budgets",
        "",
        f"Model: {about['model']}. Text: {about['text']}; {sequences} texts of {length} tokens, {prompt} of them the "
        f"prompt. Passkeys: {passkeys} texts of {passkey_length} tokens. Means over texts ± standard error; KL in "
        "nats, to full attention on the same text, through the decode path. On the scale, 0 is random tokens and 1 the "
        "oracle, which knows what the next interval attends to. Made by `python -m bench.quality`.",
        *(["", f"![quality by budget]({plot.name})"] if plot else []),
    ]
    for budget in sorted({row["budget"] for row in rows if row["budget"]}):
        there = [row for row in rows if row["budget"] in (0, budget)]
        titles = ["policy", *(title for title, *_ in COLUMNS), "scale"]
        lines += ["", f"## {budget} tokens", "", f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
        for row in sorted(there, key=lambda row: row.get("kl", 0.0)):
            scale = place_on_scale(row, rows)
            cells = [format_mean(row[key], row[f"{key}_error"], form) if key in row else "" for _, key, form in COLUMNS]
            lines.append(f"| {row['name']} | {' | '.join(cells)} | {'' if scale is None else f'{scale:.2f}'} |")
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    return "\n".join([*lines, "", f"Measured on: {machine}.", ""])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
