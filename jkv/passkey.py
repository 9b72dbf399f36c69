"""A passkey hidden in long text: is it still there when it is asked for, and does it help to know the question early?

Everything is made here, from a seed. The prompt is read with full attention and cut to the policy's budget; the digits
are fed after it through the decode path. In the variant "seen" the prompt ends with the question, so that a policy may
look for what it asks; in "unseen" the question comes after the cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from jkv.api import LLM
from jkv.policies import Policy
from jkv.teacher import Track, block_size

Variant = Literal["seen", "unseen"]
VARIANTS: tuple[Variant, ...] = ("seen", "unseen")
DIGITS = 5
NEEDLE = " The pass key is {key}. Remember it, {key} is the pass key."
QUESTION = "\n\nWhat is the pass key? The pass key is "
THINGS = ("river", "garden", "window", "road", "village", "letter", "ship", "tree", "song", "clock", "bridge", "lamp")
WAYS = ("old", "quiet", "green", "narrow", "bright", "heavy", "early", "distant", "plain", "warm", "broken", "small")
DEEDS = ("stood near", "was seen from", "belonged to", "reminded her of", "lay behind", "was older than", "led to")
ROWS = 8  # of a batch


@dataclass(frozen=True)
class Case:
    """One text: the token ids up to the question, those of the question, and those of the key's digits."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    digits: tuple[int, ...]


@dataclass(frozen=True)
class Passkeys:
    """How well the keys were remembered, in one variant.

    Attributes:
        digits: share of each text's digits that are the likeliest token, given those before, `[S]`.
        whole: whether all of them are, so that greedy decoding gives the key, `[S]`.
        nll: mean over a text's digits of their negative log-likelihood, nats, `[S]`.
    """

    digits: np.ndarray
    whole: np.ndarray
    nll: np.ndarray


def make_cases(llm: LLM, *, count: int, length: int, seed: int = 0) -> list[Case]:
    """Texts of at most `length` tokens, the keys spread evenly over their depth.

    Raises:
        ValueError: `length` has no room for text around the key, or is more than the model reads.
    """
    rng = np.random.default_rng(seed)
    question = tuple(llm.tokenizer.backend.encode(QUESTION, add_special_tokens=False).ids)
    needle = len(llm.tokenizer.encode(NEEDLE.format(key="0" * DIGITS)))
    room = length - len(question) - needle
    if room < needle:
        raise ValueError(f"passkey texts of {length} tokens have no room for text around the key; ask for more")
    if length + DIGITS > (most := llm.checkpoint.config.max_position):
        raise ValueError(f"passkey texts of {length} tokens and a key are longer than the {most} that the model reads")
    cases = []
    for index in range(count):
        key = "".join(map(str, rng.integers(0, 10, DIGITS)))
        text, place = "", (index + 0.5) / count
        before = _write(llm, rng, int(room * place))
        text = before + NEEDLE.format(key=key) + _write(llm, rng, room - int(room * place))
        digits = tuple(llm.tokenizer.backend.encode(key, add_special_tokens=False).ids)
        cases.append(Case(tuple(llm.tokenizer.encode(text)), question, digits))
    return cases


def score_passkeys(llm: LLM, policy: str | Policy, cases: Sequence[Case], variant: Variant) -> Passkeys:
    """How likely the keys' digits are once a policy has cut the text."""
    policy = llm.prepare(policy)
    parts = [_score(llm, policy, cases[start : start + ROWS], variant) for start in range(0, len(cases), ROWS)]
    return Passkeys(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _score(
    llm: LLM, policy: Policy, cases: Sequence[Case], variant: Variant
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # The question's last token is always fed, or the prompt itself, uncut, would tell the first digit.
    shown = len(cases[0].question) - 1 if variant == "seen" else 0
    prompts = [[*case.context, *case.question[:shown]] for case in cases]
    rests = [[*case.question[shown:], *case.digits] for case in cases]
    size, most = block_size(policy), max(map(len, rests))
    padded = np.zeros((len(cases), -(-most // size) * size), np.int32)
    for row, rest in enumerate(rests):
        padded[row, : len(rest)] = rest
    track = Track.begin(llm, policy, prompts, max(map(len, prompts)) + padded.shape[1])
    digits, whole, nll = [], [], []
    lengths, logits = np.array([len(rest) for rest in rests]), []
    for start in range(0, padded.shape[1], size):
        count = np.clip(lengths - start, 0, size).astype(np.int32)
        logits.append(track.feed(padded[:, start : start + size], count))
    likely = np.concatenate([np.asarray(jax.nn.log_softmax(part)) for part in logits], axis=1)
    for row, case in enumerate(cases):
        places = np.arange(len(rests[row]) - len(case.digits), len(rests[row]))
        found = likely[row, places - 1]
        right = found.argmax(axis=-1) == np.array(case.digits)
        digits.append(right.mean())
        whole.append(right.all())
        nll.append(-found[np.arange(len(places)), case.digits].mean())
    return np.array(digits), np.array(whole), np.array(nll)


def _write(llm: LLM, rng: np.random.Generator, tokens: int) -> str:
    """Sentences of at most so many tokens, that say nothing of keys."""
    text, length = "", 0
    while True:
        thing, other = rng.choice(THINGS, 2, replace=False)
        sentence = f" The {rng.choice(WAYS)} {thing} {rng.choice(DEEDS)} the {rng.choice(WAYS)} {other}."
        length += len(llm.tokenizer.backend.encode(sentence, add_special_tokens=False).ids)
        if length > tokens:
            return text
        text += sentence
