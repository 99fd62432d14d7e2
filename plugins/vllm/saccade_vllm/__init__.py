"""Sparse prefill in vLLM: rows of long prompts read the keys that one of Saccade's methods chooses, over vLLM's own
block tables; decode, short prompts and sliding-window layers are vLLM's as before.

``pip install ./plugins/vllm``, then ``SACCADE_POLICY=flexprefill vllm serve MODEL --attention-backend CUSTOM``. vLLM
finds :func:`register` by its entry point. On a GPU the backend is FlashAttention's with another prefill; on a CPU vLLM
has one backend, which is replaced once a policy is set.
"""

from __future__ import annotations

import os

from saccade_vllm.settings import POLICY

__all__ = ["POLICY", "register"]


def register() -> None:
    """Offer the backends to vLLM, in each of its processes. vLLM goes on without a plugin that fails here, so a policy
    that cannot be served is refused by the backend, when the model's layers are made."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "saccade_vllm.flash_attention.Backend")
    if current_platform.is_cpu() and os.environ.get(POLICY, "").strip():  # the platform knows no other name
        register_backend(AttentionBackendEnum.CPU_ATTN, "saccade_vllm.cpu_attention.Backend")
