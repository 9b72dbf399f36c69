"""Replays what the authors' R-KV and G-KV codes kept of random keys and queries, compaction by compaction."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array

import pallas_kernels
from jkv.cache import Slots, resize
from jkv.config import CacheSpec
from jkv.policies import describe, format_policy, get_policy
from jkv.policies.base import Evict
from jkv.policies.gkv import GKV
from jkv.policies.sepllm import SepLLM
from jkv.policies.streamingllm import StreamingLLM
from oracle_cases import (
    FOLDER,
    ByScoreRKV,
    Stream,
    align,
    feed_stream,
    kept_by,
    policy_of,
    prompt_of,
    read,
    read_stream,
    slots_of,
)
from pallas_kernels.dispatch import XLA, Implementation

CASES = sorted(path.stem for path in (FOLDER / "unit").glob("*.npz"))
# Cases that together use all kernels in all their modes.
QUICK = {
    "gkv_cake_shift_S1",
    "gkv_max_a08_S2pad",
    "gkvrepo_rkv_rawsim_S1",
    "gkvrepo_snapkv_single_S3",
    "gkvrepo_streaming_S1",
    "rkvrepo_rkv_lam007_rr20_last_S1",
    "rkvrepo_rkv_lam010_rr15_first_percent_S1",
}
TIES = "gkvrepo_snapkv_multi_S1"  # pooled scores are equal at its boundary, and the recorded code leaves ties to chance
MASKS = sorted((FOLDER / "masks").glob("*.npz"))
TOLERANCE = 2e-6
CAPACITY = 48  # of every cache here, so that programs are shared
SPEC = CacheSpec(num_kv_heads=2, group=4, head_dim=16, max_len=104, max_new=104, max_prompt=104)

window_scores = jax.jit(pallas_kernels.window_scores, static_argnames=("reduce", "shift"))
key_redundancy = jax.jit(pallas_kernels.key_redundancy, static_argnames=("threshold", "retain"))


@functools.partial(jax.jit, static_argnums=0)
def score_and_compact(policy: Evict, slots: Slots) -> tuple[Array, Slots]:
    """What the policy scores as it compacts, and what it leaves."""
    scores = []

    class Watched(type(policy)):
        def rank(self, slots: Slots, score: Array, due: Array) -> Array:
            scores.append(score)
            return super().rank(slots, score, due)

    after = Watched(**dict(describe(policy))).compact(slots, np.ones(slots.pos.shape[0], bool))
    return scores[0], after


@dataclass(frozen=True)
class Round:
    """One recorded compaction; `Round 0` is the prompt's.

    Attributes:
        seen: tokens of the stream so far, padding counted.
        slots: our cache in the state that was recorded before it.
        pads: padding that the recorded cache held besides, `[B, H]`, before our slots.
        data: recorded arrays by name.
    """

    seen: int
    slots: Slots
    pads: np.ndarray
    data: dict[str, np.ndarray]

    def pairs(self, name: str, ours: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Recorded and our values of the same slots, for every row and head."""
        recorded, ours = self.data[name], np.asarray(ours)
        for row, head in np.ndindex(recorded.shape[:2]):
            want = recorded[row, head, ..., self.pads[row, head] :]
            want = want[..., ~np.isnan(want).all(axis=tuple(range(want.ndim - 1)))]
            assert want.size
            yield want, ours[row, head, ..., : want.shape[-1]]

    def assert_close(self, name: str, ours: Any) -> None:
        for want, got in self.pairs(name, ours):
            np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


class Case:
    """One recording and the policy it stands for."""

    def __init__(self, name: str):
        self.config, self.arrays = read(FOLDER / "unit" / f"{name}.npz")
        self.stream = read_stream(self.config["stream"])
        self.batch, self.heads = self.stream.k.shape[:2]
        policy = policy_of(self.config, batch=self.batch, interval=self.config["interval"])
        assert isinstance(policy, Evict)
        assert self.arrays["kept"].shape[-1] < self.config["prompt_len"] + self.config["interval"] * len(self)
        self.policy = policy

    def __len__(self) -> int:
        return self.config["rounds"] + 1

    def seen(self, number: int) -> int:
        return self.config["prompt_len"] + number * self.config["interval"]

    @functools.cached_property
    def rounds(self) -> dict[int, Round]:
        """The recorded compactions by number; in the others nothing happened."""
        rounds, before = {}, 0
        kept = np.zeros((self.batch, self.heads, 0), int)
        history = self.arrays.get("first_history", kept)
        names = {"kept", "score", "gap", "history", "local_score", "similarity", "logits_groupmax"} & set(self.arrays)
        for index, number in enumerate(self.arrays["round"]):
            seen = self.seen(number)
            fresh = np.broadcast_to(np.arange(before, seen), (self.batch, self.heads, seen - before))
            data = {name: self.arrays[name][index] for name in names}
            rounds[int(number)] = self._round(seen, np.concatenate([kept, fresh], axis=-1), history, data)
            kept, history, before = data["kept"], data.get("history", history), seen
            kept = kept[..., (kept >= 0).all(axis=(0, 1))]
        return rounds

    def _round(self, seen: int, held: np.ndarray, history: np.ndarray, data: dict[str, np.ndarray]) -> Round:
        padded = self.stream.pads.reshape(-1, 1, 1)
        known = np.full(held.shape, -1.0, np.float32)
        known[..., : history.shape[-1]] = np.where(np.isnan(history), -1.0, history)[..., : held.shape[-1]]

        def unpad(x: np.ndarray) -> list[list[np.ndarray]]:
            return [[y[z] for y, z in zip(*pair, strict=True)] for pair in zip(x, held >= padded, strict=True)]

        slots = slots_of(
            self.stream,
            unpad(held - padded),
            seen - self.stream.pads,
            capacity=CAPACITY,
            window=self.policy.window if self.policy.needs_queries else 0,
            extra={"history": (-1.0, unpad(known))} if isinstance(self.policy, GKV) else {},
        )
        return Round(seen, slots, np.sum(held < padded, axis=-1), data)

    def assert_kept(self, round: Round, after: Slots) -> None:
        """The recorded positions are kept, in the recorded order; where scores tie, some of the tied."""
        recorded, kept = round.data["kept"] - self.stream.pads.reshape(-1, 1, 1), kept_by(after)
        for row, head in np.ndindex(recorded.shape[:2]):
            want = recorded[row, head]
            want, got = want[want >= 0], kept[row][head]
            if self.config["algo"] == "snapkv":  # recorded by descending score, among which many are equal
                want, got = np.sort(want), np.sort(got)
            if "gap" not in round.data or round.data["gap"][row, head] > TOLERANCE:
                np.testing.assert_array_equal(got, want)
                continue
            assert len(got) == len(want) and not round.pads.any()
            score = dict(zip(kept_by(round.slots)[row][head], round.data["score"][row, head], strict=False))
            least = min(score[p] for p in want[: -self.policy.window])
            assert {p for p, x in score.items() if x > least + TOLERANCE} <= {*got}
            assert all(score[p] >= least - TOLERANCE for p in got[: -self.policy.window])


case = functools.cache(Case)


def assert_content(stream: Stream, slots: Slots) -> None:
    """Every slot holds the key and value of the token it says it holds."""
    k, v = np.asarray(slots.k), np.asarray(slots.v)
    for row, heads in enumerate(kept_by(slots)):
        for head, pos in enumerate(heads):
            np.testing.assert_array_equal(k[row, head, : len(pos)], stream.k[row, head, pos])
            np.testing.assert_array_equal(v[row, head, : len(pos)], stream.v[row, head, pos])


@pytest.mark.parametrize("name", CASES)
def test_each_compaction_from_the_recorded_state(name: str) -> None:
    check_rounds(name, XLA)


# Few by default: a kernel's interpreter takes seconds to compile.
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_each_compaction_with_the_kernels_interpreted(name: str) -> None:
    check_rounds(name, Implementation("triton", interpret=True))


def check_rounds(name: str, implementation: Implementation) -> None:
    """Compacts from every recorded state and compares score, kept positions, content and history."""
    c = case(name)
    assert c.rounds
    for round in c.rounds.values():
        score, after = score_and_compact(c.policy, replace(round.slots, implementation=implementation))
        if "score" in round.data:
            round.assert_close("score", score)
        if isinstance(c.policy, ByScoreRKV) and implementation != XLA:
            continue  # leaves the cache in the order of the scores, which the kernel that compacts does not know
        c.assert_kept(round, after)
        assert_content(c.stream, after)
        if "history" in round.data:
            assert round.data["kept"][..., 0].min(axis=-1).tolist() >= c.stream.pads.tolist()  # no padding is kept
            for row, head in np.ndindex(after.length.shape):
                want = round.data["history"][row, head]
                want, got = want[~np.isnan(want)], np.asarray(after.extra["history"])[row, head]
                np.testing.assert_allclose(got[: len(want)], want, atol=TOLERANCE, rtol=0)
                np.testing.assert_array_equal(got[len(want) :], -1)


@pytest.mark.parametrize("name", [name for name in CASES if name != TIES])
def test_compactions_one_after_the_other(name: str) -> None:
    c = case(name)
    # These policies append as all do that evict, so that one program serves them.
    append = Evict()
    assert type(c.policy).append is Evict.append and type(c.policy).observe is Evict.observe
    slots = jax.jit(c.policy.ingest, static_argnums=0)(SPEC, prompt_of(c.stream, c.seen(0)))
    slots = resize(slots, CAPACITY, fills=c.policy.fills)
    if "first_history" in c.arrays:
        first = c.arrays["first_history"]
        np.testing.assert_allclose(slots.extra["history"][..., : first.shape[-1]], first, atol=TOLERANCE, rtol=0)
    for number in range(len(c)):
        if number:
            slots = feed_stream(append, slots, c.stream, c.seen(number - 1), c.seen(number))
            slots = score_and_compact(c.policy, slots)[1]
        if number in c.rounds:
            c.assert_kept(c.rounds[number], slots)
    assert_content(c.stream, slots)


@pytest.mark.parametrize("name", [name for name in CASES if {"local_score", "similarity"} & set(case(name).arrays)])
def test_terms_of_the_score(name: str) -> None:
    c = case(name)
    for round in c.rounds.values():
        slots = round.slots
        if "local_score" in round.data:
            round.assert_close("local_score", window_scores(slots.window_queries(), slots.k, slots.length))
        if "similarity" in round.data:
            retain = getattr(c.policy, "retain", "recent")
            round.assert_close("similarity", key_redundancy(slots.k, slots.length, retain=retain))


@pytest.mark.parametrize("name", [name for name in CASES if "logits_groupmax" in case(name).arrays])
def test_attention_by_largest_logit(name: str) -> None:
    c = case(name)
    for round in c.rounds.values():
        slots = round.slots
        ours = window_scores(slots.window_queries(), slots.k, slots.length, reduce="logits")
        for logits, got in round.pairs("logits_groupmax", np.asarray(ours)[:, :, None]):
            past = logits[:, : -c.policy.window]
            probs = np.exp(past - past.max(axis=-1, keepdims=True))
            want = np.mean(probs / probs.sum(axis=-1, keepdims=True), axis=0)
            np.testing.assert_allclose(got[0, : len(want)], want, atol=TOLERANCE, rtol=0)


# A third kind of mask, which training rebuilds from the positions that a rollout kept, has no counterpart at inference;
# the positions themselves are compared above.
@pytest.mark.parametrize("prompt_len", [9, 30])
@pytest.mark.parametrize("kind", ["sepllm", "streamingllm"])
@pytest.mark.parametrize("path", MASKS, ids=lambda path: path.stem)
def test_every_token_sees_what_the_training_mask_shows(path: Any, kind: str, prompt_len: int) -> None:
    config, arrays = read(path)
    sink, window, length = config["sink_len"], config["window_size"], config["T"]
    ids, pads = arrays["input_ids"], np.sum(arrays["attention_mask"] == 0, axis=1)
    mask = np.unpackbits(arrays[f"{kind}_mask_packed"], axis=-1, count=length).astype(bool)
    if kind == "sepllm":
        budget, separators = sink + window + config["sep_cache_len"] - 1, tuple(arrays["sep_ids"].tolist())
        policy = SepLLM(budget=budget, sink=sink, window=window, interval=1, separator_ids=separators)
    else:  # the mask shows the token itself and `window` before it
        policy = StreamingLLM(budget=sink + window, sink=sink, interval=1)
    blank = np.zeros((len(ids), 1, 1, length, 2), np.float32)
    stream = Stream(k=blank[:, 0], q=blank, tokens=align(ids, pads, 0), pads=pads)
    slots = resize(jax.jit(policy.ingest, static_argnums=0)(SPEC, prompt_of(stream, prompt_len)), CAPACITY)
    hidden = 0
    for seen in range(prompt_len + 1, length + 1):
        slots = feed_stream(policy, slots, stream, seen - 1, seen)
        for row, (pad, [got]) in enumerate(zip(pads, kept_by(slots), strict=True)):
            want = np.flatnonzero(mask[row, seen - 1]) - pad
            np.testing.assert_array_equal(got, want)
            hidden += seen - pad - len(want)
        slots = score_and_compact(policy, slots)[1]
    assert hidden > length


def test_sepllm_finds_separators() -> None:
    vocabulary = {".": 1, " .": 2, "a": 3, ",": 4, "\n": 5, "a,": 6}

    def encode(text: str) -> tuple[int, ...]:
        return (vocabulary[text],) if text in vocabulary else tuple(vocabulary.get(x, 0) for x in text)

    assert SepLLM(separators=r".,\n").prepare(encode).separator_ids == (1, 2, 4, 5)
    assert SepLLM(separator_ids=(9,)).prepare(encode).separator_ids == (9,)
    with pytest.raises(ValueError, match="characters that the tokenizer has tokens for"):
        SepLLM(separators="?").prepare(lambda text: (7, 8))


def test_sepllm_without_ids_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="call prepare"):
        SepLLM().ingest(SPEC, prompt_of(read_stream("S1"), 8))


def test_separators_are_read_from_text() -> None:
    policy = get_policy(r"sepllm:budget=64,separators=.,;\n,window=8")
    assert policy == SepLLM(budget=64, window=8, separators=r".,;\n")
    assert get_policy(format_policy("sepllm", policy)) == policy
