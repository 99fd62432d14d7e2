"""Ask every layer once what it will ask of attention: the shapes and windows the engine plans its store by.

One token is run through the model at load with a context that only records. It catches what no config says reliably:
a layer that never calls attention (recurrent), calls it twice, caches something that is not a key and a value of one
shape (latent attention), passes a window other than the one its mask would have had, or holds NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ModelError, SaccadeError
from saccade.kv.states import StateFormat
from saccade.models.checkpoint import first_line
from saccade.models.families import Family, attending_layers, configured_shapes, configured_windows, read_layers
from saccade.models.interface import LayerAttention, ModelSpec, Segment
from saccade.models.llama import LlamaDecoder
from saccade.models.runner import HFRunner


@dataclass(frozen=True)
class LayerShapes:
    """What all layers that attend agree on, each one's sliding window, and what other layers keep of a sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    places: tuple[int, ...]  # of those that attend, where others do not
    states: StateFormat | None
    value_dim: int | None = None  # see ModelSpec
    shapes: tuple[tuple[int, int], ...] = ()  # see ModelSpec
    reads: tuple[int, ...] = ()  # see ModelSpec


class _Recorder:
    """An attention context that notes each call and answers with zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, int], LayerAttention]] = []  # heads and channels of queries
        self.stored: dict[int, tuple[int, int]] = {}  # KV heads and channels, of layers that store keys
        self.finite = True

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        self.finite &= all(bool(t.isfinite().all()) for t in (q, k, v) if t is not None)
        self.calls.append((layer, (q.shape[0], q.shape[-1]), spec))
        if k is None or v is None:
            return torch.zeros_like(q)
        self.stored[layer] = k.shape[0], k.shape[-1]
        if not q.shape[-1] == k.shape[-1] == v.shape[-1] or k.shape[0] != v.shape[0]:
            raise ModelError(
                f"layer {layer} has keys of shape {tuple(k.shape)} and values of {tuple(v.shape)}; only equal shapes "
                "are supported, or values that are channels of the keys (latent attention)"
            )
        return torch.zeros_like(q)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("nothing is frozen here")


def probe_layers(model: Any, family: Family, llama: LlamaDecoder | None) -> LayerShapes:
    """Run one token through ``model``, or ``llama`` in its place, and return what its layers ask for; ModelError where
    they disagree."""
    config = model.config
    recorder = _Recorder()
    places = attending_layers(family, config)
    layers = len(places)
    blank = ModelSpec(family.model_type, layers, 0, 0, 0, 0, 0, torch.float32, (None,) * layers)
    zero = torch.zeros(1, dtype=torch.int64)
    try:
        runner = HFRunner(model, family, blank, llama)
        states = None if runner.keeping is None else runner.keeping.format
        logits = runner.run(zero, zero, recorder, segments=[Segment(0, 1, 1)], logit_rows=zero)
    except SaccadeError:
        raise
    except Exception as error:  # sizes that fit the stored tensors but not each other
        raise ModelError(
            f"{family.model_type}: one token cannot be run through the model: {first_line(error)}"
        ) from error
    if not (recorder.finite and logits.isfinite().all()):
        raise ModelError(
            f"{family.model_type}: one token through the model gives NaN or infinity: the weights are damaged, or "
            f"overflow {str(model.dtype).removeprefix('torch.')} (then pass dtype='float32')"
        )
    if [layer for layer, _, _ in recorder.calls] != list(range(layers)):
        raise ModelError(f"{family.model_type}: not every layer attends exactly once over its own keys and values")
    reads = read_layers(family, config) or tuple(range(layers))
    if sorted(recorder.stored) != sorted(set(reads)):
        raise ModelError(
            f"{family.model_type}: layers {sorted(recorder.stored)} store keys and values, but config.json implies "
            f"{sorted(set(reads))}; make num_kv_shared_layers and layer_types agree with the weights"
        )
    heads = recorder.calls[0][1][0]
    shapes = configured_shapes(family, config) or (recorder.stored[0],) * layers
    asked = [(heads, width) for _, width in shapes]
    if [shape for _, shape, _ in recorder.calls] != asked or any(
        recorder.stored[own] != shape for own, shape in zip(reads, shapes)
    ):
        raise ModelError(
            f"{family.model_type}: heads, kv heads or head_dim differ between layers, which is not supported"
        )
    windows = tuple(spec.window for _, _, spec in recorder.calls)
    expected = configured_windows(family, config)
    if windows != expected:
        layer = places[next(i for i in range(layers) if windows[i] != expected[i])]
        raise ModelError(
            f"{family.model_type}: layer {layer} runs with sliding window {windows[layer]} but config.json implies "
            f"{expected[layer]}; make use_sliding_window, sliding_window and layer_types agree"
        )
    for layer, module in enumerate(model.get_decoder().layers):
        if any(getattr(part, "is_causal", True) is False for part in module.modules()):
            raise ModelError(f"{family.model_type}: layer {layer} is not causal, which is not supported")
    value_dim = config.kv_lora_rank if family.latent else None
    places = () if states is None else places
    reads = read_layers(family, config)
    own = shapes if len(set(shapes)) > 1 else ()
    return LayerShapes(heads, *shapes[0], windows, places, states, value_dim, own, reads)
