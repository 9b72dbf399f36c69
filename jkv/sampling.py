"""From logits to token ids: pure functions, all arithmetic in float32.

The warpers follow transformers (a removed entry becomes -inf, at least one always survives) and need no model.
Top-p finds its cut by a search over float32 bit patterns, a few bits at a time, because sorting a vocabulary at every
step costs about ten times as much on a CPU; equal probabilities at the cut are kept lowest index first, on every
backend.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

_TINY = float(np.finfo(np.float32).tiny)  # smallest float32 that XLA does not flush to zero
_SUM_ERROR = 1 + 1e-6  # float32 noise: 0.15 + 0.05 must not exceed the 0.2 that a top_p of 0.8 leaves out
_ONE_AS_BITS = 0x3F800000  # the float32 1.0 as an integer; non-negative floats order as their bits do
_WAYS = 12  # parts that one pass over the vocabulary cuts the range of bit patterns into


def temperature(logits: ArrayLike, t: float) -> jax.Array:
    """Divides logits `[..., V]` by `t` > 0 (1 changes nothing). Raises ValueError for any other `t`."""
    if not t > 0:
        raise ValueError(f"temperature={t!r} cannot divide logits; use Sampling(temperature=0) for greedy decoding")
    return _to_float32(logits) / max(t, _TINY)


def top_k(logits: ArrayLike, k: int) -> jax.Array:
    """Keeps the `k` largest of logits `[..., V]` and all that equal the k-th; 0 is off, more than V keeps all."""
    logits = _to_float32(logits)
    if not 0 < k < logits.shape[-1]:
        return logits
    # jnp.min, not a slice: XLA turns a sliced top_k into a sort of the whole vocabulary.
    kth = jnp.min(jax.lax.top_k(logits, k)[0], axis=-1, keepdims=True)
    return _keep(logits, logits >= kth)


def top_p(logits: ArrayLike, p: float) -> jax.Array:
    """Keeps the fewest of logits `[..., V]` whose probabilities sum to at least `p` (0 to 1; 1 is off)."""
    logits = _to_float32(logits)
    if p >= 1:
        return logits
    return _keep(logits, _find_nucleus(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), p))


def min_p(logits: ArrayLike, p: float) -> jax.Array:
    """Keeps those of logits `[..., V]` at least `p` (0 to 1; 0 is off) times as probable as the most probable one."""
    logits = _to_float32(logits)
    if p <= 0:
        return logits
    probs = jax.nn.softmax(logits, axis=-1)
    best = jnp.max(probs, axis=-1, keepdims=True)
    return _keep(logits, (probs >= p * best) | (probs == best))


def repetition(logits: ArrayLike, seen: ArrayLike, penalty: float) -> jax.Array:
    """Makes seen tokens less likely: positive logits are divided by `penalty`, negative ones multiplied.

    Args:
        logits: `[..., V]`.
        seen: bool `[..., V]`, the tokens of the prompt and of the answer so far.
        penalty: above 1 discourages, below 1 encourages, 1 is off.
    """
    logits = _to_float32(logits)
    return jnp.where(jnp.asarray(seen), jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        temperature: divisor of the logits; 0 is greedy (the largest logit, the lowest index of equal ones).
        top_k: tokens kept; 0 is off.
        top_p: probability mass kept, 0 to 1; 1 is off.
        min_p: smallest probability kept, as a share of the largest, 0 to 1; 0 is off.
        repetition_penalty: divisor of the logits of tokens seen before; 1 is off. Applies to greedy decoding too.

    Raises:
        ValueError: a value is outside its range or not a number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        _check("temperature", self.temperature, lambda t: 0 <= t < math.inf, "a finite number >= 0; 0 is greedy")
        _check("top_p", self.top_p, lambda p: 0 <= p <= 1, "between 0 and 1; 1 is off")
        _check("min_p", self.min_p, lambda p: 0 <= p <= 1, "between 0 and 1; 0 is off")
        _check("repetition_penalty", self.repetition_penalty, lambda r: 0 < r < math.inf, "above 0; 1 is off")
        _check("top_k", self.top_k, lambda k: isinstance(k, (int, np.integer)) and k >= 0, "an integer >= 0; 0 is off")

    @property
    def greedy(self) -> bool:
        """Whether no randomness is used."""
        return self.temperature == 0


def sample(logits: ArrayLike, keys: jax.Array | None, sampling: Sampling, seen: ArrayLike | None = None) -> jax.Array:
    """Draws one token a row.

    Args:
        logits: `[B, V]`, any float dtype; computed on in float32.
        keys: `[B]` random keys, one a row (see `row_keys`); unused, and may be None, when greedy.
        sampling: static settings, applied in transformers' order: penalty, temperature, top-k, top-p, min-p.
        seen: bool `[B, V]`, the tokens already in each row; needed only for a repetition penalty.

    Returns:
        int32 `[B]`.

    Raises:
        ValueError: a repetition penalty without `seen`, or random sampling without `keys`.
    """
    logits = _to_float32(logits)
    if sampling.repetition_penalty != 1:
        if seen is None:
            raise ValueError("repetition_penalty needs `seen`, the bool [B, V] mask of tokens already in each row")
        logits = repetition(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if keys is None:
        raise ValueError("temperature > 0 needs `keys`, one random key a row; make them with row_keys")
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)  # so that a tiny temperature overflows to -inf only
    logits = temperature(logits, sampling.temperature)
    logits = top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = _keep(logits, _find_nucleus(jnp.exp(logits), sampling.top_p))
    logits = min_p(logits, sampling.min_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def check_seed(seed: int) -> int:
    """Returns the seed as an int. Raises ValueError unless it is an integer with 0 <= seed < 2**63."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r} must be an integer from 0 to {2**63 - 1}")
    return int(seed)


def seed_words(seed: int) -> np.ndarray:
    """The seed as uint32 `[2]`, high word first: an array, so that a new seed does not recompile what uses it."""
    seed = check_seed(seed)
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def row_keys(words: ArrayLike, rows: ArrayLike, steps: ArrayLike) -> jax.Array:
    """Random keys that depend on nothing but the seed, the row's own id and its step.

    Args:
        words: uint32 `[2]` from `seed_words`.
        rows: uint32 `[B]`, an id of each row that does not change with its place in the batch.
        steps: int32 `[B]`, tokens each row has drawn so far.

    Returns:
        Typed keys `[B]`. Below 2**32 a seed starts from the same key as `jax.random.key(seed)`; unlike there, larger
        ones stay distinct without 64-bit mode.
    """
    base = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")

    def fold(row: jax.Array, step: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(base, row), step)

    return jax.vmap(fold)(jnp.asarray(rows, jnp.uint32), jnp.asarray(steps, jnp.int32))


def _to_float32(logits: ArrayLike) -> jax.Array:
    return jnp.asarray(logits, jnp.float32)


def _keep(logits: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.where(kept, logits, -jnp.inf)


@partial(jax.jit, static_argnums=1)
def _find_nucleus(weights: jax.Array, p: float) -> jax.Array:
    """Mask `[..., V]` of the fewest weights that make a share of at least `p` of all; the largest weight is 1."""
    share = (1 - p) * _SUM_ERROR
    rest = jnp.float32(share) * jnp.sum(weights, axis=-1, keepdims=True)
    # Weights up to the cut exceed `rest`, which is `share` or more, so the cut is no less than the mean of those.
    least = int(np.float32(share / weights.shape[-1] / 2).view(np.int32)) - 1
    low, span = jnp.full(rest.shape, least, jnp.int32), _ONE_AS_BITS - least
    while span > 1:  # the cut is after `low`, at most `span` patterns away
        span = -(-span // _WAYS)
        patterns = [low + span * i for i in range(1, _WAYS)]
        masses = _masses(weights, [jax.lax.bitcast_convert_type(x, jnp.float32) for x in patterns])
        low = low + span * sum((mass <= rest).astype(jnp.int32) for mass in masses)
    cut = jax.lax.bitcast_convert_type(low + 1, jnp.float32)
    below = jnp.sum(jnp.where(weights < cut, weights, 0), axis=-1, keepdims=True)
    ties = weights == cut
    ties_from_here = jax.lax.cumsum(ties.astype(jnp.float32), axis=weights.ndim - 1, reverse=True)
    largest = jax.nn.one_hot(jnp.argmax(weights, axis=-1), weights.shape[-1], dtype=bool)
    return (weights > cut) | (ties & (below + cut * ties_from_here > rest)) | largest


def _masses(weights: jax.Array, cuts: Sequence[jax.Array]) -> list[jax.Array]:
    """Sum of the weights up to each cut, `[..., 1]`; one reduction, so that the weights are read once."""
    parts = [jnp.where(weights <= cut, weights, 0) for cut in cuts]

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [x + y for x, y in zip(a, b, strict=True)]

    sums = jax.lax.reduce(parts, [jnp.float32(0)] * len(parts), add, (weights.ndim - 1,))
    return [x[..., None] for x in sums]


def _check(name: str, value, accepts, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not accepts(value):
        raise ValueError(f"{name}={value!r} must be {wanted}")
