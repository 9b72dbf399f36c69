"""`pallas_kernels.decode_attention` as a Mosaic GPU kernel, for releases of jax whose Mosaic has `mma` (0.11.2 on).

A program takes one part of the filled slots of one kv head, for all query heads of its group, so that keys and values
are read once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.mosaic_part import attend_part
from pallas_kernels.decode_attention.mosaic_pipeline import plgpu
from pallas_kernels.decode_attention.split import Cache, Partials, Token, combine, pack, pad_group, splits_for
from pallas_kernels.dispatch import Gpu, Implementation

THREADS = 128
ROWS, COLUMNS = 16, 32  # of a product that four warps make at once
SWIZZLED = 8  # slots, in shared memory, that a tile is made of


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        slots: slots of one step of a program.
        splits: parts of a row.
        stages: steps whose keys and values are in shared memory, the one being computed included.
    """

    slots: int
    splits: int
    stages: int


def tiles(k: jax.ShapeDtypeStruct | Array, gpu: Gpu) -> Tiles:
    """Tiles for a cache `[B, H, C, D]`: 16 KiB of keys a step, and as many stages as let a core hold two programs."""
    batch, heads, capacity, size = k.shape
    slots = max(COLUMNS, 1 << (min(8192 // size, capacity).bit_length() - 1))
    step = 2 * slots * size * k.dtype.itemsize
    stages = 3 if 2 * 3 * step < 0.9 * gpu.shared_memory else 2
    return Tiles(slots, splits_for(batch * heads, capacity, slots, gpu), stages)


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    length: Array,
    new: NewToken | None = None,
    notes: Notes | None = None,
    *,
    beside: Share | None,
    return_probs: bool,
    implementation: Implementation,
) -> Attended:
    """One kernel; XLA combines the parts if there are several, and makes probabilities of the logits.

    Interpreted, it copies as TMA does, on every card, and looks for races.

    Raises:
        ValueError: the dtype, head_dim, group or capacity does not fit; the message says what does.
    """
    cut, group = tiles(k, implementation.gpu), q.shape[2]
    check(q, k, cut)
    wanted = {"group": group, "logits": return_probs, "implementation": implementation}
    if new is None:
        cache = Cache(k, v)
        partials = attend_parts(pad_group(q.astype(k.dtype)), cache, length, None, cut, **wanted)
    else:
        refs = jax.tree.map(jax.new_ref, Cache.of(k, v, notes))
        token = Token(new.active.astype(jnp.int32), notes.place if notes else None)
        partials = attend_parts(pad_group(pack(q, new).astype(k.dtype)), refs, length, token, cut, **wanted)
        cache = jax.tree.map(jax.freeze, refs)
    out, probs = combine(partials, length, beside, group=group)
    return cache.attended(out, probs, notes)


def check(q: Array, k: Array, cut: Tiles) -> None:
    """Raises ValueError for what the kernel cannot take."""
    group, (capacity, size) = q.shape[2], k.shape[2:]
    problem = None
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        problem = f"multiplies bfloat16 and float16, got {k.dtype}"
    elif size % COLUMNS or not 64 <= size <= 256:
        problem = f"gives each of four warps 8 columns: head_dim in multiples of {COLUMNS} from 64 to 256, got {size}"
    elif group > ROWS:
        problem = f"takes up to {ROWS} query heads for a kv head, got {group}"
    elif capacity % SWIZZLED or capacity < cut.slots:
        problem = f"copies {SWIZZLED} slots together: a capacity in multiples, {cut.slots} or more, got {capacity}"
    if problem:
        raise ValueError(f"decode_attention: mosaic {problem}; use triton or xla")


def attend_parts(
    q: Array,
    cache: Cache,
    length: Array,
    token: Token | None,
    cut: Tiles,
    *,
    group: int,
    logits: bool,
    implementation: Implementation,
) -> Partials:
    """The parts.

    Args:
        q: queries `[B, H, P, D]`, P at least 16; with a new token, its key and its value are the two rows after the
            group.
        cache: arrays, or references that a new token is written to.
        length: filled slots, the new token's included, int32 `[B, H]`.
        token: the new token, or None.
        cut: how the work is cut.
        group: G.
        logits: whether they are wanted.
        implementation: the GPU, and whether to interpret.
    """
    batch, heads, capacity, size = cache.k.shape
    dtype = q.dtype
    array: Any = jax.ShapeDtypeStruct
    tile = partial(plgpu.SMEM, dtype=dtype)
    scratch = {
        "k_tiles": tile((cut.stages, cut.slots, size)),
        "v_tiles": tile((cut.stages, cut.slots, size)),
        "weights": tile((ROWS, cut.slots)),
    }
    if implementation.gpu.capability >= 90 or implementation.interpret:
        scratch["landed"] = plgpu.Barrier(num_barriers=2 * cut.stages)
    if logits:
        scratch["saved"] = tile((ROWS, cut.slots), dtype=jnp.float32)
    parts = (batch, heads, cut.splits, ROWS)
    # Whole tiles, and of the padding as many rows as give every thread as much to store.
    saved = (pl.cdiv(group * cut.slots, THREADS) * THREADS // cut.slots, pl.cdiv(capacity, cut.slots) * cut.slots)
    outputs = Partials(
        out=array((*parts, size), dtype if cut.splits == 1 else jnp.float32),
        lse=array(parts, jnp.float32),
        logits=array((batch, heads, *saved), jnp.float32) if logits else None,
    )
    (partials,) = plgpu.kernel(
        partial(attend_part, group=group, interpret=implementation.interpret),
        out_type=(outputs,),
        scratch_types=scratch,
        grid=parts[:3],
        grid_names=("row", "head", "part"),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=4096),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if implementation.interpret else None,
        kernel_name="decode_attention",
    )(length, q, token, cache)
    if logits and (rest := capacity % cut.slots):
        # The last tile starts early, see `Pipeline.slot`.
        pieces = partials.logits[..., : capacity - rest], partials.logits[..., -rest:]
        partials = partials._replace(logits=jnp.concatenate(pieces, axis=-1))
    return partials
