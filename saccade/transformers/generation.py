"""transformers' ``generate`` with a policy: makes the cache, refuses what cannot be served, keeps the reports."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import GenerationMixin

from saccade.errors import PolicyError, RequestError, shown
from saccade.methods.policy import Policy, PolicyLike
from saccade.models.attention import ATTENTION_NAME
from saccade.models.rebuilt import cache_argument
from saccade.transformers.cache import SaccadeCache
from saccade.transformers.runtime import runtime_of, text_config, usable

_theirs = GenerationMixin.generate


def runs_here(model: Any) -> bool:
    """Whether a model's text layers attend by saccade."""
    return bool(text_config(model)._attn_implementation == ATTENTION_NAME)


@functools.wraps(_theirs)
def generate(self: Any, *args: Any, saccade: PolicyLike = None, **kwargs: Any) -> Any:
    """transformers' own, with ``saccade``: the policy of this call, by default the model's. PolicyError for one on a
    model with another attn_implementation; RequestError, naming it, for an argument that cannot be served."""
    if not runs_here(self):
        if saccade is not None:
            raise PolicyError(
                f"saccade={shown(saccade)} needs attn_implementation='{ATTENTION_NAME}'; this model has "
                f"'{text_config(self)._attn_implementation}'"
            )
        return _theirs(self, *args, **kwargs)
    runtime = runtime_of(text_config(self))
    named = dict(zip(("inputs", "generation_config"), args))
    _refuse(self, kwargs, named.get("generation_config"))
    argument = cache_argument(self.forward)
    cache = kwargs.pop(argument, None)
    cache = kwargs.pop("past_key_values", None) if cache is None else cache
    if cache is not None and not isinstance(cache, SaccadeCache):
        raise RequestError(
            f"{argument}={type(cache).__name__}(...) does not hold its keys in saccade's pool; leave it out, or "
            "give saccade.transformers.SaccadeCache(model)"
        )
    own = cache is None
    if cache is None:
        cache = SaccadeCache(self, saccade)
    elif saccade is not None:
        cache.policy = usable(Policy.parse(saccade))
    if not cache.policy.decode.is_dense or not cache.policy.prefill.is_dense:
        _refuse_rollbacks(self, kwargs, named.get("generation_config"), cache.policy)
    chosen = kwargs.get("generation_config", named.get("generation_config"))
    ids = kwargs.get("input_ids", kwargs.get("inputs", named.get("inputs")))
    if _asked("prefill_chunk_size", self, kwargs, chosen) is not None and isinstance(ids, torch.Tensor):
        mask = kwargs.get("attention_mask")
        cache.expect(ids.shape[1] if mask is None else mask.shape[1], mask)
    try:
        out = _theirs(self, *args, **{**kwargs, argument: cache})
        made = out if isinstance(out, torch.Tensor) else out.sequences
        cache.ended([made.shape[1] - (0 if ids is None else ids.shape[1])] * cache.batch_size)
        runtime.reports = cache.reports
    except BaseException:
        if own:
            cache.reset()
        raise
    if own and getattr(out, argument, None) is not cache:
        cache.reset()
    return out


def _asked(name: str, model: Any, kwargs: dict[str, Any], chosen: Any) -> Any:
    """An argument of ``generate`` as it will be taken."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(chosen, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _refuse(model: Any, kwargs: dict[str, Any], positional: Any) -> None:
    chosen = kwargs.get("generation_config", positional)

    def asked(name: str) -> Any:
        return _asked(name, model, kwargs, chosen)

    if asked("use_cache") is False:
        raise RequestError("use_cache=False: attn_implementation='saccade' generates from its own cache; leave it out")
    if asked("cache_implementation") is not None:
        raise RequestError(
            f"cache_implementation={shown(asked('cache_implementation'))}: keys lie in saccade's pool; leave it out "
            "(saccade.transformers.configure has kv_memory and kv_dtype)"
        )
    if asked("output_attentions"):
        raise RequestError("output_attentions=True: saccade keeps no attention weights; use 'eager' to see them")
    if kwargs.get("custom_generate") is not None:
        raise RequestError("custom_generate: another loop than transformers' own is not served; use 'sdpa'")


def _refuse_rollbacks(model: Any, kwargs: dict[str, Any], positional: Any, policy: Policy) -> None:
    """Drafted tokens are read several at a time and taken back, which a sparse method's rows are not made for."""
    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if _asked(name, model, kwargs, kwargs.get("generation_config", positional)) is not None:
            raise RequestError(
                f"{name} goes with saccade='dense' alone, not with '{policy.text}'; leave one of them out"
            )


def install() -> None:
    """Have every model's ``generate`` be ours; it leaves models of other attention as they are."""
    GenerationMixin.generate = generate  # type: ignore[method-assign]
