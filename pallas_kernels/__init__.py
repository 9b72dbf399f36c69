"""The array operations of budgeted decoding.

Each folder holds one operation: its contract, the jnp reference that specifies it, and its GPU kernels. `dispatch` is
the table of what there is and picks from it.
"""

from pallas_kernels.compact import compact
from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share, decode_attention
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gather_attention import Pages, gather_attention
from pallas_kernels.key_redundancy import key_redundancy
from pallas_kernels.lowrank_attention import lowrank_attention
from pallas_kernels.page_scores import page_scores
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.select_top import select_top
from pallas_kernels.window_scores import window_scores

__all__ = [
    "Attended",
    "Implementation",
    "NewToken",
    "Notes",
    "Pages",
    "Share",
    "compact",
    "decode_attention",
    "gather_attention",
    "key_redundancy",
    "lowrank_attention",
    "page_scores",
    "prefill_attention",
    "rms_norm",
    "select_top",
    "window_scores",
]
