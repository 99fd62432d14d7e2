"""Decode steps of models with layers that keep a state in one C++ call (ops.step_ops), where the kernels have all that
their modules do: Qwen3.5's dense models. Others go layer by layer.

A module is what it computes: a layer's calls are taken for it where they give what it gives for random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.families import Family, attending_layers
from saccade.models.fused_modules import norm_of
from saccade.models.interface import LayerAttention, StateRows
from saccade.models.keeping import KeepingLayers, SlotRows
from saccade.models.modules import ModuleLayers
from saccade.ops import cpu, row_passes
from saccade.ops.layer_rows import MOST_ROWS
from saccade.ops.matrices import DenseMatrix
from saccade.ops.step_ops import ADD, DECAYS, RATES, TIMES_SIGMOID, OpList

_KEPT = 8  # numbers of rows whose lists are kept
_JUDGED = 3  # rows by which a layer is judged
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # of a layer's outputs, by their root of squares
_DELTA = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d", "norm", "A_log", "dt_bias"
_ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"
_LAYER = "input_layernorm", "post_attention_layernorm"
_MLP = "gate_proj", "up_proj", "down_proj"

Pools = Mapping[str, Tensor]  # states of a layer by name, [slots, ...]


class NotServed(Exception):
    """The kernels do not have what a module does."""


def _parts(module: Any, names: Sequence[str]) -> list[Any]:
    found = [getattr(module, name, None) for name in names]
    if any(one is None for one in found):
        raise NotServed
    return found


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
        self.gate, self.up, self.down = (_matrix(one, dtype) for one in _parts(module, _MLP))

    def add(self, ops: OpList, x: Tensor) -> Tensor:
        inner = ops.gated(ops.product(x, self.gate), ops.product(x, self.up))
        return ops.product(inner, self.down)


class _Delta:
    """Qwen3.5's gated delta rule."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        qkv, z, b, a, out, conv, norm, log, bias = _parts(module, _DELTA)
        self.qkv, self.z, self.b, self.a, self.out = (_matrix(one, dtype) for one in (qkv, z, b, a, out))
        self.norm, self.conv = _Norm(norm, dtype), conv
        self.log, self.bias = log.float().contiguous(), bias.float().contiguous()
        self.taps = conv.weight.squeeze(1).to(dtype).contiguous()
        self.heads, self.values = (module.num_k_heads, module.head_k_dim), (module.num_v_heads, module.head_v_dim)

    def add(self, ops: OpList, x: Tensor, pools: Pools, slots: Tensor) -> Tensor:
        mixed = ops.product(x, self.qkv)
        z, b, a = (ops.product(x, one) for one in (self.z, self.b, self.a))
        mixed = ops.convolve(mixed, self.taps, self.conv.bias, True, pools["conv0"], slots)
        keys = self.heads[0] * self.heads[1]
        q, k, v = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], -1)
        rates, decays = (ops.room(self.values[0], dtype=torch.float32) for _ in range(2))
        ops.mix(RATES, b, None, rates)
        ops.mix(DECAYS, a, None, decays, log=self.log, bias=self.bias)
        q, k = (one.unflatten(-1, self.heads) for one in (q, k))
        out = ops.delta_rule(q, k, v.unflatten(-1, self.values), decays, rates, pools["recurrent0"], slots)
        normed = self.norm(ops, out.flatten(0, 1), z.view(-1, self.values[1]))
        return ops.product(normed.view(ops.rows, -1), self.out)


class _Attention:
    """Qwen3.5's attention, whose outputs are gated."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        q, k, v, out, q_norm, k_norm = _parts(module, _ATTENTION)
        self.q, self.k, self.v, self.out = (_matrix(one, dtype) for one in (q, k, v, out))
        self.q_norm, self.k_norm = _Norm(q_norm, dtype), _Norm(k_norm, dtype)
        self.dim, self.scale = int(module.head_dim), float(module.scaling)
        self.heads, self.kv_heads = (self.q.outputs // (2 * self.dim), self.k.outputs // self.dim)

    def project(self, ops: OpList, x: Tensor, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [rows, heads or kv_heads, head_dim], and gates [rows * heads, head_dim]."""
        both = ops.product(x, self.q).view(-1, 2 * self.dim)
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
        ops.mix(TIMES_SIGMOID, flat, gate, flat)
        return ops.product(attended.view(ops.rows, -1), self.out)


class _Layer:
    def __init__(self, layer: Any, keeps: bool, dtype: torch.dtype) -> None:
        self.first, self.second = (_Norm(one, dtype) for one in _parts(layer, _LAYER))
        self.mlp = _Mlp(layer.mlp, dtype)
        self.delta = _Delta(layer.linear_attn, dtype) if keeps else None
        self.attention = None if keeps else _Attention(layer.self_attn, dtype)

    def close(self, ops: OpList, hidden: Tensor, delta: Tensor) -> None:
        """What follows the layer's mixer, which gave ``delta``."""
        ops.mix(ADD, hidden, delta, hidden)
        ops.mix(ADD, hidden, self.mlp.add(ops, self.second(ops, hidden)), hidden)


class _Program:
    """All layers for a number of rows."""

    def __init__(self, made: KeptStep, rows: int, pair: tuple[Tensor, Tensor]) -> None:
        self.ops = ops = OpList(rows, made.dtype)
        self.hidden = ops.room(made.channels)
        self.slots = torch.zeros(rows, dtype=torch.int64)
        self.pair = tuple(ops.room(one.shape[1]) for one in pair)
        number, kept = 0, 0
        for layer in made.layers:
            x = layer.first(ops, self.hidden)
            if layer.delta is not None:
                pools = {name: part[kept] for name, part in made.pools.items()}
                delta, kept = layer.delta.add(ops, x, pools, self.slots), kept + 1
            else:
                assert layer.attention is not None, "a layer does one or the other"
                q, k, v, gate = layer.attention.project(ops, x, (self.pair[0], self.pair[1]))
                attended = ops.attend(number, q, k, v, layer.attention.scale)
                delta, number = layer.attention.finish(ops, attended, gate), number + 1
            layer.close(ops, self.hidden, delta)


class KeptStep:
    """A model's layers as ops.layer_rows.WholeLayers, over the states that :meth:`given` names."""

    def __init__(self, layers: list[_Layer], channels: int, dtype: torch.dtype) -> None:
        self.layers, self.channels, self.dtype = layers, channels, dtype
        self.pools: Pools = {}
        self._slots: Sequence[int] = ()
        self._programs: dict[tuple[int, int], _Program] = {}
        attends = next(one.attention for one in layers if one.attention is not None)
        self._heads = attends.heads, attends.dim
        self.attention = [LayerAttention(one.attention.scale) for one in layers if one.attention is not None]

    def serves(self, rows: int, states: StateRows | None) -> bool:
        """Whether it takes a pass of ``rows`` rows, each of a sequence of its own."""
        if states is None or states.inner or len(states.slots) != rows or not 0 < rows <= MOST_ROWS[self.dtype]:
            return False
        return all(part.is_contiguous() for part in states.parts.values())

    def given(self, states: StateRows) -> KeptStep:
        """For a pass over ``states``."""
        if any(self.pools.get(name) is not part for name, part in states.parts.items()):
            self.pools = dict(states.parts)
            self._programs.clear()
        self._slots = states.slots
        return self

    def queries(self, rows: int) -> Tensor:
        """See ops.layer_rows.WholeLayers."""
        return torch.empty(rows, *self._heads, dtype=self.dtype).transpose(0, 1)

    def run(
        self,
        step: Any,
        pool: Any,
        hidden: Tensor,
        q: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        lse: Tensor,
        attending: int,
        watched: bool,
    ) -> tuple[float, float]:
        """See ops.layer_rows.WholeLayers; ``rotary`` is the same in every layer."""
        key = len(hidden), torch.get_num_threads()
        program = self._programs.pop(key, None) or _Program(self, len(hidden), rotary[0])
        self._programs[key] = program  # the last used last
        while len(self._programs) > _KEPT:
            del self._programs[next(iter(self._programs))]
        program.hidden.copy_(hidden)
        program.slots.copy_(torch.tensor(self._slots, dtype=torch.int64))
        for own, one in zip(program.pair, rotary[0]):
            own.copy_(one)
        kernels: Any = cpu.kernels()
        shares: tuple[float, float] = kernels.run_ops(step, program.ops.native, pool, attending, watched)
        hidden.copy_(program.hidden)
        return shares


def kept_step(layers: Any, family: Family, config: Any, keeping: KeepingLayers, modules: ModuleLayers) -> KeptStep | None:
    """The model's layers in one call; None where the kernels do not have what its modules do."""
    weight = next(one for one in layers.parameters() if one.dim() == 2)
    dtype = weight.dtype
    if weight.device.type != "cpu" or dtype not in MOST_ROWS or not keeping.in_slots(weight.device):
        return None
    numbers = {place: number for number, place in enumerate(keeping.places)}
    try:
        made = [_Layer(layer, place in numbers, dtype) for place, layer in enumerate(layers)]
        judged = {}
        for place, layer in enumerate(made):
            kind = place in numbers
            if kind not in judged:
                judged[kind] = _judge(layer, place, modules, keeping, config)
    except (NotServed, AttributeError):
        return None
    if not all(judged.values()) or len(made) != len(attending_layers(family, config)) + len(numbers):
        return None
    return KeptStep(made, config.hidden_size, dtype)


class _Answers:
    """An attention context that answers with what it is given, and notes queries, keys and values."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        self.answer = answer
        self.seen: tuple[Tensor, ...] = ()

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        if spec.window is not None or spec.softcap is not None or spec.sinks is not None:
            raise NotServed
        self.seen = q.clone(), k.clone(), v.clone()
        return self.answer(q)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError


@torch.inference_mode()
def _judge(layer: _Layer, place: int, modules: ModuleLayers, keeping: KeepingLayers, config: Any) -> bool:
    """Whether the calls of ``layer`` give what the module does, for random rows and states."""
    dtype = layer.first.weight.dtype
    hidden = torch.randn(_JUDGED, config.hidden_size).to(dtype)
    ops, slots, before = OpList(_JUDGED, dtype), torch.tensor([2, 0, 1]), hidden.clone()
    if layer.delta is not None:
        states = keeping.format.empty(_JUDGED, torch.device("cpu"))
        pools = {name: torch.randn_like(part[:1]) for name, part in states.items()}
        ours = {name: part[0].clone() for name, part in pools.items()}
        # As the module's own layer: its number among those that keep a state is that of the pools' first.
        theirs = {name: part.expand(len(keeping.places), *part.shape[1:]).clone() for name, part in pools.items()}
        none = hidden.new_empty(_JUDGED, 0)
        given = modules.run(place, before, slots, (none, none), None, SlotRows(theirs, slots, slots))  # type: ignore[arg-type]
        layer.close(ops, hidden, layer.delta.add(ops, layer.first(ops, hidden), ours, slots))
        ops.run()
        number = keeping.places.index(place)
        return _near(hidden, given, dtype) and all(_near(ours[name], theirs[name][number], dtype) for name in ours)
    assert layer.attention is not None, "a layer does one or the other"
    turned = _turned(layer.attention.dim, config)
    pair = torch.randn(_JUDGED, turned).to(dtype), torch.randn(_JUDGED, turned).to(dtype)
    answer = torch.randn(_JUDGED, layer.attention.heads, layer.attention.dim).to(dtype)
    seen = _Answers(lambda q: answer.transpose(0, 1).clone())
    given = modules.run(place, before, slots, pair, seen)
    q, k, v, gate = layer.attention.project(ops, layer.first(ops, hidden), pair)
    layer.close(ops, hidden, layer.attention.finish(ops, answer.clone(), gate))
    ops.run()
    projected = zip((q, k, v), seen.seen)
    return _near(hidden, given, dtype) and all(_near(own.transpose(0, 1), one, dtype) for own, one in projected)


def _near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    away = (ours.float() - theirs.float()).norm()
    return ours.shape == theirs.shape and bool(away <= _NEAR[dtype] * theirs.float().norm())


def _turned(dim: int, config: Any) -> int:
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return int(dim * float(rope.get("partial_rotary_factor", 1.0)))
