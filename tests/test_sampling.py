"""Warpers against recorded tables and, where torch is installed, against transformers; drawing and seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import sampling
from jkv.sampling import Sampling, check_seed, row_keys, seed_words

sample = jax.jit(sampling.sample, static_argnums=2)
compiled_row_keys = jax.jit(row_keys)
FOUR = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def kept(logits) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.asarray(logits))).tolist())


def keys_of(seed: int, rows, step: int = 0) -> jax.Array:
    rows = np.asarray(rows, np.uint32)
    return compiled_row_keys(seed_words(seed), rows, np.full(rows.shape, step, np.int32))


# What transformers 5.24 keeps.
@pytest.mark.parametrize(
    ("warper", "value", "survivors"),
    [
        (sampling.top_p, 0.0, {0}),
        (sampling.top_p, 0.5, {0}),
        (sampling.top_p, 0.5001, {0, 1}),
        (sampling.top_p, 0.8, {0, 1}),
        (sampling.top_p, 0.8001, {0, 1, 2}),
        (sampling.top_p, 0.96, {0, 1, 2, 3}),
        (sampling.top_p, 1.0, {0, 1, 2, 3}),
        (sampling.top_k, 0, {0, 1, 2, 3}),
        (sampling.top_k, 1, {0}),
        (sampling.top_k, 3, {0, 1, 2}),
        (sampling.top_k, 10, {0, 1, 2, 3}),
        (sampling.min_p, 0.0, {0, 1, 2, 3}),
        (sampling.min_p, 0.2, {0, 1, 2}),
        (sampling.min_p, 0.4, {0, 1}),
        (sampling.min_p, 1.0, {0}),
    ],
)
def test_warper_keeps_the_recorded_tokens(warper, value, survivors):
    out = np.asarray(warper(FOUR, value))
    assert kept(out) == survivors
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out[list(survivors)], FOUR[list(survivors)])


def test_top_k_keeps_every_token_tied_at_rank_k():
    assert kept(sampling.top_k(jnp.array([1.0, 3.0, 2.0, 2.0, 0.0]), 2)) == {1, 2, 3}


def test_top_p_keeps_the_lowest_indices_of_tokens_tied_at_its_cut():
    assert kept(sampling.top_p(jnp.zeros(4), 0.5)) == {0, 1}
    assert kept(sampling.top_p(jnp.zeros(4), 0.0)) == {0}


def test_top_p_is_not_misled_by_the_rounding_of_sums():
    rng = np.random.default_rng(0)
    for _ in range(12):
        shares = np.sort(rng.choice(np.arange(1, 100), 6, replace=False))[::-1]
        last = rng.integers(1, 5)
        out = sampling.top_p(np.log((shares / shares.sum()).astype(np.float32)), shares[:last].sum() / shares.sum())
        assert kept(out) == set(range(last))


def test_a_peaked_row_survives_every_warper():
    peaked = jnp.array([-500.0, 90.0, -500.0])
    for warper, value in ((sampling.top_p, 0.01), (sampling.min_p, 1.0), (sampling.top_k, 1)):
        assert kept(warper(peaked, value)) == {1}


def test_repetition_divides_positive_and_multiplies_negative_logits():
    out = sampling.repetition(jnp.array([2.0, -2.0, 1.0]), jnp.array([True, True, False]), 2.0)
    np.testing.assert_array_equal(out, [1.0, -4.0, 1.0])


def test_temperature_divides_and_refuses_what_cannot_divide():
    np.testing.assert_array_equal(sampling.temperature(jnp.array([1.0, -3.0]), 2.0), [0.5, -1.5])
    for t in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature="):
            sampling.temperature(jnp.zeros(2), t)


@pytest.mark.parity
@pytest.mark.parametrize("vocabulary", [5, 1000])
def test_warpers_agree_with_transformers(vocabulary):
    torch = pytest.importorskip("torch", reason="the live comparison with transformers needs torch")
    warpers = pytest.importorskip("transformers.generation.logits_process", reason="needs transformers")
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((6, vocabulary)) * [[0.1], [1], [3], [10], [30], [3]]).astype(np.float32)
    logits[5] = np.round(logits[5])  # ties for top-k
    ids = rng.integers(0, vocabulary, (6, 3))
    seen = np.zeros((6, vocabulary), bool)
    np.put_along_axis(seen, ids, True, axis=1)

    def check(ours, theirs, rows=slice(None)):
        expected = theirs(torch.tensor(ids[rows]), torch.tensor(logits[rows])).numpy()
        np.testing.assert_allclose(np.asarray(ours(logits[rows])), expected, rtol=1e-6)

    for t in (0.1, 0.7, 3.0):
        check(lambda x, t=t: sampling.temperature(x, t), warpers.TemperatureLogitsWarper(t))
    for k in (1, 4, vocabulary, vocabulary + 7):
        check(lambda x, k=k: sampling.top_k(x, k), warpers.TopKLogitsWarper(k))
    for p in (0.0, 0.1, 0.53, 0.9, 0.95, 0.999):
        check(lambda x, p=p: sampling.top_p(x, p), warpers.TopPLogitsWarper(p), slice(0, 5))
        check(lambda x, p=p: sampling.min_p(x, p), warpers.MinPLogitsWarper(p))
    for r in (0.5, 1.3, 5.0):
        check(lambda x, r=r: sampling.repetition(x, seen, r), warpers.RepetitionPenaltyLogitsProcessor(r))


def test_top_p_keeps_the_smallest_sufficient_set():
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((16, 300)) * 4, 1).astype(np.float32)  # with ties
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(-1, keepdims=True)
    for p in (0.05, 0.37, 0.81, 0.97):
        out = np.isfinite(np.asarray(sampling.top_p(logits, p)))
        for row, mask in zip(probs, out, strict=True):
            assert row[mask].sum() >= p - 2e-6
            assert row[mask].sum() - row[mask].min() < p
            assert mask[row > row[mask].min()].all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_greedy_takes_the_lowest_index_of_equal_logits(dtype):
    logits = jnp.array([[0, 7, 7, 1], [3, 3, 3, 3]], dtype)
    assert sample(logits, None, Sampling()).tolist() == [1, 0]


def test_float32_logits_are_never_rounded_to_bfloat16():
    logits = np.full((1, 64), 9.99, np.float32)
    logits[0, 40] = 10.0
    rounded = jnp.asarray(logits, jnp.bfloat16)
    assert len(np.unique(np.asarray(rounded, np.float32))) == 1  # the two would tie in bfloat16
    assert sample(rounded, None, Sampling()).tolist() == [0]
    for settings in (Sampling(), Sampling(temperature=1e-4, top_p=0.9, top_k=5), Sampling(temperature=1.0, top_p=0.0)):
        assert sample(logits, keys_of(0, [0]), settings).tolist() == [40]


@pytest.mark.parametrize("tiny", [1e-6, 1e-30, 1e-44])
def test_a_tiny_temperature_is_greedy(tiny):
    logits = np.random.default_rng(1).standard_normal((16, 50)).astype(np.float32) * 200
    greedy = sample(logits, None, Sampling())
    settings = Sampling(temperature=tiny, top_k=5, top_p=0.9, min_p=0.01)
    assert sample(logits, keys_of(3, range(16)), settings).tolist() == greedy.tolist()


def test_repetition_penalty_applies_to_greedy_and_needs_the_seen_mask():
    settings = Sampling(repetition_penalty=2.0)
    logits, seen = jnp.array([[4.0, 3.0, -1.0]]), jnp.array([[True, False, False]])
    assert sample(logits, None, settings, seen).tolist() == [1]
    with pytest.raises(ValueError, match="seen"):
        sample(logits, None, settings)


def test_random_sampling_needs_keys():
    with pytest.raises(ValueError, match="row_keys"):
        sample(jnp.zeros((1, 4)), None, Sampling(temperature=1.0))


def test_penalty_comes_before_temperature_and_top_p_after_top_k():
    logits = jnp.array([[2.0, 1.9, -1.0]])
    seen = jnp.array([[True, False, False]])
    settings = Sampling(temperature=1e-3, repetition_penalty=1.2)
    assert sample(logits, keys_of(0, [0]), settings, seen).tolist() == [1]
    # Alone, top_p=0.6 keeps two of these; of the two that top_k leaves, the first already holds 0.6.
    uneven = jnp.log(jnp.array([[0.36, 0.24, 0.2, 0.2]]))
    draws = sample(jnp.tile(uneven, (256, 1)), keys_of(1, range(256)), Sampling(temperature=1.0, top_k=2, top_p=0.59))
    assert set(draws.tolist()) == {0}


@pytest.mark.parametrize("settings", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=6, top_p=0.9)])
def test_draws_follow_the_distribution(settings):
    rows, logits = 8192, np.random.default_rng(7).standard_normal(8).astype(np.float32)
    warped = sampling.top_p(sampling.top_k(logits / settings.temperature, settings.top_k), settings.top_p)
    probs = np.asarray(jax.nn.softmax(warped), np.float64)
    draws = np.asarray(sample(np.tile(logits, (rows, 1)), keys_of(11, range(rows)), settings))
    counts = np.bincount(draws, minlength=8)
    assert counts[probs == 0].sum() == 0
    expected = rows * probs[probs > 0]
    chi_squared = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert len(expected) >= 5
    assert chi_squared < 24.3  # the 99.9 % point at 7 degrees of freedom


def test_a_row_draws_the_same_alone_and_in_any_batch():
    logits = np.random.default_rng(5).standard_normal((7, 100)).astype(np.float32)
    settings, rows = (
        Sampling(temperature=1.0, top_p=0.95, min_p=0.01),
        np.array([9, 2, 7, 0, 5, 2**32 - 1, 4], np.uint32),
    )
    together = sample(logits, keys_of(1, rows, 3), settings)
    order = np.array([6, 0, 3, 1, 5, 2, 4])
    assert len(set(together.tolist())) >= 5
    assert sample(logits[order], keys_of(1, rows[order], 3), settings).tolist() == together[order].tolist()
    for i in range(7):
        assert sample(logits[i : i + 1], keys_of(1, rows[i : i + 1], 3), settings).tolist() == [int(together[i])]


def test_seed_row_and_step_each_change_the_key():
    cases = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**32, 0, 0), (2**32 + 1, 0, 0), (2**63 - 1, 0, 0), (1, 1, 1)]
    data = [tuple(jax.random.key_data(keys_of(s, [r], t))[0].tolist()) for s, r, t in cases]
    assert len(set(data)) == len(cases)


def test_keys_do_not_depend_on_64_bit_mode():
    narrow = jax.random.key_data(keys_of(2**40 + 3, [1, 2], 5))
    logits = np.random.default_rng(2).standard_normal((2, 30)).astype(np.float32)
    settings = Sampling(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    drawn = sample(logits, keys_of(2**40 + 3, [1, 2], 5), settings, logits > 1)
    with jax.enable_x64(True):
        assert jax.random.key_data(keys_of(2**40 + 3, [1, 2], 5)).tolist() == narrow.tolist()
        wide = sample(logits, keys_of(2**40 + 3, [1, 2], 5), settings, logits > 1)
        assert wide.dtype == jnp.int32
        assert sample(logits, None, Sampling()).dtype == jnp.int32
    assert wide.tolist() == drawn.tolist()


def test_a_new_seed_does_not_recompile():
    traced = []

    def draw(words, settings):
        traced.append(settings)
        keys = row_keys(words, jnp.arange(3, dtype=jnp.uint32), jnp.zeros(3, jnp.int32))
        return sample(jnp.zeros((3, 1000)), keys, settings)

    jitted = jax.jit(draw, static_argnums=1)
    draws = [tuple(jitted(seed_words(s), Sampling(temperature=1.0)).tolist()) for s in (0, 1, 2**32, 2**62)]
    assert len(set(draws)) == 4
    assert traced == [Sampling(temperature=1.0)]


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "1", None])
def test_seeds_outside_the_range_are_refused_in_one_line(seed):
    with pytest.raises(ValueError, match=r"^seed=.* must be an integer from 0 to 9223372036854775807$"):
        check_seed(seed)


def test_seeds_at_the_ends_of_the_range_are_accepted():
    assert [check_seed(s) for s in (0, np.int64(5), 2**63 - 1)] == [0, 5, 2**63 - 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0.5"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_p", float("nan")),
        ("min_p", 2),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
    ],
)
def test_bad_settings_are_refused_in_one_line(field, value):
    with pytest.raises(ValueError, match=f"^{field}=.* must be ") as caught:
        Sampling(**{field: value})
    assert "\n" not in str(caught.value)


def test_settings_are_hashable_and_know_when_they_are_greedy():
    assert hash(Sampling(temperature=0.5)) == hash(Sampling(temperature=0.5))
    assert Sampling().greedy and not Sampling(temperature=0.5).greedy
