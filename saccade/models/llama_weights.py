"""The weights of a model of the Llama shape, filled in by their names from wherever they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from saccade.models.families import Family
from saccade.ops.layer_weights import HeadNorms, LayerWeights, Norm
from saccade.ops.matrices import DenseMatrix, Matrix
from saccade.ops.planes import packed

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

    def format(self, name: str) -> Callable[[Tensor, Tensor | None], Matrix]:
        """What matrix the tensor is the weight of."""
        ...

    def read(self, part: Tensor) -> None:
        """Let go of ``part`` of a tensor as :meth:`tensor` gave it, which nobody reads again."""
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
        return self.head.nbytes + sum(matrix.nbytes for layer in self.layers for matrix in layer.matrices)

    @property
    def format(self) -> str | None:
        """Formats of the matrices that are no plain numbers; None where all are."""
        own = {matrix.format for layer in self.layers for matrix in layer.matrices} | {self.head.format}
        return "+".join(sorted(one for one in own if one is not None)) or None

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
    (torch's "meta" device). ``join`` lays each layer's query, key and value side by side. ``convert`` makes other
    matrices of a layer's, of ``joined`` and ``both`` too, so that one layer at most is held twice."""
    decoder, config = model.get_decoder(), model.config
    embedding = None if config.tie_word_embeddings else matrix_of(source, "model.embed_tokens", use="table")
    layers, scales, windows = [], [], []
    for index, module in enumerate(decoder.layers):
        layers.append(_layer(module, f"model.layers.{index}.", source, join, convert))
        scales.append(float(module.self_attn.scaling))
        windows.append(_window(module.self_attn, config))
    norm = Norm(source.tensor("model.norm.weight", "vector"), decoder.norm.variance_epsilon)
    if embedding is None:
        embedding = head = matrix_of(source, "model.embed_tokens")
    else:
        head = matrix_of(source, "lm_head")
    return LlamaWeights(embedding, layers, norm, head, scales, windows)


def matrix_of(source: WeightSource, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
    """The matrix that is stored under ``name``, with its ``bias`` if it has one."""
    weight = f"{name}.weight"
    stored = source.tensor(weight, use)
    matrix = source.format(weight)(stored, source.tensor(f"{name}.bias", "vector") if bias else None)
    return packed(matrix, source.read)


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
        made[part] = matrix_of(source, start + name, bias=module.get_submodule(name).bias is not None)
    joined = both = None
    if join or convert is not None:
        joined = _joined(made, ("query", "key", "value"), convert)
    if convert is not None:
        both = _joined(made, ("gate", "up"), convert)
        made.update({part: convert(made[part]) for part in ("output", "down")})

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


def _joined(made: dict[str, Matrix], names: Sequence[str], convert: Callable[[Matrix], Matrix] | None) -> Matrix | None:
    """Matrices of ``made`` as one, of which theirs become parts; None where they are of several formats."""
    parts = [made[name] for name in names]
    if len({type(part) for part in parts}) > 1:
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

    def format(self, name: str) -> Callable[[Tensor, Tensor | None], Matrix]:
        """See :class:`WeightSource`."""
        return DenseMatrix

    def read(self, part: Tensor) -> None:
        """See :class:`WeightSource`."""
