"""Replays what the authors' R-KV and G-KV codes kept of random keys and queries, compaction by compaction."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from oracle_cases import FOLDER, Stream, compact, feed_stream, policy_of, prompt_of, read, read_stream, slots_of

import pallas_kernels
from jkv.cache import Slots, fill
from jkv.config import CacheSpec
from jkv.policies import format_policy, get_policy
from jkv.policies.base import Evict
from jkv.policies.sepllm import SepLLM
from jkv.policies.streamingllm import StreamingLLM

CASES = sorted(path.stem for path in FOLDER.glob("*_S[123]*.npz") if not path.stem.startswith(("stream", "mask")))
TOLERANCE = 2e-6
NO_GAP = 1e9
SPEC = CacheSpec(num_kv_heads=2, group=4, head_dim=16, max_len=104, max_new=104)


@dataclass(frozen=True)
class Round:
    """One recorded compaction.

    Attributes:
        number: of the round; round 0 is the prompt.
        seen: tokens of the stream so far, padding counted.
        held: positions before it, of each row and head, padding left out.
        pads: padding still held before it, `[B, H]`.
        history: as `held`; None without a score cache.
        data: the recorded arrays by name.
    """

    number: int
    seen: int
    held: list[list[np.ndarray]]
    pads: np.ndarray
    history: list[list[np.ndarray]] | None
    data: dict[str, np.ndarray]


class Case:
    """One recording and the policy it stands for."""

    def __init__(self, name: str):
        self.config, self.arrays = read(name)
        self.stream = read_stream(self.config["stream"])
        self.batch, self.heads = self.stream.k.shape[:2]
        self.interval, self.prompt_len = self.config["interval"], self.config["prompt_len"]
        policy = policy_of(self.config, batch=self.batch, interval=self.interval)
        assert isinstance(policy, Evict)
        self.policy = policy
        # One capacity for nearly all cases, so that the pieces of a score compile once a stream.
        self.capacity = max(48, self.policy.capacity(SPEC))

    def rounds(self) -> Iterator[Round]:
        """Recorded compactions, each with the recorded state before it."""
        pads = self.stream.pads
        kept = np.broadcast_to(np.arange(self.prompt_len), (self.batch, self.heads, self.prompt_len))
        history = self.arrays.get("init_score_cache", np.zeros((self.batch, self.heads, 0)))
        before = self.prompt_len
        for number in range(self.config["rounds"] + 1):
            prefix = f"r{number}_"
            data = {key.removeprefix(prefix): x for key, x in self.arrays.items() if key.startswith(prefix)}
            seen = self.prompt_len + number * self.interval
            fresh = np.broadcast_to(np.arange(before, seen), (self.batch, self.heads, seen - before))
            kept = np.concatenate([kept, fresh], axis=-1)
            before = seen
            if "kept_pos" not in data:
                continue
            known = np.full(kept.shape, -1.0, np.float32)
            known[..., : history.shape[-1]] = history
            padding = kept < pads[:, None, None]
            rows = range(self.batch), range(self.heads)
            held = [[kept[b, h][~padding[b, h]] - pads[b] for h in rows[1]] for b in rows[0]]
            past = [[known[b, h][~padding[b, h]] for h in rows[1]] for b in rows[0]]
            yield Round(number, seen, held, padding.sum(axis=-1), past, data)
            kept = data["kept_pos"]
            history = data.get("score_cache", history[..., :0])

    def slots(self, round: Round) -> Slots:
        """The recorded state before a round."""
        extra = {"history": (-1.0, round.history)} if "history" in self.policy.fills else {}
        window = self.policy.window if self.policy.needs_queries else 0
        seen = round.seen - self.stream.pads
        return slots_of(self.stream, round.held, seen, capacity=self.capacity, window=window, extra=extra)


@functools.cache
def case(name: str) -> Case:
    return Case(name)


@functools.partial(jax.jit, static_argnums=0)
def score_and_compact(policy: Evict, slots: Slots) -> tuple[Array, Slots]:
    queries = slots.window_queries()
    score = policy.score(policy.remember(slots, queries, policy.due(slots)), queries)
    return score, policy.compact(slots)


window_scores = jax.jit(pallas_kernels.window_scores, static_argnames=("reduce", "shift"))
key_redundancy = jax.jit(pallas_kernels.key_redundancy, static_argnames=("threshold", "retain"))


def each(round: Round, recorded: np.ndarray, ours: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Recorded and our values of every row and head, of the same slots."""
    ours = np.asarray(ours)
    for row, head in np.ndindex(recorded.shape[:2]):
        want = recorded[row, head, ..., round.pads[row, head] :]
        assert want.size
        yield want, ours[row, head, ..., : want.shape[-1]]


def assert_close(round: Round, recorded: np.ndarray, ours: Any) -> None:
    for want, got in each(round, recorded, ours):
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def kept_by(slots: Slots, row: int, head: int) -> np.ndarray:
    return np.asarray(slots.pos)[row, head, : np.asarray(slots.length)[row, head]]


def assert_content(stream: Stream, slots: Slots) -> None:
    """Every slot holds the key and value of the token it says it holds."""
    for row, head in np.ndindex(slots.length.shape):
        pos = kept_by(slots, row, head)
        np.testing.assert_array_equal(slots.k[row, head, : len(pos)], stream.k[row, head, pos])
        np.testing.assert_array_equal(slots.v[row, head, : len(pos)], stream.v[row, head, pos])


@pytest.mark.parametrize("name", CASES)
def test_each_compaction_from_recorded_state(name: str) -> None:
    c = case(name)
    rounds = list(c.rounds())
    assert rounds
    for round in rounds:
        slots = c.slots(round)
        score, after = score_and_compact(c.policy, slots)
        assert_content(c.stream, after)
        assert_kept(c, round, after)
        if "selection_score" in round.data:
            assert_close(round, round.data["selection_score"], score)
        if "score_cache" in round.data:
            kept = round.data["kept_pos"] < c.stream.pads[:, None, None]
            n = round.data["score_cache"].shape[-1]
            for row, head in np.ndindex(kept.shape[:2]):
                pads = kept[row, head].sum()
                want = round.data["score_cache"][row, head, pads:]
                np.testing.assert_allclose(after.extra["history"][row, head, : n - pads], want, atol=TOLERANCE, rtol=0)
                assert (np.asarray(after.extra["history"])[row, head, n - pads :] == -1).all()


def assert_kept(c: Case, round: Round, after: Slots) -> None:
    """The recorded positions are kept, in the recorded order; where scores tie, some of the tied."""
    recorded = round.data["kept_pos"] - c.stream.pads[:, None, None]
    gap = round.data.get("boundary_gap", np.full(recorded.shape[:2], NO_GAP))
    for row, head in np.ndindex(recorded.shape[:2]):
        want = recorded[row, head]
        want, got = want[want >= 0], kept_by(after, row, head)
        if c.config["algo"] == "snapkv":  # recorded by descending score, among which many are equal
            want, got = np.sort(want), np.sort(got)
        if gap[row, head] > TOLERANCE:
            np.testing.assert_array_equal(got, want)
            continue
        assert len(got) == len(want)
        score = dict(zip(round.held[row][head], round.data["selection_score"][row, head], strict=False))
        least = min(score[p] for p in want if p in score)
        assert {p for p in score if score[p] > least + TOLERANCE} <= set(got)
        assert all(score.get(p, least) >= least - TOLERANCE for p in got)


@pytest.mark.parametrize("name", [name for name in CASES if name != "gkvrepo_snapkv_multi_S1"])  # it has ties
def test_free_running(name: str) -> None:
    c = case(name)
    rounds = {round.number: round for round in c.rounds()}
    slots = jax.jit(c.policy.ingest, static_argnums=0)(SPEC, prompt_of(c.stream, c.prompt_len))
    for number in range(c.config["rounds"] + 1):
        if number:
            seen = c.prompt_len + number * c.interval
            slots = compact(c.policy, feed_stream(c.policy, slots, c.stream, seen - c.interval, seen))
        if number in rounds:
            assert_kept(c, rounds[number], slots)
    assert_content(c.stream, slots)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("gkv_", "gkvrepo_rkv", "gkvrepo_snap", "rkvrepo_rkv"))])
def test_score_pieces(name: str) -> None:
    c = case(name)
    retain = getattr(c.policy, "retain", "recent")
    for round in c.rounds():
        slots = c.slots(round)
        if "local_score" in round.data:
            assert_close(round, round.data["local_score"], window_scores(slots.window_queries(), slots.k, slots.length))
        if "similarity" in round.data:
            assert_close(round, round.data["similarity"], key_redundancy(slots.k, slots.length, retain=retain))
        if "logits_groupmax" in round.data:
            logits = round.data["logits_groupmax"][..., : -c.policy.window]
            probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
            want = np.mean(probs / probs.sum(axis=-1, keepdims=True), axis=2)
            ours = window_scores(slots.window_queries(), slots.k, slots.length, reduce="logits")
            assert_close(round, want, ours)


# A third kind of recorded mask, rebuilt in training from the positions that a rollout kept, has no counterpart here:
# these policies only run at inference, and what they keep is compared above.
MASKS = sorted(path.stem for path in FOLDER.glob("mask_sepllm_*.npz"))


@pytest.mark.parametrize("prompt_len", [9, 30])
@pytest.mark.parametrize("kind", ["sepllm", "streamingllm"])
@pytest.mark.parametrize("name", MASKS)
def test_every_token_sees_what_the_training_mask_shows(name: str, kind: str, prompt_len: int) -> None:
    config, arrays = read(name)
    sink, window, length = config["sink_len"], config["window_size"], config["T"]
    ids, pads = arrays["input_ids"], np.sum(arrays["attention_mask"] == 0, axis=1)
    mask = np.unpackbits(arrays[f"{kind}_mask_packed"], axis=-1, count=length).astype(bool)
    if kind == "sepllm":
        budget = sink + window + config["sep_cache_len"] - 1
        separators = tuple(arrays["sep_ids"].tolist())
        policy = SepLLM(budget=budget, sink=sink, window=window, interval=1, separator_ids=separators)
    else:
        policy = StreamingLLM(budget=sink + window, sink=sink, interval=1)
    stream = Stream(k=np.zeros((len(ids), 1, length, 2)), q=np.zeros((len(ids), 1, 1, length, 2)), pads=pads)
    stream = replace(stream, tokens=np.stack([np.roll(row, -pad) for row, pad in zip(ids, pads, strict=True)]))
    slots = jax.jit(policy.ingest, static_argnums=0)(SPEC, prompt_of(stream, prompt_len))
    hidden = 0
    for seen in range(prompt_len + 1, length + 1):
        slots = feed_stream(policy, slots, stream, seen - 1, seen)
        for row, pad in enumerate(pads):
            want = np.flatnonzero(mask[row, seen - 1]) - pad
            np.testing.assert_array_equal(kept_by(slots, row, 0), want)
            hidden += seen - pad - len(want)
        slots = compact(policy, slots)
    assert hidden > length


def test_sepllm_finds_separators() -> None:
    vocabulary = {".": 1, " .": 2, "a": 3, ",": 4, "\n": 5, "a,": 6}

    def encode(text: str) -> tuple[int, ...]:
        return (vocabulary[text],) if text in vocabulary else tuple(vocabulary.get(x, 0) for x in text)

    assert SepLLM(separators=r".,\n").prepare(encode).separator_ids == (1, 2, 4, 5)
    with pytest.raises(ValueError, match="characters that the tokenizer has tokens for"):
        SepLLM(separators="?").prepare(lambda text: (7, 8))


def test_sepllm_without_ids_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="call prepare"):
        SepLLM().ingest(SPEC, prompt_of(read_stream("S1"), 8))


def test_separators_are_read_from_text() -> None:
    policy = get_policy(r"sepllm:budget=64,separators=.,;\n,window=8")
    assert policy == SepLLM(budget=64, window=8, separators=r".,;\n")
    assert get_policy(format_policy("sepllm", policy)) == policy
