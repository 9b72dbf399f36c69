"""How much of the attention of a text lies on the tokens that a policy reads, against the length of the text.

    python -m bench.recall                                       the table and the plot in bench/results
    python -m bench.recall --policies quest:page=8 --budgets 256 --lengths 512 2048 --out /tmp/recall
    python -m bench.recall --model FOLDER --policies specontext:head=DRAFT specontext --text-from-model

The text is read, and its last tokens are fed one by one, under full attention: so the true attention of every query
head in every layer is known, and the hidden states are right whatever a policy does. Each policy meets the same queries
with a store of its own, and its recall is the share of the attention that is on what it lets attention read. A good
choice of few tokens has a high recall; recall says nothing of errors in the keys and values that are read.

Every policy gets a budget that makes it read about as many tokens in a step, in the mean: what ShadowKV and evicting
policies read beyond their budget is taken off it, and SpeContext's recent tokens are a quarter of a small budget.
Fields that are given are left as they are; what was measured, and what was really read, is in the results. A layer
that one of the policies reads whole is left out for all of them.

All lengths of a row end at the same place of the text, and so have the same tokens fed. Results are `recall.md`,
`recall.jsonl` and, with the extra `bench` (matplotlib), `recall.png`.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from bench.machine import describe_machine
from bench.recall_cases import Case, make_cases
from bench.recall_measure import Figures, measure, read_passage
from bench.recall_report import Measured, count_layers, describe_best, draw, format_report, summarise, write_lines
from jkv import cli
from jkv.engine import Request
from jkv.loop import Row, Scheduler
from jkv.policies import Evict, Policy, get_policy
from jkv.sampling import Sampling, seed_words
from pallas_kernels import dispatch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "LICENSE", ROOT / "README.md")
POLICIES = (
    *("quest", "quest@eval", "shadowkv", "specontext", "specontext@previous", "specontext@paper"),
    *("gkv", "snapkv", "streamingllm"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the tables and writes them."""
    options = parse(arguments)
    for name in options.policies:
        get_policy(name)  # a wrong name is known before a model is loaded
    cli.keep_programs()
    llm = jkv.load(options.model, dtype=options.dtype, revision=options.revision, implementation=options.implementation)
    texts, source = read_texts(llm, options)
    cases, left_out = make_cases(llm, options.policies, options.budgets, options.steps)
    counted = count_layers([case.policy for case in cases], llm.checkpoint.config.num_layers)
    lines: list[dict[str, Any]] = []
    for length in options.lengths:
        measured, best = measure_length(llm, cases, texts[:, -length - options.steps :], options)
        for case, figures in zip(cases, measured, strict=True):
            about = Measured(case.name, case.fields, case.budget, length, isinstance(case.policy, Evict))
            lines.append(summarise(about, figures, counted))
        lines += [describe_best(budget, length, mass, counted) for budget, mass in best.items()]
    digest = hashlib.sha256(texts.tobytes()).hexdigest()[:12]
    run = {
        "command": " ".join(["python -m bench.recall", *(sys.argv[1:] if arguments is None else arguments)]),
        "model": describe_model(llm, options.model),
        "text": f"{source}, {options.rows} rows, sha256 of their ids {digest}",
        "steps": options.steps,
        "machine": describe_machine(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_lines(options.out / "recall.jsonl", lines, run)
    drawn = find_spec("matplotlib") is not None
    if drawn:
        draw(lines, options.out / "recall.png")
    else:
        print("no plot: matplotlib is missing; install the extra `bench`", file=sys.stderr)
    report = format_report(lines, run, left_out, plot="recall.png" if drawn else None)
    (options.out / "recall.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = cli.Parser(
        prog="python -m bench.recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_model_options(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        metavar="NAME[:FIELD=VALUE,...]",
        help=f"as in jkv.generate, without their budget; default: {' '.join(POLICIES)}",
    )
    group.add_argument(
        "--budgets",
        nargs="+",
        type=count,
        default=[64, 128, 256, 512],
        metavar="TOKENS",
        help="tokens that a step reads per kv head; one that a policy cannot have is left out; default: 64 128 256 512",
    )
    group.add_argument(
        "--lengths",
        nargs="+",
        type=count,
        default=[512, 1024, 2048, 4096],
        metavar="TOKENS",
        help="tokens of text before the ones that are fed; default: 512 1024 2048 4096",
    )
    group.add_argument(
        "--steps", type=count, default=16, metavar="TOKENS", help="tokens fed one by one; default: %(default)s"
    )
    group = parser.add_argument_group("the text")
    group.add_argument("--rows", type=count, default=4, help="places of the text; default: %(default)s")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--text", type=Path, metavar="FILE", help="default: this project's LICENSE and README.md")
    either.add_argument("--text-from-model", action="store_true", help="a text for each row that the model writes")
    group.add_argument("--seed", type=int, default=0, help="of the text that the model writes; default: %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "bench" / "results",
        metavar="FOLDER",
        help="where the results go; default: bench/results",
    )
    options = parser.parse_args(arguments)
    options.budgets, options.lengths = sorted(set(options.budgets)), sorted(set(options.lengths))
    return options


def count(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def read_texts(llm: jkv.LLM, options: argparse.Namespace) -> tuple[np.ndarray, str]:
    """Token ids int32 `[rows, T]` that end where a row ends, for the longest length, and where they are from.

    Raises:
        ValueError: the text is too short, is no text, or is longer than the model reads.
    """
    size, most = options.lengths[-1] + options.steps, llm.checkpoint.config.max_position
    if size > most:
        raise ValueError(f"--lengths: {options.lengths[-1]} and {options.steps} steps; the model reads {most} tokens")
    if options.text_from_model:
        return draw_texts(llm, options.rows, size, options.seed), f"drawn from the model with seed {options.seed}"
    files = [options.text] if options.text else TEXT
    try:
        ids = llm.encode("\n".join(file.read_text(encoding="utf-8") for file in files), raw=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {options.text} is not UTF-8 ({error})") from None
    needed = options.lengths[-1] + options.rows * options.steps
    if len(ids) < needed:
        raise ValueError(
            f"--text has {len(ids)} tokens; {options.rows} rows of {options.steps} steps after {options.lengths[-1]} "
            f"tokens need {needed}: give a longer text, or fewer"
        )
    ends = np.linspace(size, len(ids), options.rows).astype(int)
    texts = np.stack([np.asarray(ids[end - size : end], np.int32) for end in ends])
    return texts, f"{' and '.join(file.name for file in files)} ({len(ids):,} tokens)"


def draw_texts(llm: jkv.LLM, rows: int, size: int, seed: int) -> np.ndarray:
    """What the model writes at temperature 1 after the token that begins a text, int32 `[rows, size]`."""
    bos = llm.tokenizer.bos_id
    begin = llm.eos_ids[0] if bos is None else bos
    engine = llm.engine(llm.prepare("full"), Sampling(temperature=1.0), max_len=size, max_new=size, max_prompt=1)
    scheduler = Scheduler(
        engine=engine,
        weights=llm.weights,
        programs=llm.programs,
        request=Request(jnp.asarray(seed_words(seed)), jnp.array([-1], jnp.int32)),
        rows=[Row(index, [begin], size - 1) for index in range(rows)],
        slots=rows,
    )
    texts: list[list[int]] = [[begin] for _ in range(rows)]
    for row, tokens in scheduler.run():
        texts[row.id].extend(tokens.tolist())
    return np.asarray(texts, np.int32)


def measure_length(
    llm: jkv.LLM, cases: Sequence[Case], texts: np.ndarray, options: argparse.Namespace
) -> tuple[list[Figures], dict[int, np.ndarray]]:
    """The figures of each case, with the rows along B, and the most that can be had by budget, `[N, L, B, H]`."""
    rows: list[list[Figures]] = []
    best: dict[int, list[np.ndarray]] = {case.budget: [] for case in cases}
    implementation = dispatch.choose(llm.implementation, jax.devices()[0], llm.dtype)
    for row in range(len(texts)):  # one by one, so that memory does not grow with the rows
        start = time.perf_counter()
        passage = read_passage(llm.decoder, texts[row : row + 1], options.steps, implementation=implementation)
        done: dict[Policy, Figures] = {}
        for case in cases:
            if case.policy not in done:
                done[case.policy] = measure(case.policy, passage, case.brought)
        rows.append([done[case.policy] for case in cases])
        for budget, masses in best.items():
            masses.append(passage.find_best(budget))
        length, seconds = texts.shape[1] - options.steps, time.perf_counter() - start
        print(f"{length:,} tokens, row {row + 1} of {len(texts)}: {seconds:.0f} s", file=sys.stderr, flush=True)
    joined = [
        Figures(*(np.concatenate(x, axis=2) for x in zip(*case, strict=True))) for case in zip(*rows, strict=True)
    ]
    return joined, {budget: np.concatenate(masses, axis=2) for budget, masses in best.items()}


def describe_model(llm: jkv.LLM, name: str | None) -> str:
    """Its name and sizes."""
    c = llm.checkpoint.config
    heads = f"{c.num_heads} query heads and {c.num_kv_heads} kv heads of {c.head_dim}"
    return f"{name or 'the embedded model'} ({c.num_layers} layers, {heads}) in {llm.dtype}"


if __name__ == "__main__":
    sys.exit(cli.run(main))
