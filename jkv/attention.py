"""Attention over what a policy lets it see: the one caller of the attention kernels."""

from jax import Array

import pallas_kernels
from jkv.cache import Prompt, View
from pallas_kernels import Attended


def attend(q: Array, view: View, *, return_probs: bool = False) -> Attended:
    """Attention of one token a row.

    Args:
        q: queries `[B, H, G, D]`.
        view: what may be read.
        return_probs: also return the probabilities; not of a view that has pages, or tokens beside its slots.

    Returns:
        The output `[B, H, G, D]`, probabilities float32 `[B, H, G, C]` or None, and the view's arrays with its new
        token in them.
    """
    beside = None
    if (low := view.beside) is not None:
        beside = pallas_kernels.lowrank_attention(
            q, low.a, low.b, low.v, low.index, low.cos, low.sin, size=low.size, implementation=view.implementation
        )
    if view.pages is not None:
        assert not return_probs
        return pallas_kernels.gather_attention(
            q,
            view.k,
            view.v,
            view.length,
            view.pages,
            view.new,
            view.notes,
            beside=beside,
            implementation=view.implementation,
        )
    return pallas_kernels.decode_attention(
        q,
        view.k,
        view.v,
        view.length,
        view.new,
        view.notes,
        beside=beside,
        return_probs=return_probs,
        implementation=view.implementation,
    )


def attend_prompt(prompt: Prompt, *, block: int) -> Array:
    """Full causal attention inside the prompts, `[B, H, G, T, D]`, `block` tokens at once."""
    return pallas_kernels.prefill_attention(
        prompt.q, prompt.k, prompt.v, block=block, implementation=prompt.implementation
    )
