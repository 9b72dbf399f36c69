"""A cache with keys of low rank as a value: `Shadow`, and the pure functions that make one and let it grow."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jkv.cache import STATIC, Prompt, Slots, keep
from jkv.config import RopeConfig
from jkv.models import rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shadow:
    """The cache of one layer. Chunk i is the tokens at the positions ``i * size .. (i + 1) * size - 1``.

    Attributes:
        exact: tokens whose keys are kept: those of the chunks that are `fresh`, then what is read at every step:
            chunks with outliers among their keys, and everything after the chunks.
        a, b: factors of the keys before RoPE, `[B, T, R]` and `[B, H, R, D]`; all heads share `a`.
        v: values, `[B, H, T, D]`.
        landmarks: mean key of each chunk, `[B, H, N, D]`.
        candidate: chunks that may be chosen, bool `[B, H, N]`.
        chunks: chunks so far, int32 `[B]`.
        fresh: chunks chosen in every step so far, int32 `[B, H, K]`, N in the place of one that was not; K is 0
            unless their exact keys are used.
        rope: of the keys; static.
    """

    exact: Slots
    a: Array
    b: Array
    v: Array
    landmarks: Array
    candidate: Array
    chunks: Array
    fresh: Array
    rope: RopeConfig = field(metadata=STATIC)

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.v.shape[2] // self.landmarks.shape[2]

    @property
    def begin(self) -> int:
        """First of the slots that are read at every step."""
        return self.fresh.shape[2] * self.size

    @property
    def length(self) -> Array:
        """Tokens that can be read, int32 `[B, H]`."""
        return self.exact.length - self.begin + self.size * jnp.sum(self.candidate, axis=-1, dtype=jnp.int32)


def mean_keys(keys: Array) -> Array:
    """Landmarks `[B, H, N, D]` of keys after RoPE `[B, H, N, size, D]`."""
    return jnp.mean(keys.astype(jnp.float32), axis=3).astype(keys.dtype)


def factor(prompt: Prompt, rank: int) -> tuple[Array, Array]:
    """The best product of that rank for the keys before RoPE, those of all heads side by side.

    Returns:
        `[B, T, R]` and `[B, H, R, D]`, the second with orthonormal rows over all heads together; R is at most H D.
    """
    batch, heads, length, size = prompt.k_pre.shape
    real = jnp.arange(length, dtype=jnp.int32)[None] < prompt.length[:, None]
    keys = jnp.where(real[:, None, :, None], prompt.k_pre, 0)
    wide = jnp.moveaxis(keys, 1, 2).reshape(batch, length, heads * size).astype(jnp.float32)
    rank = min(rank, heads * size)
    vectors = sharpen(wide, jnp.linalg.eigh(multiply("bti,btj->bij", wide, wide))[1], rank)
    a = multiply("bti,bir->btr", wide, vectors)
    b = jnp.moveaxis(vectors.reshape(batch, heads, size, rank), 2, 3)
    return a.astype(prompt.k.dtype), b.astype(prompt.k.dtype)


def sharpen(x: Array, vectors: Array, rank: int) -> Array:
    """The last `rank` of the eigenvectors of ``x.T @ x``, turned out of the others by the first order of what is left.

    In float32 an eigenvector is known to the ratio of the largest eigenvalue to the gap; this makes the space of the
    last ones as good as that of a singular value decomposition of `x`.

    Args:
        x: float32 `[B, T, I]`.
        vectors: by ascending eigenvalue, `[B, I, I]`.
        rank: how many.
    """
    rest, last = jnp.split(vectors, [vectors.shape[-1] - rank], axis=-1)
    along_rest, along_last = (multiply("bti,bij->btj", x, part) for part in (rest, last))
    gap = jnp.sum(along_last**2, axis=1)[:, None] - jnp.sum(along_rest**2, axis=1)[..., None]
    mixed = multiply("bti,btj->bij", along_rest, along_last)
    turn = jnp.where(jnp.abs(mixed) < 0.1 * gap, mixed / jnp.where(gap > 0, gap, 1), 0)
    return last + multiply("bij,bjr->bir", rest, turn)


def multiply(axes: str, x: Array, y: Array) -> Array:
    """A product in float32, not rounded to TensorFloat-32, in which small eigenvalues would drown."""
    return jnp.einsum(axes, x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def fold(store: Shadow, rows: Array, *, size: int, local: int, most: int) -> Shadow:
    """Makes chunks of the exact tokens after the chunks, but for the last `local` chunks and what fills none.

    Args:
        store: the cache.
        rows: which to do so for, bool `[B]`.
        size: tokens of a chunk.
        local: whole chunks that stay exact.
        most: chunks to make, at most.
    """
    exact = store.exact
    batch, heads, capacity = exact.pos.shape
    first = store.chunks * size  # position of the first token after the chunks, `[B]`
    start = exact.length - jnp.sum(exact.pos >= first.reshape(-1, 1, 1), axis=-1, dtype=jnp.int32)
    count = jnp.clip((exact.length - start)[:, 0] // size - local, 0, most)  # the same in all heads
    count = jnp.where(rows, count, 0)

    token = jnp.arange(most * size, dtype=jnp.int32)
    slot = jnp.minimum(start[..., None] + token.reshape(1, 1, -1), capacity - 1)[..., None]
    k, v = (jnp.take_along_axis(x, slot, axis=2) for x in (exact.k, exact.v))
    cos, sin = rope.cos_sin(store.rope, k.shape[-1], first[:, None] + token[None])
    norm = (cos * cos + sin * sin)[:, None]
    k_pre = rope.rotate(k, cos[:, None] / norm, -sin[:, None] / norm)
    a = multiply("bhtd,bhrd->btr", k_pre, store.b)
    landmarks = mean_keys(k.reshape(batch, heads, most, size, -1))

    # What is not made is written out of bounds, which is dropped.
    row, head = jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.arange(heads, dtype=jnp.int32)
    made = jnp.arange(most, dtype=jnp.int32)[None]
    chunk = jnp.where(made < count[:, None], store.chunks[:, None] + made, store.landmarks.shape[2])
    to = jnp.where(token[None] < size * count[:, None], first[:, None] + token[None], store.v.shape[2])

    def put_at(x: Array, index: Array, value: Array) -> Array:
        at = (row[:, None], head.reshape(1, -1, 1), index[:, None])
        return x.at[at].set(value.astype(x.dtype), mode="drop")

    slots = jnp.arange(capacity, dtype=jnp.int32).reshape(1, 1, -1)
    moved = (size * count)[:, None]
    left = exact.length - moved
    index = jnp.where(
        slots < left[..., None], slots + jnp.where(slots >= start[..., None], moved[..., None], 0), capacity
    )
    return replace(
        store,
        exact=keep(exact, index, left, fills={}),
        a=store.a.at[row, to].set(a.astype(store.a.dtype), mode="drop"),
        v=put_at(store.v, to, v),
        landmarks=put_at(store.landmarks, chunk, landmarks),
        candidate=put_at(store.candidate, chunk, jnp.ones((1, 1, 1), bool)),
        chunks=store.chunks + count,
    )


def find(these: Array, those: Array, none: int) -> Array:
    """Which of `these` `[B, H, K]` are among `those` `[B, H, M]` and not `none`."""
    return jnp.any(these[..., None] == those[:, :, None], axis=-1) & (these != none)


def cosine(x: Array, y: Array) -> Array:
    """Cosine along the last axis in float32, with norms of 1e-8 at least."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    norms = (jnp.maximum(jnp.linalg.norm(z, axis=-1), 1e-8) for z in (x, y))
    return jnp.sum(x * y, axis=-1) / jnp.prod(jnp.stack(jnp.broadcast_arrays(*norms)), axis=0)


def pad_prompt(prompt: Prompt, length: int) -> Prompt:
    """The prompt with room for `length` tokens."""
    room = length - prompt.k.shape[2]

    def pad(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, room if i == axis else 0) for i in range(x.ndim)])

    return replace(
        prompt,
        q=pad(prompt.q, 3),
        k=pad(prompt.k, 2),
        v=pad(prompt.v, 2),
        k_pre=pad(prompt.k_pre, 2),
        tokens=pad(prompt.tokens, 1),
    )
