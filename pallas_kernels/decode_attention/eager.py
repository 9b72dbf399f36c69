"""`pallas_kernels.decode_attention` as two plain matrix products over the whole cache, filled or not."""

from jax import Array

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.reference import Form, attend_blocks, write
from pallas_kernels.decode_attention.reference import decode_attention as attend_with_probs
from pallas_kernels.dispatch import Implementation


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
    """The reference, in one block."""
    if return_probs:
        return attend_with_probs(q, k, v, length, new, notes, beside=None, return_probs=True)
    k, v, notes = write(q, k, v, length, new, notes)
    return Attended(attend_blocks(q, k, v, length, beside, None, form=Form(block=k.shape[2])), None, k, v, notes)
