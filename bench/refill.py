"""What refilling slots is worth: rows of mixed output lengths through slots that refill, and in fixed batches.

    python -m bench.refill                       64 rows of 64 tokens in the mean through 8 slots
    python -m bench.refill --rows 32 --slots 4   other sizes

Both decode the same rows with the same programs, and take turns; the tokens have to be the same. Lengths are drawn from
a log-normal distribution whose coefficient of variation is 0.6, about that of answers to AIME problems.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from bench.cpu_decode import format_markdown, write_results
from jkv.engine import Request
from jkv.loop import Row, Scheduler
from jkv.sampling import Sampling, seed_words

VARIATION = 0.6  # standard deviation of output lengths over their mean
PROMPTS = (16, 128)  # shortest and longest prompt, tokens


def main() -> None:
    """Measures and prints the table, and writes it to `bench/results`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as in jkv.generate; default: the embedded model")
    parser.add_argument("--policies", nargs="+", default=["full", "gkv:budget=128"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="new tokens of a row, in the mean")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    llm = jkv.load(options.model)
    rows = draw_rows(llm, options.rows, options.new)
    table = [measure_policy(llm, policy, rows, options.slots, options.rounds) for policy in options.policies]
    print(format_markdown(table))
    if not options.no_write:
        write_results("refill", table, vars(options))


def draw_rows(llm: jkv.LLM, count: int, mean: int) -> list[Row]:
    """Rows of random tokens, with prompts and outputs of many lengths."""
    rng, spread = np.random.default_rng(0), np.log1p(VARIATION**2)
    limits = np.maximum(1, np.round(rng.lognormal(np.log(mean) - spread / 2, np.sqrt(spread), count))).astype(int)
    lengths = rng.integers(PROMPTS[0], PROMPTS[1] + 1, count)
    vocab = llm.checkpoint.config.vocab_size
    return [
        Row(i, rng.integers(16, vocab, n).tolist(), int(limit))
        for i, (n, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def measure_policy(llm: jkv.LLM, policy: str, rows: Sequence[Row], slots: int, rounds: int) -> dict[str, Any]:
    """The quickest of some rounds of both ways, after one that compiles; prompts are read inside the time."""
    longest = max(row.limit for row in rows)
    engine = llm.engine(
        llm.prepare(policy), Sampling(), max_len=PROMPTS[1] + longest, max_new=longest, max_prompt=PROMPTS[1]
    )
    request = Request(jnp.asarray(seed_words(0)), jnp.full((8,), -1, jnp.int32))

    def decode(batches: Iterable[Sequence[Row]]) -> tuple[float, dict[int, list[int]]]:
        drawn: dict[int, list[int]] = {row.id: [] for row in rows}
        start = time.perf_counter()
        for batch in batches:
            for row, tokens in Scheduler(engine, llm.weights, llm.programs, request, batch, slots).run():
                drawn[row.id].extend(tokens.tolist())
        return time.perf_counter() - start, drawn

    ways = {"refilled": [rows], "fixed": [rows[i : i + slots] for i in range(0, len(rows), slots)]}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    answers = {}
    for _ in range(rounds + 1):
        for way, batches in ways.items():
            took, answers[way] = decode(batches)
            seconds[way].append(took)
    if answers["refilled"] != answers["fixed"]:
        raise SystemExit(f"{policy}: a row's tokens depend on the rows beside it")
    tokens = sum(row.limit for row in rows)
    best = {way: min(took[1:]) for way, took in seconds.items()}
    return {
        "policy": policy,
        "rows": len(rows),
        "slots": slots,
        "new tokens": tokens,
        "fixed tok/s": round(tokens / best["fixed"], 1),
        "refilled tok/s": round(tokens / best["refilled"], 1),
        "ratio": round(best["fixed"] / best["refilled"], 2),
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
