"""Decode steps of models with layers that keep a state in one C++ call (ops.step_ops), where the kernels have all that
their modules do: Qwen3.5's and LFM2's dense models. Others go layer by layer.

A module is what it computes: a layer's calls are taken for it where they give what it gives for random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.models.families import Family, attending_layers
from saccade.models.interface import LayerAttention, StateRows
from saccade.models.keeping import KeepingLayers, SlotRows
from saccade.models.keeping_parts import NotServed, Pair, Pools, StepLayer
from saccade.models.modules import ModuleLayers
from saccade.ops import cpu
from saccade.ops.layer_rows import MOST_ROWS
from saccade.ops.step_ops import OpList

_KEPT = 8  # numbers of rows whose lists are kept
_JUDGED = 3  # rows by which a layer is judged
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # of a layer's outputs, by their root of squares


class _Program:
    """All layers for a number of rows."""

    def __init__(self, made: KeptStep, rows: int, pair: Pair) -> None:
        self.ops = ops = OpList(rows, made.dtype)
        self.hidden = ops.room(made.channels)
        self.slots = torch.zeros(rows, dtype=torch.int64)
        self.pair = tuple(ops.room(one.shape[1]) for one in pair)
        number, kept = 0, 0
        for layer in made.layers:
            x = layer.first(ops, self.hidden)
            if layer.state is not None:
                pools = {name: part[kept] for name, part in made.pools.items()}
                delta, kept = layer.state.add(ops, x, pools, self.slots), kept + 1
            else:
                assert layer.attention is not None, "a layer does one or the other"
                q, k, v, gate = layer.attention.project(ops, x, (self.pair[0], self.pair[1]))
                attended = ops.attend(number, q, k, v, layer.attention.scale)
                delta, number = layer.attention.finish(ops, attended, gate), number + 1
            layer.close(ops, self.hidden, delta)


class KeptStep:
    """A model's layers as ops.layer_rows.WholeLayers, over the states that :meth:`given` names."""

    def __init__(self, layers: list[StepLayer], channels: int, dtype: torch.dtype) -> None:
        self.layers, self.channels, self.dtype = layers, channels, dtype
        self.same_bits = all(one.same_bits for one in layers)
        self.pools: Pools = {}
        self._slots: Sequence[int] = ()
        self._programs: dict[tuple[int, int], _Program] = {}
        attends = next(one.attention for one in layers if one.attention is not None)
        self._heads = attends.heads, attends.dim
        self.attention = [LayerAttention(one.attention.scale) for one in layers if one.attention is not None]

    def serves(self, rows: int, states: StateRows | None) -> bool:
        """Whether it takes a pass of ``rows`` rows, each of a sequence of its own."""
        if (
            states is None
            or states.inner
            or states.journals
            or len(states.slots) != rows
            or not 0 < rows <= MOST_ROWS[self.dtype]
        ):
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


def kept_step(
    layers: Any, family: Family, config: Any, keeping: KeepingLayers, modules: ModuleLayers
) -> KeptStep | None:
    """The model's layers in one call; None where the kernels do not have what its modules do."""
    weight = next((one for one in layers.parameters() if one.dim() == 2), None)
    if weight is None:  # all are in formats of their own
        return None
    dtype = weight.dtype
    if weight.device.type != "cpu" or dtype not in MOST_ROWS or not keeping.in_slots(weight.device):
        return None
    numbers = {place: number for number, place in enumerate(keeping.places)}
    try:
        made = [StepLayer(layer, place in numbers, dtype) for place, layer in enumerate(layers)]
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

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        assert k is not None, "no layer beside those that keep a state reads another's keys"
        assert v is not None
        if spec.window is not None or spec.softcap is not None or spec.sinks is not None:
            raise NotServed
        self.seen = q.clone(), k.clone(), v.clone()
        return self.answer(q)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("a layer that is judged attends")


@torch.inference_mode()
def _judge(layer: StepLayer, place: int, modules: ModuleLayers, keeping: KeepingLayers, config: Any) -> bool:
    """Whether the calls of ``layer`` give what the module does, for random rows and states."""
    dtype = layer.first.weight.dtype
    hidden = torch.randn(_JUDGED, config.hidden_size).to(dtype)
    ops, slots, before = OpList(_JUDGED, dtype), torch.tensor([2, 0, 1]), hidden.clone()
    if layer.state is not None:
        states = keeping.format.empty(_JUDGED, torch.device("cpu"))
        pools = {name: torch.randn_like(part[:1]) for name, part in states.items()}
        ours = {name: part[0].clone() for name, part in pools.items()}
        # As the module's own layer: its number among those that keep a state is that of the pools' first.
        theirs = {name: part.expand(len(keeping.places), *part.shape[1:]).clone() for name, part in pools.items()}
        none = hidden.new_empty(_JUDGED, 0)
        given = modules.run(place, before, slots, (none, none), None, SlotRows(theirs, slots, slots))  # type: ignore[arg-type]
        layer.close(ops, hidden, layer.state.add(ops, layer.first(ops, hidden), ours, slots))
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
