"""One decode step of many sequences as a fixed row of launches: nothing on the way asks the host for anything that only
the device knows, so a CUDA graph can record it.

Layers of the Llama shape run as matrix products with a few kernels between them, all others as transformers' modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.interface import AttentionContext, LayerAttention
from saccade.models.rotary import RotaryRows
from saccade.models.runner import HFRunner
from saccade.ops.triton.rows import add_norm, gated, rotate

FAMILIES = ("llama", "mistral", "qwen2")


class DecodeStep:
    """Decode steps of ``runner``'s model on its device. ``join`` (by default on a GPU) lays the weights of a layer's
    query, key and value projections side by side, so that one product reads them; the modules then hold parts of
    it."""

    def __init__(self, runner: HFRunner, join: bool | None = None) -> None:
        self.runner = runner
        rotary = runner._rotary
        # Other rotary factors hang on more than a row's position: the host decides, at every step.
        self.serves = rotary.long_from is None and rotary._grows_from is None
        self.lean = _of_llama_shape(runner)
        join = runner.device.type == "cuda" if join is None else join
        self._joined = [_join(layer.self_attn) for layer in runner._decoder.layers] if join and self.lean else None

    @torch.inference_mode()
    def run(self, token_ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """``token_ids``, ``positions`` int64 [rows] on the model's device, one row a sequence -> float32 logits [rows,
        vocab_size]. ``ctx`` is asked to attend with all rows at once."""
        runner = self.runner
        hidden = runner._embed(token_ids[None])
        rotary = runner._rotary.embed(hidden, positions[None], ())
        if self.lean and rotary.for_layer(0)[0].shape[-1] == runner.spec.head_dim:
            return runner.family.finish_logits(self._lean(hidden[0], rotary, ctx), runner.config).float()
        for index in range(runner.spec.layers):
            hidden = runner._layer(index, hidden, positions[None], rotary.for_layer(index), ctx)
        return runner._logits(hidden[0])

    def _lean(self, hidden: Tensor, rotary: RotaryRows, ctx: AttentionContext) -> Tensor:
        """All layers over ``hidden`` [rows, channels], which is overwritten; the head's output [rows, vocab_size]."""
        runner, rows = self.runner, hidden.shape[0]
        hidden, delta = hidden.contiguous(), None
        for index, layer in enumerate(runner._decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            x = _normed(hidden, delta, layer.input_layernorm)
            if self._joined is None:
                parts = [project(x) for project in (attention.q_proj, attention.k_proj, attention.v_proj)]
            else:
                widths = [heads * runner.spec.head_dim for heads in (runner.spec.heads, *[runner.spec.kv_heads] * 2)]
                parts = list(nn.functional.linear(x, *self._joined[index]).split(widths, -1))
            q, k, v = (part.unflatten(-1, (-1, runner.spec.head_dim)) for part in parts)
            cos, sin = rotary.for_layer(index)
            rotate(q, k, cos[0], sin[0])
            spec = LayerAttention(scale=float(attention.scaling), window=runner.spec.windows[index])
            out = ctx.attend(index, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), spec)
            delta = attention.o_proj(out.transpose(0, 1).reshape(rows, -1))
            x = _normed(hidden, delta, layer.post_attention_layernorm)
            delta = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
        return runner._head(_normed(hidden, delta, runner._norm))


@torch.no_grad()
def _join(attention: Any) -> tuple[Tensor, Tensor | None]:
    """The three projections' weights [all outputs, channels] and biases as one, of which theirs become parts."""
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    widths = [module.weight.shape[0] for module in modules]
    weight = torch.cat([module.weight for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    for number, (module, part) in enumerate(zip(modules, weight.split(widths))):
        module.weight.data = part
        if bias is not None:
            module.bias.data = bias.split(widths)[number]
    if weight.is_cuda:
        torch.cuda.empty_cache()  # what they held before is of no size that anything else has
    return weight, bias


def _normed(hidden: Tensor, delta: Tensor | None, norm: Any) -> Tensor:
    return add_norm(hidden, delta, norm.weight, norm.variance_epsilon)


def _of_llama_shape(runner: HFRunner) -> bool:
    """Whether every layer is what :meth:`DecodeStep._lean` computes."""
    if runner.family.model_type not in FAMILIES or runner.config.hidden_act != "silu":
        return False
    for layer in runner._decoder.layers:
        products: list[Any] = [getattr(layer.self_attn, f"{name}_proj", None) for name in "qkvo"]
        products += [getattr(layer.mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        if not all(type(one) is nn.Linear for one in products):
            return False
        if len({one.bias is None for one in products[:3]}) > 1:
            return False
        if not all(type(one).__name__.endswith("RMSNorm") and hasattr(one, "variance_epsilon") for one in norms):
            return False
    return runner.spec.head_dim % 2 == 0
