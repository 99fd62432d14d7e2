"""The mask of FlashAttention-4's diagonal blocks, in the language of its kernels. Imported where the extra is."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def causal(batch, head, row, key, lengths, tensors):
    """Whether ``row`` of the queries, which end where the keys end, may read ``key``."""
    return key <= row + scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
