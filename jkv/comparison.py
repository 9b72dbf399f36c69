"""Policies against full attention on the same text: how far their next-token distributions are from its own."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.api import LLM
from jkv.oracle import Oracle, Witness, foresee
from jkv.policies import Evict, Policy
from jkv.policies.random import Random
from jkv.run import GenerationConfig, Result
from jkv.teacher import MOST_AT_ONCE, Track, block_size


@dataclass(frozen=True)
class Comparison:
    """One policy beside full attention, at every token of every text that follows the prompt.

    Attributes:
        name: of the policy, as it was asked for.
        policy: with all its fields.
        kl: divergence of the policy's next-token distribution from full attention's, KL(full || policy) in nats,
            float32 `[S, N]`; NaN after a text's end.
        delta_nll: how much less likely the text's own next token is, in nats, float32 `[S, N]`.
        agrees: whether the likeliest token is the same, 0 or 1, float32 `[S, N]`.
        diverges: first token at which greedy decoding from the prompt differs from full attention's, `[S]`; the number
            of tokens that were decoded where none does; None where nothing was decoded.
    """

    name: str
    policy: Policy
    kl: np.ndarray
    delta_nll: np.ndarray
    agrees: np.ndarray
    diverges: np.ndarray | None = None


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """The mean over texts `[S]` or `[S, N]`, and its standard error over them, None with a single one."""
    rows = np.nanmean(values, axis=1) if values.ndim == 2 else values
    return float(np.mean(rows)), float(np.std(rows, ddof=1) / math.sqrt(len(rows))) if len(rows) > 1 else None


def format_mean(mean: float, error: float | None, form: str) -> str:
    """A mean and its standard error, where there is one; `form` is of the mean, as ".4f"."""
    return f"{mean:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")


def compare(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    policies: Sequence[str],
    *,
    prompt: int,
    greedy: int = 0,
    oracle: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Comparison]:
    """Feeds texts to full attention and to policies, prompt first and the rest through the decode path.

    Args:
        llm: the model.
        texts: token ids; each longer than the prompt by two tokens or more.
        policies: text forms.
        prompt: tokens that are read as the prompt, with full attention, before anything is evicted.
        greedy: tokens to decode from the prompts, to see where the policies part from full attention.
        oracle: compare `random` and an `Oracle`, too, for each budget and interval among the evicting policies.
        progress: called with the number of tokens of each text that have been fed.

    Returns:
        One comparison for each policy.

    Raises:
        ValueError: a text is too short or too long, or no such policy.
    """
    longest = llm.checkpoint.config.max_position
    for index, text in enumerate(texts):
        if not prompt + 2 <= len(text) <= longest:
            raise ValueError(
                f"text {index} has {len(text)} tokens; it must have two more than the prompt's {prompt}, and at most "
                f"the {longest} that the model reads"
            )
    ready = {name: llm.prepare(name) for name in policies}
    if oracle:
        ready |= find_bounds(ready.values())
    measured = _measure(llm, texts, ready, prompt, progress)
    full = _draw_greedily(llm, texts, "full", prompt, greedy)
    found = []
    for name, policy in ready.items():
        diverges = None
        if greedy and not isinstance(policy, Oracle):
            drawn = _draw_greedily(llm, texts, policy, prompt, greedy)
            diverges = np.array([_first_difference(*pair) for pair in zip(full, drawn, strict=True)])
        kl, delta_nll, agrees = measured[name]
        found.append(Comparison(name, policy, kl, delta_nll, agrees, diverges))
    return found


def find_bounds(policies: Iterable[Policy]) -> dict[str, Policy]:
    """The policies that bound evicting ones from both sides, for each budget and interval."""
    sizes = dict.fromkeys((p.budget, p.floor, p.interval) for p in policies if isinstance(p, Evict) and p.interval)
    found: dict[str, Policy] = {}
    for budget, floor, interval in sizes:
        size = {"budget": budget, "floor": floor, "interval": interval}
        text = f"budget={budget}" + ("" if interval == Evict.interval else f",interval={interval}")
        least = budget if isinstance(budget, int) else floor
        found[f"random:{text}"] = Random(**size, window=min(Random.window, least // 2))
        found[f"oracle:{text}"] = Oracle(**size)
    return found


def share_of_way(comparison: Comparison, others: Sequence[Comparison]) -> float | None:
    """How far a policy's mean divergence is on the way from `random` (0) to the `Oracle` (1) of its own size.

    None where these were not compared.
    """

    def size(policy: Policy) -> tuple[Any, ...]:
        return tuple(getattr(policy, name, None) for name in ("budget", "floor", "interval"))

    alike = [other for other in others if size(other.policy) == size(comparison.policy)]
    worst, best = (
        next((mean_and_error(other.kl)[0] for other in alike if isinstance(other.policy, kind)), None)
        for kind in (Random, Oracle)
    )
    if worst is None or best is None or worst == best:
        return None
    return (worst - mean_and_error(comparison.kl)[0]) / (worst - best)


def _foresee(oracle: Track, witness: Track, blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Cuts an oracle's stores to what the next interval attends to, which the witness is fed first."""
    for block in blocks:
        witness.feed(*block)
    stores, seen = [], []
    for store, other in zip(oracle.state.stores, witness.state.stores, strict=True):
        stores.append(foresee(store, other.extra["mass"]))
        seen.append(replace(other, extra={"mass": jnp.zeros_like(other.extra["mass"])}))
    witness.state = replace(witness.state, stores=tuple(seen))
    oracle.state = oracle.engine.compact(replace(oracle.state, stores=tuple(stores)))


def _measure(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    policies: Mapping[str, Policy],
    prompt: int,
    progress: Callable[[int], None],
) -> dict[str, tuple[np.ndarray, ...]]:
    """KL, difference in NLL and agreement `[S, N]` of each policy; all are fed the same blocks."""
    size = math.gcd(*(block_size(policy) for policy in policies.values()), MOST_AT_ONCE)
    blocks = list(_cut(texts, prompt, size))
    prompts, longest = [text[:prompt] for text in texts], max(map(len, texts))
    full = Track.begin(llm, llm.prepare("full"), prompts, longest)
    tracks = {name: Track.begin(llm, policy, prompts, longest) for name, policy in policies.items()}
    witnesses = {
        name: Track.begin(llm, Witness(), prompts, longest)
        for name, policy in policies.items()
        if isinstance(policy, Oracle)
    }
    found: dict[str, list[Any]] = {name: [] for name in policies}
    for index, (tokens, count, targets) in enumerate(blocks):
        expected = full.feed(tokens, count)
        for name, track in tracks.items():
            interval = track.engine.policy.interval
            if name in witnesses and track.fed % interval == 0:
                _foresee(track, witnesses[name], (block[:2] for block in blocks[index : index + interval // size]))
            found[name].append(_compare_logits(expected, track.feed(tokens, count), targets))
        # Waits for the device, so that not all blocks' logits are there at once.
        jax.block_until_ready(found)
        progress(min((index + 1) * size, max(map(len, texts)) - prompt))
    steps = max(map(len, texts)) - prompt - 1
    return {
        name: tuple(np.concatenate(parts, axis=1)[:, :steps] for parts in zip(*outs, strict=True))
        for name, outs in found.items()
    }


def _cut(texts: Sequence[Sequence[int]], prompt: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of tokens to feed `[S, N]`, how many each text has `[S]`, and the tokens that follow them, -1 for none."""
    longest = max(map(len, texts))
    padded = np.full((len(texts), prompt + -(-(longest - prompt) // size) * size + 1), -1, np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    for start in range(prompt, longest - 1, size):
        tokens, targets = padded[:, start : start + size], padded[:, start + 1 : start + size + 1]
        # A text's last token has none after it that could be compared.
        yield np.maximum(tokens, 0), np.asarray(np.sum(targets >= 0, axis=1), np.int32), targets


@jax.jit
def _compare_logits(full: Array, other: Array, targets: Array) -> tuple[Array, ...]:
    """KL(full || other), difference in NLL, and agreement, float32 `[S, N]`; NaN where there is no target."""
    expected, found = jax.nn.log_softmax(full), jax.nn.log_softmax(other)
    kl = jnp.sum(jnp.exp(expected) * (expected - found), axis=-1)
    likely = jnp.take_along_axis(expected - found, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    agrees = (jnp.argmax(full, axis=-1) == jnp.argmax(other, axis=-1)).astype(jnp.float32)
    there = targets >= 0
    return tuple(jnp.where(there, x, jnp.nan) for x in (jnp.maximum(kl, 0.0), likely, agrees))


def _draw_greedily(
    llm: LLM, texts: Sequence[Sequence[int]], policy: str | Policy, prompt: int, new: int
) -> list[tuple[int, ...]]:
    """What follows each prompt, token by token the likeliest."""
    if not new:
        return []
    config = GenerationConfig(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    run = llm.run([text[:prompt] for text in texts], policy=policy, config=config, slots=len(texts))
    results = [event for event in run if isinstance(event, Result)]
    return [result.tokens for result in sorted(results, key=lambda result: result.prompt)]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
