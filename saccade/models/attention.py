"""The attention function transformers' layers call: it hands q, k, v and the layer's wishes to the engine's context.

transformers looks an attention implementation up by name and calls it from inside each attention layer, after RoPE:
``fn(module, q, k, v, mask, dropout=, scaling=, **extras)`` -> ``([batch, rows, heads, head_dim], None)``. Ours is
registered as ``"saccade"``. Our loop has no mask built, so whatever a model wants to say with a mask has to arrive here
as a keyword. An extra we do not know is therefore an error.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from saccade.errors import ModelError
from saccade.models.interface import AttentionContext, LayerAttention

ATTENTION_NAME = "saccade"

# Keywords that transformers' layers pass along and that say nothing about which keys a row may read.
_INERT = frozenset(
    {
        "assistant_tokenizer",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "tokenizer",
        "use_cache",
    }
)


class Elsewhere:
    """What a layer hands over for keys and values that an earlier one has stored."""

    def to(self, *where: Any) -> Elsewhere:
        """It is on every device."""
        return self


ELSEWHERE = Elsewhere()


class MissingContextError(RuntimeError):
    """A layer ran outside our layer loop: a programming error, not bad input."""


class Outside(Protocol):
    """Serves layers that run in transformers' own loop."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: LayerAttention
    ) -> Tensor:
        """``q`` [batch, heads, rows, head_dim] over ``k``, ``v``, as a cache's ``update`` returned them; ``mask`` as
        the mask function of our name made it -> [batch, rows, heads, head_dim]."""
        ...


_outside: list[Outside] = []  # saccade.transformers', once it is imported


def layer_attention(module: nn.Module, scaling: float | None, extras: dict[str, Any], head_dim: int) -> LayerAttention:
    """Translate a layer's attention keywords into a ``LayerAttention``.

    Raises ModelError for a keyword that carries meaning we do not implement (fail closed: ignoring it would run the
    model wrongly).
    """
    window = extras.pop("sliding_window", None)
    softcap = extras.pop("softcap", None)
    sinks = extras.pop("s_aux", None)
    unknown = sorted(name for name, value in extras.items() if name not in _INERT and value is not None)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which is not supported "
            "(known: scaling, sliding_window, softcap, s_aux)"
        )
    return LayerAttention(
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        sinks=sinks,
    )


def saccade_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim], post-RoPE
    key: Tensor | Elsewhere,  # [1, kv_heads, rows, head_dim], post-RoPE, the new rows only
    value: Tensor | Elsewhere,  # [1, kv_heads, rows, head_dim]
    attention_mask: Tensor | None,
    *,
    saccade: AttentionContext | None = None,
    scaling: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attend through ``saccade``, the context our layer loop passes; returns ``([1, rows, heads, head_dim], None)``.

    Without one, what ``serve_outside`` was given serves, or a MissingContextError says so. ModelError for a mask or a
    keyword that carries meaning we do not implement.
    """
    if saccade is None and _outside and isinstance(key, Tensor) and isinstance(value, Tensor):
        spec = layer_attention(module, scaling, extras, query.shape[-1])
        return _outside[0](module, query, key, value, attention_mask, spec), None
    if saccade is None:
        raise MissingContextError(
            "attn_implementation='saccade' needs `import saccade.transformers` before the model runs in transformers' "
            "own loop (docs/transformers.md); saccade's engine runs it through HFRunner.run"
        )
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} passed an attention mask; masks are not supported")
    if query.shape[0] != 1:
        raise ValueError(f"expected packed rows in a batch of 1, got a batch of {query.shape[0]}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    spec = layer_attention(module, scaling, extras, query.shape[-1])
    k, v = (None if isinstance(one, Elsewhere) else one[0] for one in (key, value))
    out = saccade.run(layer, query[0], k, v, spec)  # [heads, rows, head_dim]
    return out.transpose(0, 1).unsqueeze(0), None


def register() -> None:
    """Make ``attn_implementation="saccade"`` known to transformers. Safe to call more than once."""
    AttentionInterface.register(ATTENTION_NAME, saccade_attention)


def serve_outside(serves: Outside) -> None:
    """Register our name, and have ``serves`` serve layers that come without the engine's context."""
    register()
    _outside[:] = [serves]
