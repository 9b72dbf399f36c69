"""One query token a row over the filled prefix of a cache."""

from typing import NamedTuple

from jax import Array

from pallas_kernels.dispatch import Implementation, run


class NewToken(NamedTuple):
    """The token being decoded, not yet in the cache.

    Attributes:
        k, v: `[B, H, D]`.
        active: rows that have one, bool `[B]`.
    """

    k: Array
    v: Array
    active: Array


class Notes(NamedTuple):
    """What is noted of a new token beside its key and value.

    Attributes:
        place: its position in the text, int32 `[B]`.
        pos: positions of the tokens in all slots, int32 `[B, H, C]`.
        window: queries of the last W tokens, `[B, H, W, G, D]`; the token at position p has index p mod W.
    """

    place: Array
    pos: Array
    window: Array


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: `[B, H, G, D]` in the values' dtype.
        probs: float32 `[B, H, G, C]`, 0 beyond the length; None unless asked for.
        k, v: the cache `[B, H, C, D]`, with the new token in it if there was one.
        notes: with the new token in them; None where there were none.
    """

    out: Array
    probs: Array | None
    k: Array
    v: Array
    notes: Notes | None = None


class Share(NamedTuple):
    """Attention over S other sets of tokens, to be weighed in.

    Attributes:
        out: float32 `[B, H, S, G, D]`; zeros for a set without tokens.
        lse: float32 `[B, H, S, G]`, the log of the summed exponentials of the scaled logits; -1e30 for such a set.
    """

    out: Array
    lse: Array


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    length: Array,
    new: NewToken | None = None,
    notes: Notes | None = None,
    *,
    beside: Share | None = None,
    return_probs: bool = False,
    implementation: Implementation | str = "xla",
) -> Attended:
    """Softmax attention of one token per row over slots ``0 .. length - 1``.

    Args:
        q: queries `[B, H, G, D]`.
        k, v: cached keys and values `[B, H, C, D]`.
        length: filled slots, int32 `[B, H]`.
        new: a token to write to slot ``length - 1`` of the active rows before attending, in place where the cache is
            donated; other rows' slots are as they were.
        notes: where the new token's position and queries are written at the same time.
        beside: attention over tokens that are in no slot.
        return_probs: also return the attention probabilities; not with `beside`.
        implementation: what runs it.

    Raises:
        ValueError: probabilities are wanted and something is beside the cache.
    """
    if beside is not None and return_probs:
        raise ValueError("decode_attention: probabilities are of the cache alone; leave out beside or return_probs")
    return run(
        "decode_attention", implementation, q, k, v, length, new, notes, beside=beside, return_probs=return_probs
    )
