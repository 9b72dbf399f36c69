"""Attention over what a policy lets it see: the one caller of the attention kernels."""

from jax import Array

import pallas_kernels
from jkv.cache import Prompt, View


def attend(q: Array, view: View, *, return_probs: bool = False) -> tuple[Array, Array | None]:
    """Attention of one token a row.

    Args:
        q: queries `[B, H, G, D]`.
        view: what may be read.
        return_probs: also return the probabilities.

    Returns:
        ``(out [B, H, G, D], probs float32 [B, H, G, C] or None)``.
    """
    attended = pallas_kernels.decode_attention(q, view.k, view.v, view.length, return_probs=return_probs)
    return attended.out, attended.probs


def attend_prompt(prompt: Prompt, *, block: int) -> Array:
    """Full causal attention inside the prompts, `[B, H, G, T, D]`, `block` tokens at once."""
    return pallas_kernels.prefill_attention(prompt.q, prompt.k, prompt.v, block=block)
