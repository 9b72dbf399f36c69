"""`pallas_kernels.decode_attention` by cuDNN's flash attention.

cuDNN wants heads beside the head dimension, which would transpose the cache. Each kv head of each row is a text of
its own here, and its query heads are that text's tokens: a reshape that moves nothing, and keys are read once.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.cudnn import check_cudnn
from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.reference import write
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
    """Writes the new token as XLA does, then attends.

    Raises:
        ValueError: probabilities are wanted, something is beside the cache, or cuDNN does not take this dtype or
            head_dim.
    """
    if return_probs or beside is not None:
        wanted = "attention probabilities" if return_probs else "sum of exponentials"
        raise ValueError(f"decode_attention: cudnn keeps the {wanted} to itself; use triton or xla")
    check_cudnn("decode_attention", k, implementation.gpu)
    k, v, notes = write(q, k, v, length, new, notes)

    def as_texts(x: Array) -> Array:
        return x.reshape(-1, x.shape[2], 1, x.shape[3])

    out = jax.nn.dot_product_attention(
        *(as_texts(x) for x in (q.astype(k.dtype), k, v)),
        key_value_seq_lengths=length.reshape(-1),
        implementation="cudnn",
    )
    # What cuDNN makes of no keys at all is not documented.
    out = jnp.where(length[..., None, None] > 0, out.reshape(q.shape), 0)
    return Attended(out, None, k, v, notes)
