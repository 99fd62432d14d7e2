"""The weights of a model of the Llama shape, filled in by their names from wherever they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from saccade.models.families import Family
from saccade.ops.fp8_weights import ScaledFp8Matrix
from saccade.ops.layer_weights import HeadNorms, LayerWeights, Norm
from saccade.ops.matrices import DenseMatrix, Matrix, PartMatrix

# A layer's matrices by transformers' names, in the order in which a step reads them.
MATRICES = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


Use = Literal["matrix", "table", "vector"]  # what a step reads of a tensor: all, rows of its tokens, all of a small one


class WeightSource(Protocol):
    """A model's stored tensors by transformers' names: ``models.dense_weights``, ``models.gguf_weights``, or a
    :class:`NamedTensors`. Each is asked for once, about in the order in which a step reads them."""

    def tensor(self, name: str, use: Use) -> Tensor:
        """The tensor on the device that it runs on; in the dtype that it runs in, if it is of plain numbers."""
        ...

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """The matrix that is stored under ``name``, with its ``bias`` if it has one, as it is multiplied."""
        ...


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """The embedding, all layers, the final norm and the head, which may be the embedding. ``scales``, ``windows``: what
    each layer's attention multiplies its logits by, and how many tokens back it reads."""

    embedding: Matrix
    layers: list[LayerWeights]
    norm: Norm
    head: Matrix
    scales: list[float]
    windows: list[int | None]

    @property
    def step_bytes(self) -> int:
        """What a decode step reads: all but an embedding that is no head too."""
        norms = self.norm.weight.nbytes + sum(norm.nbytes for layer in self.layers for norm in layer.norms)
        return norms + self.matrix_bytes

    @property
    def matrix_bytes(self) -> int:
        """What a decode step reads of the matrices."""
        return sum(matrix.nbytes for matrix in self.read_each_step)

    @property
    def read_each_step(self) -> list[Matrix]:
        """The matrices that a decode step multiplies by: all layers', and the head."""
        return [*(matrix for layer in self.layers for matrix in layer.matrices), self.head]

    @property
    def format(self) -> str | None:
        """Formats of the matrices that are no plain numbers; None where all are."""
        return "+".join(sorted({one.format for one in self.read_each_step if one.format is not None})) or None

    def named(self) -> dict[str, Tensor]:
        """All tensors as they are stored, by transformers' names."""
        return dict(self._named())

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embedding.weight
        for index, layer in enumerate(self.layers):
            start = f"model.layers.{index}."
            parts = zip(MATRICES, layer.matrices)
            for name, matrix in [(start + name, matrix) for name, matrix in parts]:
                yield f"{name}.weight", matrix.weight
                if matrix.bias is not None:
                    yield f"{name}.bias", matrix.bias
            yield f"{start}input_layernorm.weight", layer.norm.weight
            yield f"{start}post_attention_layernorm.weight", layer.second_norm.weight
            if layer.head_norms is not None:
                yield f"{start}self_attn.q_norm.weight", layer.head_norms.query
                yield f"{start}self_attn.k_norm.weight", layer.head_norms.key
        yield "model.norm.weight", self.norm.weight
        yield "lm_head.weight", self.head.weight


def has_shape(family: Family, config: Any) -> bool:
    """Whether a model's layers are Llama's."""
    return family.llama_shape is not None and config.hidden_act == "silu"


def read_weights(
    model: Any,
    source: WeightSource,
    join: bool = False,
    convert: Callable[[Matrix], Matrix] | None = None,
) -> LlamaWeights:
    """The weights of ``model``, whose modules say of what sizes, scales and windows they are and need hold no memory
    (torch's "meta" device). ``join`` lays each layer's query, key and value side by side, and
    of quantised weights gate and up. ``convert`` makes other
    matrices of a layer's, of ``joined`` and ``both`` too, so that one layer at most is held twice."""
    decoder, config = model.get_decoder(), model.config
    embedding = None if config.tie_word_embeddings else source.matrix("model.embed_tokens", use="table")
    layers, scales, windows = [], [], []
    for index, module in enumerate(decoder.layers):
        layers.append(_layer(module, f"model.layers.{index}.", source, join, convert))
        scales.append(float(module.self_attn.scaling))
        windows.append(_window(module.self_attn, config))
    norm = Norm(source.tensor("model.norm.weight", "vector"), decoder.norm.variance_epsilon)
    if embedding is None:
        embedding = head = source.matrix("model.embed_tokens")
    else:
        head = source.matrix("lm_head")
    return LlamaWeights(embedding, layers, norm, head, scales, windows)


def _window(attention: Any, config: Any) -> int | None:
    """As the module hands it to its attention: its own, or for all layers the config's (Mistral)."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(config, "sliding_window", None)


def _layer(
    module: Any, start: str, source: WeightSource, join: bool, convert: Callable[[Matrix], Matrix] | None
) -> LayerWeights:
    attention = module.self_attn
    made: dict[str, Matrix] = {}
    for name, part in MATRICES.items():
        made[part] = source.matrix(start + name, bias=module.get_submodule(name).bias is not None)
    convert = convert or _for_rows_in_e4m3(list(made.values()))
    joined = both = None
    if join or convert is not None:
        joined = _joined(made, ("query", "key", "value"), convert)
    if convert is not None or (join and not isinstance(made["gate"], DenseMatrix)):  # whose kernel takes both apart
        both = _joined(made, ("gate", "up"), convert)
    if convert is not None:
        made.update({part: _converted(made[part], convert) for part in ("output", "down")})

    def norm(name: str, of: Any) -> Norm:
        return Norm(source.tensor(f"{start}{name}.weight", "vector"), of.variance_epsilon)

    norms = None
    if hasattr(attention, "q_norm"):
        query, key = norm("self_attn.q_norm", attention.q_norm), norm("self_attn.k_norm", attention.k_norm)
        norms = HeadNorms(query.weight, key.weight, query.epsilon)
    return LayerWeights(
        norm=norm("input_layernorm", module.input_layernorm),
        second_norm=norm("post_attention_layernorm", module.post_attention_layernorm),
        head_dim=attention.head_dim,
        rotated=bool(getattr(attention, "use_rope", True)),
        head_norms=norms,
        joined=joined,
        both=both,
        **made,
    )


def _converted(matrix: Matrix, convert: Callable[[Matrix], Matrix]) -> Matrix:
    """What ``convert`` makes of a matrix, or of the part of it that a process has."""
    return matrix.around(convert(matrix.part)) if isinstance(matrix, PartMatrix) else convert(matrix)


def _for_rows_in_e4m3(parts: list[Matrix]) -> Callable[[Matrix], Matrix] | None:
    """What makes a layer's matrices such that multiply rows in e4m3; None unless all of them, in files of such, can be.
    A layer's passes leave rows as all of its matrices take them."""
    if not all(isinstance(part, ScaledFp8Matrix) and part.multiplied() is not None for part in parts):
        return None

    def convert(matrix: Matrix) -> Matrix:
        made = matrix.multiplied() if isinstance(matrix, ScaledFp8Matrix) else None
        return matrix if made is None else made

    return convert


def _joined(made: dict[str, Matrix], names: Sequence[str], convert: Callable[[Matrix], Matrix] | None) -> Matrix | None:
    """Matrices of ``made`` as one, of which theirs become parts; None where they cannot be joined."""
    parts = [made[name] for name in names]
    if not all(one.alike(other) for one, other in pairwise(parts)):
        return None
    whole = parts[0].join(parts)
    if convert is not None:
        whole = convert(whole)
    made.update(zip(names, whole.split([part.outputs for part in parts])))
    del parts
    if whole.weight.is_cuda:
        torch.cuda.empty_cache()  # what they held before is of no size that anything else has
    return whole


class NamedTensors:
    """A source of tensors by their names, as they lie: a model's ``state_dict()`` is one."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str, use: Use) -> Tensor:
        """See :class:`WeightSource`."""
        return self._tensors[name].detach()

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """See :class:`WeightSource`."""
        weight = self.tensor(f"{name}.weight", use)
        return DenseMatrix(weight, self.tensor(f"{name}.bias", "vector") if bias else None)
