"""transformers' modules over matrices of any format: what runs the families that are not of Llama's shape where their
weights are no plain numbers. Products, embeddings and experts are exchanged; all else stays the family's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from saccade.errors import ModelError
from saccade.models.families import FAMILIES
from saccade.models.llama_weights import Use, WeightSource
from saccade.models.parts import Parts
from saccade.ops.matrices import Matrix
from saccade.ops.tile_weights import TileExperts

FEW = 64  # rows times experts of each, up to which all meet in one launch


class QuantisedSource(WeightSource, Protocol):
    """A source that modules are filled from: ``models.gguf_weights``, ``models.packed_weights`` or
    ``models.rounded_weights``."""

    @property
    def parts(self) -> Parts | None:
        """What a rank has of the weights, which are that alone; None for all."""
        ...

    def experts(self, name: str, count: int) -> list[Matrix]:
        """Matrices of the same name of so many experts, or of those of them that the rank has."""
        ...

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor's numbers, on the host."""
        ...

    def let_go(self) -> None:
        """Give back the pages of the last tensor, once all are loaded."""
        ...


class MatrixProduct(nn.Module):
    """In the place of an ``nn.Linear``: ``matrix`` times rows, plus its bias."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.matrix = matrix

    @property
    def weight(self) -> Tensor:
        """As it is stored."""
        return self.matrix.weight

    @property
    def bias(self) -> Tensor | None:
        """As of an ``nn.Linear``: ``kv_rotate`` balances keys by it."""
        return self.matrix.bias

    @property
    def out_features(self) -> int:
        """As of an ``nn.Linear``."""
        return self.matrix.made

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., channels] -> [..., outputs]."""
        made = self.matrix.product(x.reshape(-1, x.shape[-1]))
        return made.view(*x.shape[:-1], self.out_features)  # of no rows, too


class MatrixEmbedding(nn.Module):
    """In the place of an ``nn.Embedding``: rows of ``matrix`` in ``dtype``, times ``scale``."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__()
        self.matrix, self.dtype = matrix, dtype
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=dtype))  # as modules round it

    @property
    def weight(self) -> Tensor:
        """As it is stored."""
        return self.matrix.weight

    @property
    def num_embeddings(self) -> int:
        """As of an ``nn.Embedding``."""
        return self.matrix.made

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` int64 [...] -> [..., channels]."""
        rows = self.matrix.rows(ids.reshape(-1), self.dtype).view(*ids.shape, -1)
        return rows if self.scale is None else rows * self.scale


class MatrixExperts(nn.Module):
    """In the place of a family's experts, whose matrices it has apart: ``inner`` makes of what those that an expert
    begins with give (a gate and what it gates, or one alone) what its ``down`` takes. ``since``: of some experts, the
    number of the first; what a row's others add is left out."""

    def __init__(
        self, first: Sequence[list[Matrix]], down: list[Matrix], inner: Callable[..., Tensor], since: int | None = None
    ) -> None:
        super().__init__()
        self.since, self.count = since, len(down)
        found = [TileExperts.of(one) for one in (*first, down)] if down else [None]
        together = [one for one in found if one is not None]
        self.together = together if len(together) == len(found) else None
        own = [*first, down] if self.together is None else [one.matrices for one in self.together]
        self.experts, self.inner = list(zip(*own, strict=True)), inner

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows [n, channels], the experts of each int64 [n, k] and what they count for [n, k] -> [n, channels]. Few
        rows on a GPU take three launches, in which each meets its own experts; of many, those of an expert are computed
        together, once the host has learnt which they are."""
        if self.since is not None:
            top_k_index, top_k_weights = self._own(top_k_index - self.since, top_k_weights)
        if self.together is not None and top_k_index.numel() <= FEW:
            *first, down = self.together
            chosen, each = top_k_index.flatten(), top_k_index.shape[1]
            made = self.inner(*(one.product(hidden_states, chosen, each) for one in first))
            made = down.product(made, chosen).view(*top_k_index.shape, -1)
            return (made.float() * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)
        out = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist() if self.count else ():
            *begin, last = self.experts[number]
            rows, place = torch.where(top_k_index == number)
            given = hidden_states[rows]
            made = last.product(self.inner(*(one.product(given) for one in begin)))
            out.index_add_(0, rows, (made * top_k_weights[rows, place, None]).to(out.dtype))
        return out

    def _own(self, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Of those chosen, the own ones; others count as the first, for nothing."""
        here = (chosen >= 0) & (chosen < self.count)
        return torch.where(here, chosen, 0), torch.where(here, weights, 0)


def matrices(model: nn.Module) -> Iterator[Matrix]:
    """All matrices of a filled model, each once."""
    seen: set[int] = set()
    for module in model.modules():
        held: Iterable[Matrix] = ()
        if isinstance(module, (MatrixProduct, MatrixEmbedding)):
            held = (module.matrix,)
        elif isinstance(module, MatrixExperts):
            held = chain.from_iterable(module.experts)
        for matrix in held:
            if id(matrix) not in seen:
                seen.add(id(matrix))
                yield matrix


def formats(model: nn.Module) -> str | None:
    """Formats of the matrices that are no plain numbers; None where all are."""
    return "+".join(sorted({one.format for one in matrices(model) if one.format is not None})) or None


def stored_as(model: nn.Module) -> dict[str, torch.Size]:
    """Names and shapes of all weights of a model, experts apart as GGUF has them."""
    shapes: dict[str, torch.Size] = {}
    for name, held in model.state_dict().items():
        start, _, own = name.rpartition(".")
        if not start.endswith(".experts"):
            shapes[name] = held.shape
            continue
        part, _, bias = own.partition("_proj")
        shape = held.shape
        if not bias and f"{name}_bias" in model.state_dict():  # gpt-oss has its experts' matrices transposed
            shape = torch.Size((shape[0], shape[2], shape[1]))
        suffix = "bias" if bias else "weight"
        if part == "gate_up":
            half = torch.Size((shape[0], shape[1] // 2, *shape[2:]))
            shapes |= {f"{start}.gate.{suffix}": half, f"{start}.up.{suffix}": half}
        else:
            shapes[f"{start}.{part}.{suffix}"] = shape
    return shapes


def is_tied(model: Any) -> bool:
    """Whether the head is the embedding: Nemotron-H's never is, whatever its config says."""
    return bool(model.config.tie_word_embeddings and getattr(model, "_tied_weights_keys", None))


def refuse_unfilled(model: Any) -> None:
    """ModelError for a model on torch's "meta" device with a buffer that :func:`fill` would leave empty: no file holds
    it, and no module that is exchanged or made anew has it."""
    stored, rotary = model.state_dict().keys(), FAMILIES[model.config.model_type].rotary
    remade = getattr(model.get_decoder(), rotary) if rotary is not None else None
    made = set() if remade is None else set(remade.modules())
    for name, buffer in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        if buffer.is_meta and name not in stored and owner not in made and not isinstance(owner, nn.Embedding):
            raise ModelError(
                f"{model.config.model_type}: quantised files are not read of a model with a "
                f"{name.rpartition('.')[2]}, which no file holds; give a checkpoint of plain numbers, with "
                "quantize='int8' or 'int4' to make it smaller"
            )


def fill(model: Any, source: QuantisedSource, device: torch.device, dtype: torch.dtype) -> None:
    """Give ``model``, whose modules may hold nothing (torch's "meta" device), the weights of ``source``. ModelError as
    of :func:`refuse_unfilled`."""
    refuse_unfilled(model)
    decoder = model.get_decoder()
    head, embedding = model.get_output_embeddings(), decoder.get_input_embeddings()
    tied = is_tied(model)
    named = next(name for name, module in model.named_modules() if module is embedding)
    table = source.matrix(named, use="matrix" if tied else "table")
    for name, module in list(model.named_modules()):
        made: nn.Module | None = None
        if module is embedding:
            made = MatrixEmbedding(table, dtype, getattr(module, "scalar_embed_scale", None))
        elif module is head and tied:  # which may have a bias of its own (Phi)
            bias = None if module.bias is None else source.tensor(f"{name}.bias", "vector")
            made = MatrixProduct(table if bias is None else table.like(table.stored, bias))
        elif isinstance(module, nn.Embedding):  # of a token for each layer
            rows = source.matrix(name, use="table")
            made = MatrixEmbedding(rows, dtype, getattr(module, "scalar_embed_scale", None))
        elif isinstance(module, nn.Linear):
            made = MatrixProduct(source.matrix(name, bias=module.bias is not None))
        elif isinstance(getattr(module, "down_proj", None), nn.Parameter) and not getattr(source, "stacked", False):
            made = _experts(name, module, source)
        if made is not None:
            model.set_submodule(name, made)
    for name, held in [*model.named_parameters(), *_stored_buffers(model)]:
        parent, _, own = name.rpartition(".")
        value = source.plain(name, held.dtype).to(device)
        placed = nn.Parameter(value, requires_grad=False) if isinstance(held, nn.Parameter) else value
        setattr(model.get_submodule(parent), own, placed)
    rotary = FAMILIES[model.config.model_type].rotary
    if rotary is not None and getattr(decoder, rotary) is not None:  # it holds factors of its own
        setattr(decoder, rotary, type(getattr(decoder, rotary))(config=model.config).to(device))


def part_of_experts(held: Callable[[str], Tensor], has: Callable[[str], bool], part: str, own: str) -> Tensor:
    """What all experts have of ``part`` (gate, up or down), outputs first: its ``own`` weight or bias, in tensors that
    they have together, by the names of their module."""
    gates, biased = has("gate_up_proj"), has("down_proj_bias")  # gpt-oss: transposed, gate and up in turns
    kept = "gate_up" if part != "down" and gates else part
    joined = held(f"{kept}_proj{'_bias' if own == 'bias' else ''}")
    whole = joined.transpose(1, 2) if biased and own == "weight" else joined
    if part == "down" or not gates:
        return whole
    at = ("gate", "up").index(part)
    return whole[:, at::2] if biased else whole.chunk(2, 1)[at]


class ModuleTensors:
    """The tensors of a loaded model of modules by the names of :func:`stored_as`, where they lie: a
    ``rounded_weights.PlainSource``. A module that is exchanged meanwhile gives its memory back."""

    parts = None  # it has all of them

    def __init__(self, model: Any) -> None:
        self._model = model

    def __contains__(self, name: str) -> bool:
        try:
            self.stored(name)
        except AttributeError:
            return False
        return True

    def stored(self, name: str) -> Tensor:
        """See ``rounded_weights.PlainSource``."""
        start, _, own = name.rpartition(".")
        module, _, part = start.rpartition(".")
        if not module.endswith(".experts"):
            parent = self._model.get_submodule(start)
            return getattr(parent, own).detach()
        experts = self._model.get_submodule(module)
        return part_of_experts(
            lambda held: getattr(experts, held).detach(), lambda held: hasattr(experts, held), part, own
        )

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``rounded_weights.PlainSource``."""
        return self.stored(name)

    def read(self, part: Tensor) -> None:
        """See ``rounded_weights.PlainSource``."""


def _stored_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    stored = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def _experts(name: str, module: Any, source: QuantisedSource) -> MatrixExperts:
    def apart(part: str) -> list[Matrix]:
        return source.experts(f"{name}.{part}", module.num_experts)

    since = None if source.parts is None else source.parts.own_experts(module.num_experts).start
    if not hasattr(module, "gate_up_proj"):
        return MatrixExperts([apart("up")], apart("down"), module.act_fn, since)
    if hasattr(module, "limit"):  # gpt-oss has gate and up in turns

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            return module._apply_gate(torch.stack([gate, up], -1).flatten(-2))

    else:

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            return module.act_fn(gate) * up

    return MatrixExperts([apart("gate"), apart("up")], apart("down"), gated, since)
