"""Slots: filled, extended and thinned, always in the order of the text and from the left."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.cache import Prompt, Slots, Token, fill, keep, max_pool, put, resize, settle

BATCH, HEADS, GROUP, TOKENS, SIZE = 3, 2, 2, 9, 4
LENGTH = np.array([9, 4, 0], np.int32)


def make_prompt(length: np.ndarray = LENGTH) -> Prompt:
    """Prompts whose queries, keys and values hold their own position, so that a slot tells where it came from."""
    position = jnp.arange(TOKENS, dtype=jnp.float32)
    k = jnp.broadcast_to(position.reshape(1, 1, -1, 1), (BATCH, HEADS, TOKENS, SIZE))
    q = jnp.broadcast_to(position.reshape(1, 1, 1, -1, 1), (BATCH, HEADS, GROUP, TOKENS, SIZE))
    return Prompt(
        q=q, k=k, v=-k, k_pre=k, tokens=jnp.zeros((BATCH, TOKENS), jnp.int32), length=jnp.asarray(length, jnp.int32)
    )


def make_token(pos, active=(True, True, True)) -> Token:
    at = jnp.asarray(pos, jnp.float32).reshape(-1, 1, 1)
    k = jnp.broadcast_to(at, (BATCH, HEADS, SIZE))
    return Token(
        q=jnp.broadcast_to(at[..., None], (BATCH, HEADS, GROUP, SIZE)),
        k=k,
        v=-k,
        k_pre=k,
        token=jnp.zeros(BATCH, jnp.int32),
        pos=jnp.asarray(pos, jnp.int32),
        active=jnp.asarray(active),
    )


def check(slots: Slots, expected: list[list[int]]) -> None:
    """Every head of row b holds the positions `expected[b]`, in this order, with their keys and values."""
    for row, positions in enumerate(expected):
        count = len(positions)
        np.testing.assert_array_equal(slots.length[row], [count] * HEADS)
        for head in range(HEADS):
            np.testing.assert_array_equal(slots.pos[row, head], positions + [-1] * (slots.capacity - count))
            np.testing.assert_array_equal(slots.k[row, head, :count, 0], positions)
            np.testing.assert_array_equal(slots.v[row, head, :count, 0], -np.array(positions))
        assert int(slots.seen[row]) == max(positions, default=-1) + 1
        np.testing.assert_array_equal(slots.filled[row].sum(-1), [count] * HEADS)


def test_fill_holds_each_prompt_without_its_padding():
    slots = fill(make_prompt())
    assert slots.capacity == TOKENS
    check(slots, [[*range(9)], [*range(4)], []])
    view = slots.view()
    assert view.k is slots.k
    np.testing.assert_array_equal(view.length, slots.length)


@pytest.mark.parametrize("window", [0, 1, 3, 8])
def test_the_window_holds_the_last_queries_in_time_order(window):
    slots = fill(make_prompt(), window=window)
    for pos in range(2):
        token = make_token(LENGTH + pos, (True, True, False))
        slots = settle(put(resize(slots, 12), token), token.q)
    queries = slots.window_queries()
    assert queries.shape == (BATCH, HEADS, GROUP, window, SIZE)
    for row, seen in ((0, 11), (1, 6)):
        real = min(window, seen)
        found = np.asarray(queries[row, :, :, window - real :, 0])
        np.testing.assert_array_equal(found, np.broadcast_to(np.arange(seen - real, seen), (HEADS, GROUP, real)))


def test_put_extends_active_rows_only():
    slots = resize(fill(make_prompt()), 11)
    token = make_token([9, 4, 0], (True, False, True))
    slots = put(slots, token)
    with pytest.raises(ValueError, match="not written yet"):
        put(slots, make_token([10, 4, 1], (True, True, False)))
    slots = settle(slots, token.q)
    check(slots, [[*range(10)], [*range(4)], [0]])
    token = make_token([10, 4, 1], (True, True, False))
    slots = settle(put(slots, token), token.q)
    check(slots, [[*range(11)], [*range(5)], [0]])


def test_queries_of_rows_that_have_ended_are_not_remembered():
    slots = resize(fill(make_prompt(), window=3), 10)
    token = make_token([9, 4, 0], (True, False, False))
    after = settle(put(slots, token), token.q)
    assert not np.array_equal(after.window[0], slots.window[0])
    np.testing.assert_array_equal(after.window[1:], slots.window[1:])


def test_recent_slots_are_the_last_filled_ones():
    slots = fill(make_prompt())
    for count in (0, 1, 4, 20):
        expected = [[i for i in range(n) if i >= n - count] for n in LENGTH]
        for row in range(BATCH):
            assert np.flatnonzero(slots.recent(count)[row, 1]).tolist() == expected[row]


choices = st.lists(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS), min_size=BATCH, max_size=BATCH)


@given(choices)
def test_keep_thins_without_changing_the_order(chosen):
    slots = fill(make_prompt())
    score = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.float32), slots.pos.shape)
    slots = replace(slots, extra={"score": score, "pair": jnp.stack([score, -score], axis=-1)})
    held = [[i for i in range(n) if chosen[row][i]] for row, n in enumerate(LENGTH)]
    index = np.array([positions + [TOKENS] * (TOKENS - len(positions)) for positions in held], np.int32)
    count = np.array([len(positions) for positions in held], np.int32)
    thin = keep(
        slots,
        jnp.broadcast_to(index[:, None], (BATCH, HEADS, TOKENS)),
        jnp.broadcast_to(count[:, None], (BATCH, HEADS)),
        fills={"score": -5.0},
    )
    for row, positions in enumerate(held):
        n, spare = len(positions), TOKENS - len(positions)
        np.testing.assert_array_equal(thin.length[row], [n] * HEADS)
        np.testing.assert_array_equal(thin.pos[row, 0], positions + [-1] * spare)
        np.testing.assert_array_equal(thin.k[row, 0, :n, 0], positions)
        np.testing.assert_array_equal(thin.v[row, 0, :n, 0], [-p for p in positions])
        np.testing.assert_array_equal(thin.extra["score"][row, 1], positions + [-5.0] * spare)
        np.testing.assert_array_equal(thin.extra["pair"][row, 0, :, 1], [-p for p in positions] + [0.0] * spare)


def test_resize_pads_with_the_fill_of_each_array():
    slots = fill(make_prompt(np.array([4, 2, 0])))
    slots = replace(slots, extra={"a": jnp.ones(slots.pos.shape), "b": jnp.ones((*slots.pos.shape, 2), jnp.int8)})
    wide = resize(slots, 12, fills={"a": -1.0})
    check(wide, [[*range(4)], [*range(2)], []])
    np.testing.assert_array_equal(wide.extra["a"][0, 0], [1.0] * TOKENS + [-1.0] * 3)
    np.testing.assert_array_equal(wide.extra["b"][0, 0, TOKENS:], np.zeros((3, 2)))
    assert wide.extra["b"].dtype == jnp.int8
    narrow = resize(wide, 4)
    check(narrow, [[*range(4)], [*range(2)], []])
    assert narrow.extra["b"].shape == (BATCH, HEADS, 4, 2)


@pytest.mark.parametrize("size", [0, 1, 3, 5, 7])
def test_max_pool_takes_the_largest_neighbour(size):
    score = np.random.default_rng(size).standard_normal((2, 3, 11)).astype(np.float32)
    half = size // 2
    padded = np.pad(score, ((0, 0), (0, 0), (half, half)), constant_values=-np.inf)
    expected = np.max([padded[..., i : i + 11] for i in range(max(size, 1))], axis=0)
    np.testing.assert_array_equal(max_pool(jnp.asarray(score), size), expected)


def test_slots_keep_the_dtype_of_the_cache():
    half = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, fill(make_prompt(), window=2)
    )
    token = make_token([3, 4, 0])
    after = settle(put(half, token), token.q)
    assert {after.k.dtype, after.v.dtype, after.window.dtype} == {jnp.dtype(jnp.bfloat16)}
