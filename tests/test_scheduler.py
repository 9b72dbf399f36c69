"""Rows in slots: whatever shares the batch with a row, and whenever its slot became free, it is the row alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jkv import loop
from jkv.engine import Engine
from jkv.loop import Programs, Row, Scheduler
from jkv.models.decoder import Decoder
from jkv.policies import Policy, names
from jkv.sampling import Sampling
from models import batch, make_engine, request, tiny
from test_policies import prompt, small

LONGEST, NEW = 32, 48
# Two blocks of ten steps: slots that are filled at different blocks are compacted at different ones.
INTERVAL = 20
# Ends inside a block, at its end, after the first token; prompts longer and shorter than the budget.
ROWS = [
    Row(i, prompt(n), limit) for i, (n, limit) in enumerate([(29, 13), (3, 48), (11, 31), (24, 45), (7, 1), (31, 41)])
]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny("llama")


def schedule(
    model: Decoder,
    policy: Policy,
    rows: Sequence[Row],
    slots: int,
    *,
    programs: Programs | None = None,
    eos: Sequence[int] = (-1,),
    sampling: Sampling | None = None,
) -> tuple[dict[int, list[int]], dict[int, list[np.ndarray]]]:
    """Tokens of each row, and the positions held of it after its prompt and its compactions."""
    engine, weights = make_engine(model, policy, longest=LONGEST, new=NEW, sampling=sampling)
    kept: dict[int, list[np.ndarray]] = {row.id: [] for row in rows}

    def on_kept(row: Row, decoded: int, positions: np.ndarray) -> None:
        assert decoded == len(kept[row.id]) * policy.interval
        kept[row.id].append(positions)

    scheduler = Scheduler(
        engine=engine,
        weights=weights,
        programs=programs or Programs(),
        request=request(eos),
        rows=iter(rows),
        slots=slots,
        on_kept=on_kept,
    )
    drawn: dict[int, list[int]] = {row.id: [] for row in rows}
    for row, tokens in scheduler.run():
        drawn[row.id].extend(tokens.tolist())
    return drawn, kept


@pytest.mark.parametrize("name", [name for name in names() if "@" not in name or name == "shadowkv@fold"])
def test_a_row_is_the_row_alone_whenever_its_slot_became_free(model, name):
    policy = small(name)
    policy = replace(policy, interval=INTERVAL) if policy.interval else policy
    programs = Programs()
    drawn, kept = schedule(model, policy, ROWS, 2, programs=programs)
    alone, kept_alone = schedule(model, policy, ROWS, 1, programs=programs)
    assert drawn == alone
    assert [len(tokens) for tokens in drawn.values()] == [row.limit for row in ROWS]
    assert len({tuple(tokens[:10]) for tokens in drawn.values()}) == len(ROWS)
    for row in ROWS:
        assert len(kept[row.id]) == len(kept_alone[row.id])
        for one, other in zip(kept[row.id], kept_alone[row.id], strict=True):
            np.testing.assert_array_equal(one, other)
    if policy.interval:
        assert len(kept[1]) == 1 + NEW // INTERVAL


@pytest.mark.parametrize("name", ["full", "gkv", "shadowkv", "specontext"])
def test_long_prompts_are_read_one_after_the_other(model, name, monkeypatch):
    policy, programs = small(name), Programs()
    together, kept = schedule(model, policy, ROWS, 3, programs=programs)
    widths = []

    def read(engine: Engine, weights: nnx.State, tokens: np.ndarray, *args: Any, **options: Any) -> Any:
        widths.append((tokens.shape[0], int(np.sum(args[0]))))
        return prefill(engine, weights, tokens, *args, **options)

    prefill = Engine.prefill
    monkeypatch.setattr(Engine, "prefill", read)
    monkeypatch.setattr(loop, "MOST_TOGETHER", 3 * LONGEST - 1)
    apart, kept_apart = schedule(model, policy, ROWS, 3, programs=programs)
    assert widths == [(3, 0), *((1, len(row.prompt)) for row in ROWS)]
    assert apart == together
    for row in ROWS:
        for one, other in zip(kept_apart[row.id], kept[row.id], strict=True):
            np.testing.assert_array_equal(one, other)


def test_sixty_four_rows_in_eight_slots(model):
    policy = replace(small("gkv"), interval=INTERVAL)
    rng, programs = np.random.default_rng(0), Programs()
    rows = [Row(i, prompt(int(n)), int(limit)) for i, (n, limit) in enumerate(rng.integers(1, (33, NEW), (64, 2)))]
    sampling = Sampling(temperature=1.0, top_p=0.9)
    drawn, _ = schedule(model, policy, rows, 8, programs=programs, sampling=sampling, eos=(5,))
    compiled = list(programs.names)
    assert sum(tokens[-1] == 5 for tokens in drawn.values()) > 5
    assert sum(len(drawn[row.id]) == row.limit for row in rows) > 5
    order = rng.permutation(64)
    again, _ = schedule(model, policy, [rows[i] for i in order], 8, programs=programs, sampling=sampling, eos=(5,))
    assert again == drawn
    assert programs.names == compiled
    alone, _ = schedule(model, policy, rows[::9], 1, sampling=sampling, eos=(5,))
    assert alone == {row.id: drawn[row.id] for row in rows[::9]}


def test_many_short_rows_leave_nothing_behind(model):
    policy, programs = small("gkv"), Programs()
    schedule(model, policy, ROWS, 4, programs=programs)
    compiled, arrays = list(programs.names), []
    rows = [Row(i, prompt(1 + i % 32), 1 + i % 5) for i in range(300)]

    def watched():
        for row in rows:
            arrays.append(len(jax.live_arrays()))
            yield row

    engine, weights = make_engine(model, policy, longest=LONGEST, new=NEW)
    scheduler = Scheduler(engine, weights, programs, request(), watched(), slots=4)
    counts = dict.fromkeys(range(300), 0)
    for row, tokens in scheduler.run():
        counts[row.id] += len(tokens)
    assert counts == {row.id: row.limit for row in rows}
    assert programs.names == compiled
    assert max(arrays[150:]) <= max(arrays[20:150])


def test_a_row_that_is_stopped_gives_its_slot_away(model):
    policy = small("full")
    engine, weights = make_engine(model, policy, longest=LONGEST, new=NEW)
    rows = [Row(i, prompt(9 + i), NEW) for i in range(4)]
    scheduler = Scheduler(engine, weights, Programs(), request(), rows, slots=2)
    drawn: dict[int, list[int]] = {row.id: [] for row in rows}
    for row, tokens in scheduler.run():
        drawn[row.id].extend(tokens.tolist())
        if row.id != 1:
            scheduler.stop(row)
    assert [len(tokens) for tokens in drawn.values()] == [1, NEW, 1, 1]
    alone, _ = schedule(model, policy, rows, 4)
    assert all(alone[index][: len(tokens)] == tokens for index, tokens in drawn.items())


def test_an_admission_stays_in_its_buffers(model):
    policy = replace(small("gkv"), budget=200)
    engine, weights = make_engine(model, policy, longest=LONGEST, new=NEW)
    state, _ = engine.prefill(weights, *batch([prompt(29), prompt(3)], LONGEST, NEW), request())
    fresh, _ = engine.prefill(weights, *batch([prompt(11)], LONGEST, NEW), request())
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    other = jax.tree.map(lambda x: np.array(x[0]), state)
    state = engine.admit(state, fresh, np.int32(1))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)] == before
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[0], state), other)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[1:], state), fresh)


def test_nothing_to_do(model):
    assert schedule(model, small("full"), [], 2) == ({}, {})
