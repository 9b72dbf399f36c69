"""The array operations of budgeted decoding. Each folder holds one operation and its jnp reference."""

from pallas_kernels.compact.reference import compact
from pallas_kernels.decode_attention.reference import decode_attention
from pallas_kernels.key_redundancy.reference import key_redundancy
from pallas_kernels.prefill_attention.reference import prefill_attention
from pallas_kernels.select_top.reference import select_top
from pallas_kernels.window_scores.reference import window_scores

__all__ = ["compact", "decode_attention", "key_redundancy", "prefill_attention", "select_top", "window_scores"]
