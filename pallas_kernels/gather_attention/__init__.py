"""One query token a row over some pages of a cache, and its end."""

from dataclasses import dataclass, field

import jax
from jax import Array

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.dispatch import Implementation, run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Which slots of a cache are read. Page i is the slots ``i * size .. (i + 1) * size - 1``.

    Attributes:
        index: pages, int32 `[B, H, J, N]`, none of them twice; J is 1 for one list for all query heads of a kv head, or
            G for a list each. C / size, rounded up, or more is no page, and may stand anywhere.
        start: slots from here to the last filled one are read too, and of the pages only slots before it, int32
            `[B, H, J]`.
        size: slots of a page, a power of two from 1 to 64.
    """

    index: Array
    start: Array
    size: int = field(metadata={"static": True})


def gather_attention(
    q: Array,
    k: Array,
    v: Array,
    length: Array,
    pages: Pages,
    new: NewToken | None = None,
    notes: Notes | None = None,
    *,
    beside: Share | None = None,
    implementation: Implementation | str = "xla",
) -> Attended:
    """Softmax attention of one token per row over some of the slots ``0 .. length - 1``, read where they are.

    Args:
        q: queries `[B, H, G, D]`.
        k, v: cached keys and values `[B, H, C, D]`.
        length: filled slots, int32 `[B, H]`.
        pages: the slots to read. A row without any gives zeros.
        new: a token to write to slot ``length - 1`` of the active rows before attending, as `decode_attention` does.
            It must not be in a listed page unless that page's slots are read from `start` on.
        notes: where the new token's position and queries are written at the same time.
        beside: attention over tokens that are in no slot.
        implementation: what runs it.
    """
    return run("gather_attention", implementation, q, k, v, length, pages, new, notes, beside=beside)
