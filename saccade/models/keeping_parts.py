"""What decode steps in one call (models.keeping_step) know of modules: the kernels' calls of gated delta rules
(Qwen3.5), short convolutions (LFM2), and of attention and MLPs beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.fused_modules import norm_of
from saccade.ops import row_passes
from saccade.ops.matrices import DenseMatrix
from saccade.ops.step_ops import ADD, DECAYS, RATES, TIMES, TIMES_SIGMOID, OpList

Pools = Mapping[str, Tensor]  # states of a layer by name, [slots, ...]
Pair = tuple[Tensor, Tensor]  # cos, sin [rows, n]


class NotServed(Exception):
    """The kernels do not have what a module does."""


def _part(module: Any, *names: str) -> Any:
    """The part that has one of these names."""
    for name in names:
        if getattr(module, name, None) is not None:
            return getattr(module, name)
    raise NotServed


def _matrix(linear: Any, dtype: torch.dtype) -> DenseMatrix:
    if type(linear) is not nn.Linear:
        raise NotServed
    matrix = DenseMatrix(linear.weight, linear.bias)
    if matrix.native(dtype) is None:
        raise NotServed
    return matrix


class _Norm:
    """A module that norms, and how."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        found = norm_of(module)
        if found is None or found[0].dtype != dtype:
            raise NotServed
        self.weight, self.epsilon, self.how = found

    def __call__(self, ops: OpList, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return ops.norm(x, self.weight, self.epsilon, self.how, gate)


class _Mlp:
    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        names = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
        self.gate, self.up, self.down = (_matrix(_part(module, *one), dtype) for one in names)
        if not row_passes.gates(self.gate.outputs):
            raise NotServed

    def add(self, ops: OpList, x: Tensor) -> Tensor:
        inner = ops.gated(ops.product(x, self.gate), ops.product(x, self.up))
        return ops.product(inner, self.down)


class _Taps:
    """A convolution's weights, as the kernels read them."""

    def __init__(self, conv: Any, dtype: torch.dtype) -> None:
        self.weight = conv.weight.squeeze(1).to(dtype).contiguous()
        self.bias = None if conv.bias is None else conv.bias.to(dtype)

    def add(self, ops: OpList, x: Tensor, silu: bool, pools: Pools, slots: Tensor) -> Tensor:
        return ops.convolve(x, self.weight, self.bias, silu, pools["conv0"], slots)


class _Delta:
    """Qwen3.5's gated delta rule."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        names = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"
        self.qkv, self.z, self.b, self.a, self.out = (_matrix(_part(module, one), dtype) for one in names)
        self.norm, self.taps = _Norm(module.norm, dtype), _Taps(module.conv1d, dtype)
        self.log, self.bias = (one.detach().float().contiguous() for one in (module.A_log, module.dt_bias))
        self.heads, self.values = (module.num_k_heads, module.head_k_dim), (module.num_v_heads, module.head_v_dim)

    def add(self, ops: OpList, x: Tensor, pools: Pools, slots: Tensor) -> Tensor:
        """What the layer adds to ``x`` [rows, channels], its states being at ``slots`` int64 [rows] of ``pools``."""
        mixed = ops.product(x, self.qkv)
        z, b, a = (ops.product(x, one) for one in (self.z, self.b, self.a))
        mixed = self.taps.add(ops, mixed, True, pools, slots)
        keys = self.heads[0] * self.heads[1]
        q, k, v = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], -1)
        rates, decays = (ops.room(self.values[0], dtype=torch.float32) for _ in range(2))
        ops.mix(RATES, b, None, rates)
        ops.mix(DECAYS, a, None, decays, log=self.log, bias=self.bias)
        q, k = (one.unflatten(-1, self.heads) for one in (q, k))
        out = ops.delta_rule(q, k, v.unflatten(-1, self.values), decays, rates, pools["recurrent0"], slots)
        normed = self.norm(ops, out.flatten(0, 1), z.view(-1, self.values[1]))
        return ops.product(normed.view(ops.rows, -1), self.out)


class _Convolution:
    """LFM2's short convolution, of what a gate leaves, and gated."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.into, self.out = (_matrix(_part(module, one), dtype) for one in ("in_proj", "out_proj"))
        self.taps = _Taps(module.conv, dtype)

    def add(self, ops: OpList, x: Tensor, pools: Pools, slots: Tensor) -> Tensor:
        """As of :meth:`_Delta.add`."""
        before, after, inner = ops.product(x, self.into).chunk(3, -1)
        ops.mix(TIMES, before, inner, inner)
        mixed = self.taps.add(ops, inner, False, pools, slots)
        return ops.product(ops.mix(TIMES, after, mixed, mixed), self.out)


class _Attention:
    """Heads that are normed, then rotated; Qwen3.5's outputs are gated."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        names = ("q_proj",), ("k_proj",), ("v_proj",), ("o_proj", "out_proj")
        self.q, self.k, self.v, self.out = (_matrix(_part(module, *one), dtype) for one in names)
        self.q_norm, self.k_norm = (_Norm(_part(module, f"{x}_norm", f"{x}_layernorm"), dtype) for x in "qk")
        self.dim, self.scale = int(module.head_dim), float(module.scaling)
        self.heads, self.kv_heads = self.out.channels // self.dim, self.k.outputs // self.dim
        self.width = self.q.outputs // self.heads  # of a head's queries, and its gates behind them

    def project(self, ops: OpList, x: Tensor, pair: Pair) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [rows, heads or kv_heads, head_dim], and gates [rows * heads, head_dim or 0]."""
        both = ops.product(x, self.q).view(-1, self.width)
        q = self.q_norm(ops, both[:, : self.dim]).view(ops.rows, -1, self.dim)
        k = self.k_norm(ops, ops.product(x, self.k).view(-1, self.dim)).view(ops.rows, -1, self.dim)
        v = ops.product(x, self.v).view(ops.rows, -1, self.dim)
        for one in (q, k):
            if not row_passes.rotates(one, *reversed(pair)):
                raise NotServed
            ops.rotate(one, *pair)
        return q, k, v, both[:, self.dim :]

    def finish(self, ops: OpList, attended: Tensor, gate: Tensor) -> Tensor:
        flat = attended.view(-1, self.dim)
        if gate.shape[1]:
            ops.mix(TIMES_SIGMOID, flat, gate, flat)
        return ops.product(attended.view(ops.rows, -1), self.out)


class StepLayer:
    """A layer that keeps a state, or attends."""

    def __init__(self, layer: Any, keeps: bool, dtype: torch.dtype) -> None:
        self.first = _Norm(_part(layer, "input_layernorm", "operator_norm"), dtype)
        self.second = _Norm(_part(layer, "post_attention_layernorm", "ffn_norm"), dtype)
        self.mlp = _Mlp(_part(layer, "mlp", "feed_forward"), dtype)
        self.state: _Delta | _Convolution | None = None
        self.attention = None if keeps else _Attention(layer.self_attn, dtype)
        if keeps:
            delta = getattr(layer, "linear_attn", None)
            self.state = _Convolution(_part(layer, "conv"), dtype) if delta is None else _Delta(delta, dtype)

    @property
    def same_bits(self) -> bool:
        """Whether its calls give what its modules give to the last bit: exponentials are torch's own there."""
        if self.attention is not None:
            return self.attention.width == self.attention.dim
        return isinstance(self.state, _Convolution)

    def close(self, ops: OpList, hidden: Tensor, delta: Tensor) -> None:
        """What follows the layer's mixer, which gave ``delta``."""
        ops.mix(ADD, hidden, delta, hidden)
        ops.mix(ADD, hidden, self.mlp.add(ops, self.second(ops, hidden)), hidden)
