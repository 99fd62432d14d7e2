"""saccade's attention in transformers' own loop: ``import saccade.transformers`` and ask for it by name.

    import saccade.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="saccade")
    model.generate(**inputs, saccade="flexprefill+lfps")

See docs/transformers.md.
"""

from __future__ import annotations

from typing import Any

from transformers import AttentionMaskInterface

from saccade.methods.policy import PolicyLike
from saccade.models.attention import ATTENTION_NAME, serve_outside
from saccade.transformers.attention import attend, padding_mask
from saccade.transformers.cache import SaccadeCache
from saccade.transformers.generation import install
from saccade.transformers.runtime import runtime_of, text_config

__all__ = ["SaccadeCache", "configure", "report"]

serve_outside(attend)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)
install()


def configure(model: Any, policy: PolicyLike = None, **settings: Any) -> None:
    """Choose the ``policy`` that ``model`` runs under where a call names none ("dense", or the environment's
    SACCADE_POLICY), and settings of its KV pool and kernels: ``kv_memory``, ``kv_dtype``, ``kv_rotate``,
    ``block_size``, ``prefill_chunk``, ``backend``, ``threads``, ``fa4``, each as of ``saccade.LLM``. SaccadeError for
    others, and for settings while a cache holds keys."""
    runtime_of(text_config(model)).set(policy, settings)


def report(model: Any) -> list[dict[str, Any]]:
    """What the last call really read, a dict for each sequence of its batch, as ``RequestOutput.report`` of
    ``saccade.LLM`` has it: ``report(model)[0]["decode"]["density"]``, ``["keys_attended"]``, ``["notes"]``. Empty
    before the first call."""
    return [one.as_dict() for one in runtime_of(text_config(model)).reports]
