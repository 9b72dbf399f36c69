"""Decoding on CPU beside transformers: the same weights, prompt and threads, in one run.

    python -m bench.cpu_decode                        the table: batch 1, 4 and 16, prompt 128, 256 new tokens
    python -m bench.cpu_decode --flat 4096            time of a step against the length of the text

Rounds of the peers alternate and the best round of each counts, because other work disturbs the machine; only ratios
within one run mean anything. Needs the `parity` extra (torch) for transformers' side.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from bench.machine import describe_machine
from jkv.engine import Request
from jkv.loop import Row, Scheduler
from jkv.sampling import Sampling, seed_words

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measures and prints the table, and writes it to `bench/results`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as in jkv.generate; default: the embedded model")
    parser.add_argument("--policies", nargs="+", default=["full", "gkv:budget=128"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=256, help="new tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--flat", type=int, metavar="TOKENS", help="measure the step time up to so many new tokens")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    llm = jkv.load(options.model, dtype="float32")
    rows = measure_steps(llm, options) if options.flat else measure_table(llm, options)
    print(format_markdown(rows))
    if not options.no_write:
        write_results("cpu_steps" if options.flat else "cpu_decode", rows, vars(options))


def measure_table(llm: jkv.LLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of every policy and of transformers, for every batch size."""
    peers: dict[str, Callable[[np.ndarray, int], tuple[float, float]]] = {
        f"transformers {version('transformers')} ({cache})": transformers_runner(llm, cache)
        for cache in ("dynamic", "static")
    }
    for policy in options.policies:
        peers[policy] = jkv_runner(llm, policy)
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        prompt = random_prompt(llm, batch, options.prompt)
        best: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for name, run in peers.items():
                seconds = run(prompt, options.new)
                best[name] = [min(pair) for pair in zip(seconds, best.get(name, seconds), strict=True)]
        reference = [name for name in peers if name.startswith("transformers")]
        decode = min(best[name][1] for name in reference)
        prefill = min(best[name][0] for name in reference)
        for name, (first, rest) in best.items():
            rows.append(
                {
                    "batch": batch,
                    "peer": name,
                    "prefill s": round(first, 3),
                    "decode tok/s": round(batch * (options.new - 1) / rest, 1),
                    "decode ratio": round(decode / rest, 2),
                    "prefill ratio": round(prefill / first, 2),
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_steps(llm: jkv.LLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds a step, averaged over intervals of 128 tokens, as the text grows; the policies take turns."""
    batch, width = options.batch[0], 128
    runs = {}
    for policy in options.policies:
        running = start(llm, policy, random_prompt(llm, batch, options.prompt), options.flat)
        next(running)
        runs[policy] = running
    marks: dict[str, list[float]] = {policy: [] for policy in runs}
    for _ in range(options.flat // width):
        for policy, running in runs.items():
            begin, count = time.perf_counter(), 0
            while count < width:
                tokens = next(running, None)
                if tokens is None:
                    break
                count += len(tokens)
            if count:
                marks[policy].append((time.perf_counter() - begin) * 1e3 / count)
    rows = []
    for index in range(1, min(map(len, marks.values()))):  # the first interval has the compiling in it
        tokens = options.prompt + (index + 1) * width
        rows.append({"tokens": tokens, **{p: round(times[index], 2) for p, times in marks.items()}})
    return rows


def jkv_runner(llm: jkv.LLM, policy: str) -> Callable[[np.ndarray, int], tuple[float, float]]:
    """Runs ours: seconds of prefill and of decoding, compiling left out."""

    def run(prompt: np.ndarray, new: int) -> tuple[float, float]:
        scheduler = make_scheduler(llm, policy, prompt, new)
        for _ in scheduler.run():
            pass
        return scheduler.prefill_seconds, scheduler.decode_seconds

    return run


def start(llm: jkv.LLM, policy: str, prompt: np.ndarray, new: int) -> Any:
    """What the first row of a run draws, block by block; the run has not begun."""
    drawn = make_scheduler(llm, policy, prompt, new).run()
    return (tokens for row, tokens in drawn if row.id == 0)


def make_scheduler(llm: jkv.LLM, policy: str, prompt: np.ndarray, new: int) -> Scheduler:
    """Decodes `new` tokens whatever it draws."""
    longest = prompt.shape[1]
    engine = llm.engine(llm.prepare(policy), Sampling(), max_len=longest + new, max_new=new, max_prompt=longest)
    return Scheduler(
        engine=engine,
        weights=llm.weights,
        programs=llm.programs,
        request=Request(jnp.asarray(seed_words(0)), jnp.full((8,), -1, jnp.int32)),
        rows=[Row(index, tokens, new) for index, tokens in enumerate(prompt.tolist())],
        slots=len(prompt),
    )


def transformers_runner(llm: jkv.LLM, cache: str) -> Callable[[np.ndarray, int], tuple[float, float]]:
    """Runs transformers' `generate` on the same weights; prefill is a run of one new token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config, tensors = llm.checkpoint.config, llm.checkpoint.tensors
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            max_position_embeddings=config.max_position,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    weights = {name: torch.from_numpy(np.array(tensors.read(name), np.float32)) for name in tensors.names()}
    model.load_state_dict(weights, strict=False)

    def generate(prompt: np.ndarray, new: int) -> float:
        ids = torch.from_numpy(prompt.astype(np.int64))
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                cache_implementation=None if cache == "dynamic" else cache,
            )
        assert out.shape[1] == prompt.shape[1] + new
        return time.perf_counter() - begin

    def run(prompt: np.ndarray, new: int) -> tuple[float, float]:
        first = generate(prompt, 1)
        return first, generate(prompt, new) - first

    return run


def random_prompt(llm: jkv.LLM, batch: int, length: int) -> np.ndarray:
    """Random token ids, int32 `[B, T]`."""
    return np.random.default_rng(0).integers(16, llm.checkpoint.config.vocab_size, (batch, length), np.int32)


def format_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([row[key] for key in head] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_results(name: str, rows: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
    """Writes JSON and Markdown with the machine they were measured on."""
    RESULTS.mkdir(exist_ok=True)
    machine = describe_machine()
    record = {"machine": machine, "options": options, "rows": list(rows)}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    about = ", ".join(f"{key} {value}" for key, value in machine.items())
    (RESULTS / f"{name}.md").write_text(f"Measured on: {about}.\n\n{format_markdown(rows)}\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
