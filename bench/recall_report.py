"""What `bench.recall` makes of its figures: lines of numbers, tables, sentences and a plot."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from bench.cpu_decode import format_markdown
from bench.recall_measure import RECENT, SINKS, Figures
from jkv.policies import Policy
from jkv.policies.full import Full

BEST = "best tokens"
COLUMNS = f"""\
- recall: share of the attention that lies on what is read, in the mean over layers, query heads, tokens and rows, with
  its standard error over the rows, which is too small where rows of one text overlap; a tenth of the layers lie below
  `lowest layers`.
- possible: the recall of as many tokens, had they been the best ones in each layer and step. Where query heads share
  what they read, so do these.
- middle: share that is read of the attention to what is neither among the first {SINKS} nor the last {RECENT} tokens.
- tokens: read per kv head and layer, in the mean; with a choice for each query head, also how many one attends to.
"""
BLIND = "streamingllm"  # reads the first and the last tokens, whatever the query


class Measured(NamedTuple):
    """What figures are of: a policy's name, all its text, the budget, tokens of the text, and whether it evicts."""

    policy: str
    fields: str
    budget: int
    length: int
    evicts: bool


def count_layers(policies: Iterable[Policy], layers: int) -> np.ndarray:
    """The layers that no policy reads whole, unless it reads them all so."""
    counted = np.ones(layers, bool)
    for policy in policies:
        full = np.array([isinstance(policy.at(index, layers), Full) for index in range(layers)])
        if not full.all():
            counted &= ~full
    return np.flatnonzero(counted)


def summarise(about: Measured, figures: Figures, counted: np.ndarray) -> dict[str, Any]:
    """A line of the results; the figures are `[N, L, B, ...]`."""
    chosen = Figures(*(np.asarray(x, np.float64)[:, counted] for x in figures))
    return {
        **about._asdict(),
        **_spread(np.mean(figures.recall, axis=-1), counted),
        "possible": float(chosen.best.mean()),
        "middle": float(chosen.middle.sum() / max(chosen.all_middle.sum(), 1e-30)),
        "tokens": float(chosen.tokens.mean()),
        "attended": float(chosen.attended.mean()),
    }


def describe_best(budget: int, length: int, mass: np.ndarray, counted: np.ndarray) -> dict[str, Any]:
    """A line for the most that `budget` tokens of a kv head can have, `[N, L, B, H]`."""
    found = _spread(mass, counted)
    about = Measured(BEST, "", budget, length, evicts=False)._asdict()
    return {**about, **found, "possible": found["recall"], "middle": None, "tokens": budget, "attended": budget}


def _spread(recall: np.ndarray, counted: np.ndarray) -> dict[str, Any]:
    """Mean of `[N, L, B, H]` over the layers that count, and how it spreads."""
    of_layer, of_row = recall.mean(axis=(0, 2, 3)), recall[:, counted].mean(axis=(0, 1, 3))
    error = float(np.std(of_row, ddof=1) / len(of_row) ** 0.5) if len(of_row) > 1 else None
    return {
        "recall": float(of_row.mean()),
        "error": error,
        "lowest": float(np.percentile(of_layer[counted], 10)),
        "layers": counted.tolist(),
        "of_layer": of_layer.round(6).tolist(),
        "of_row": of_row.round(6).tolist(),
    }


def write_lines(path: Path, lines: Sequence[dict[str, Any]], run: dict[str, Any]) -> None:
    """Writes a JSON object a line, each with what it was measured with."""
    text = "".join(json.dumps({**line, **run}) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def format_report(
    lines: Sequence[dict[str, Any]], run: dict[str, Any], left_out: Sequence[str], plot: str | None
) -> str:
    """The whole report in Markdown."""
    machine = ", ".join(f"{key} {value}" for key, value in run["machine"].items())
    whole, layers = len(lines[0]["of_layer"]), len(lines[0]["layers"])
    parts = [
        "# Attention on what is read",
        f"`{run['command']}`: {run['model']}, {run['steps']} tokens fed one by one. Text: {run['text']}. "
        f"{layers} of {whole} layers count: none of the policies reads those whole.",
        f"Measured on: {machine}.",
        _list(find_sentences(lines)),
    ]
    if plot:
        parts.append(f"![Recall against the length of the text]({plot})")
    parts.append(COLUMNS.rstrip())
    for budget in sorted({line["budget"] for line in lines}):
        chosen = [line for line in lines if line["budget"] == budget]
        parts += [f"## Budget {budget}", format_markdown(_tabulate(chosen)), _name_fields(chosen)]
    if left_out:
        parts += ["## Left out", _list(left_out)]
    return "\n\n".join(parts) + "\n"


def _list(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _tabulate(lines: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    order = list(dict.fromkeys(line["policy"] for line in lines))
    return [
        {
            "policy": line["policy"],
            "text": f"{line['length']:,}",
            "recall": f"{line['recall']:.3f}" + ("" if line["error"] is None else f" ± {line['error']:.3f}"),
            "lowest layers": f"{line['lowest']:.3f}",
            "possible": f"{line['possible']:.3f}",
            "middle": "" if line["middle"] is None else f"{line['middle']:.3f}",
            "tokens": f"{line['tokens']:.1f}"
            + (f" ({line['attended']:.1f})" if line["tokens"] - line["attended"] > 0.05 else ""),
        }
        for line in sorted(lines, key=lambda line: (order.index(line["policy"]), line["length"]))
    ]


def _name_fields(lines: Sequence[dict[str, Any]]) -> str:
    return "Measured: " + ", ".join(dict.fromkeys(f"`{line['fields']}`" for line in lines if line["fields"])) + "."


def find_sentences(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What the figures show, in words."""
    policies = [line for line in lines if line["policy"] != BEST]
    lengths = sorted({line["length"] for line in policies})
    last = [line for line in policies if line["length"] == lengths[-1]]
    said = []
    if kept := [line for line in last if not line["evicts"]]:
        said.append(f"Of the policies that keep the whole text, {lengths[-1]:,} tokens, {_name_leaders(kept)}.")
    if evicting := [line for line in last if line["evicts"]]:
        said.append(
            f"Of those that evict, {_name_leaders(evicting)}. What they keep was chosen by the queries right before "
            "the tokens that are fed, which flatters them: more `--steps` tell how long it lasts."
        )
    said += _compare(policies, lengths[0], lengths[-1])
    leader = max(last, key=lambda line: line["middle"])
    if leader["middle"]:
        said.append(
            f"Of the attention to the middle of {lengths[-1]:,} tokens, {leader['policy']} reads the most, "
            f"{leader['middle']:.0%} at a budget of {leader['budget']}."
        )
    return said


def _compare(lines: Sequence[dict[str, Any]], shortest: int, longest: int) -> list[str]:
    """Sentences on means over the budgets that all policies have."""
    names = list(dict.fromkeys(line["policy"] for line in lines))
    budgets = {line["budget"] for line in lines}
    for name in names:
        budgets &= {line["budget"] for line in lines if line["policy"] == name}
    if not budgets or len(names) == 1:
        return []

    def mean(name: str, length: int) -> np.ndarray:  # of each row
        found = (x for x in lines if x["policy"] == name and x["length"] == length and x["budget"] in budgets)
        return np.mean([line["of_row"] for line in found], axis=0)

    count = "budgets" if len(budgets) > 1 else "the budget"
    said, over = [], f"in the mean over {count} of {_join([str(budget) for budget in sorted(budgets)])}"
    if BLIND in names and len(lines[0]["of_row"]) > 1:
        blind = mean(BLIND, longest)
        below = [name for name in names if _is_above(blind - mean(name, longest))] or ["no policy"]
        said.append(
            f"Less attention than the first and last tokens alone have ({BLIND}, {blind.mean():.0%}) is on what is "
            f"read by {_join(below)}, {over}, as far as {len(blind)} rows can tell (paired t-test, 97.5%)."
        )
    if shortest < longest:
        fall = {name: float(np.mean(mean(name, shortest) - mean(name, longest))) for name in names}
        least, most = min(names, key=lambda name: fall[name]), max(names, key=lambda name: fall[name])
        said.append(
            f"From {shortest:,} to {longest:,} tokens recall falls least with {least}, by {100 * fall[least]:.0f} "
            f"points, and most with {most}, by {100 * fall[most]:.0f}, {over}."
        )
    return said


def _is_above(difference: np.ndarray) -> bool:
    """Whether the mean of the rows' differences is above 0, by a one-sided t-test; policies meet the same tokens."""
    error = np.std(difference, ddof=1) / len(difference) ** 0.5
    return bool(difference.mean() > stats.t.ppf(0.975, len(difference) - 1) * error)


def _name_leaders(lines: Sequence[dict[str, Any]]) -> str:
    budgets = sorted({line["budget"] for line in lines})
    best = [max((x for x in lines if x["budget"] == budget), key=lambda line: line["recall"]) for budget in budgets]
    each = [f"{x['policy']} at {x['budget']} ({x['recall']:.0%} where {x['possible']:.0%} is possible)" for x in best]
    return f"the most attention is on what is read by {_join(each)}"


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


# Okabe and Ito's colours without black and yellow, and three of Tol's: told apart with any colour vision, with markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255", "#777777")
MARKERS = "osD^vPhp8<>"


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws recall against the length of the text, a panel for each budget."""
    from matplotlib.figure import Figure  # an extra that nothing else needs

    budgets, lengths = (sorted({line[key] for line in lines}) for key in ("budget", "length"))
    columns = min(len(budgets), 2)
    rows = -(-len(budgets) // columns)
    figure = Figure(figsize=(5.4 * columns, 4 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    handles = {}
    for index, name in enumerate(dict.fromkeys(line["policy"] for line in lines)):
        for panel, budget in zip(panels, budgets, strict=False):
            found = [line for line in lines if line["policy"] == name and line["budget"] == budget]
            if found:
                found.sort(key=lambda line: line["length"])
                label = f"{name} (evicts)" if found[0]["evicts"] else name
                handles[label] = panel.errorbar(
                    [line["length"] for line in found],
                    [line["recall"] for line in found],
                    yerr=[line["error"] or 0.0 for line in found],
                    elinewidth=0.8,
                    **_style(index, best=name == BEST, evicts=found[0]["evicts"]),
                )
    for panel, budget in zip(panels, budgets, strict=False):
        panel.set_title(f"about {budget} tokens read")
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.minorticks_off()
        panel.set_ylim(top=1.02)
        panel.grid(alpha=0.3)
        panel.set_xlabel("tokens of the text")
    for panel in panels[::columns]:
        panel.set_ylabel("share of attention on what is read")
    for panel in panels[len(budgets) :]:
        panel.remove()
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2 * columns, fontsize=9)
    figure.savefig(path, dpi=150)


def _style(index: int, *, best: bool, evicts: bool) -> dict[str, Any]:
    if best:
        return {"color": "black", "linestyle": "--", "linewidth": 1.6}
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 6,
        "markerfacecolor": "white" if evicts else None,
        "linestyle": ":" if evicts else "-",
        "linewidth": 1.4,
    }
