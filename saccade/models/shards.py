"""How many ranks share a model out, and what a rank is told of that when it loads its part (Megatron-LM; Shoeybi et
al., 2019, section 3). What is cut, and how, is ``models.parts``'.

A rank has the query heads that read its KV heads. Of more ranks than KV heads several have the same head, with all
query heads that read it: they attend alike, and divide what the output matrix takes in.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.models.families import Family
from saccade.models.head_order import HeadDensities
from saccade.models.interface import ModelSpec
from saccade.models.part_matrices import Joined, Ranks


@dataclass(frozen=True)
class Share:
    """That a model is loaded by ``rank``, from 0, of ``ranks`` that run it together; ``joined`` gives what joins them
    once they have met; by ``densities`` they share KV heads out."""

    rank: int
    ranks: int
    joined: Joined
    densities: HeadDensities | None = None
    _apart: list[Ranks] = field(default_factory=list)

    def join(self) -> Ranks:
        """What joins the ranks; while this one loads, nothing: results mean nothing then."""
        return self._apart[0] if self._apart else self.joined()

    def run(self, size: int, even: bool = True) -> tuple[int, int]:
        """Where this rank's run of ``size`` things begins and ends; ``even``: all ranks have as many."""
        assert not even or size % self.ranks == 0, (size, self.ranks)
        return self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the block this rank runs its part without the others."""
        self._apart.append(_Apart(self.ranks))
        try:
            yield
        finally:
            self._apart.pop()


class _Apart:
    """In place of other ranks, of parts like this one's."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part] * self._ranks


def why_whole(family: Family) -> str | None:
    """Why ranks cannot share a model of ``family`` out; None where they can."""
    if family.latent:
        return "stores latents, which all heads share"
    if family.shares_keys or family.heads_by_layer:
        return "has layers that read others' keys, or heads of other sizes"
    if family.keeping is not None and family.keeping.attend:
        return "has layers that attend and keep a state"
    return None


def check_family(family: Family, ranks: int) -> None:
    """ModelError for a family that ranks cannot share out."""
    reason = why_whole(family)
    if reason is not None:
        raise ModelError(
            f"tensor_parallel_size={ranks} does not go with {family.model_type}, which {reason}; use "
            "tensor_parallel_size=1"
        )


def check_ranks(ranks: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """ModelError where the KV heads cannot be shared out evenly, or have no such number of ranks each."""
    fitting = fitting_ranks(heads, kv_heads, head_dim)
    if ranks not in fitting:
        raise ModelError(
            f"tensor_parallel_size={ranks} cannot share out the model's {kv_heads} KV heads evenly; "
            f"use {' or '.join(map(str, fitting))}"
        )


def whole_spec(spec: ModelSpec, parts: int) -> ModelSpec:
    """The shape of the model of one of whose ``parts`` it is ``spec``."""
    return replace(spec, heads=spec.heads * parts, kv_heads=spec.kv_heads * parts)


def fitting_ranks(heads: int, kv_heads: int, head_dim: int) -> list[int]:
    """Numbers of ranks of which each gets as many KV heads, or of which each KV head gets as many: these divide the
    output matrix's channels evenly."""
    fewer = [ranks for ranks in range(1, kv_heads + 1) if kv_heads % ranks == 0]
    more = range(2 * kv_heads, heads + 1, kv_heads)
    return [*fewer, *(ranks for ranks in more if heads * head_dim % ranks == 0)]


def release(device: torch.device) -> None:
    """Have the memory given back that loading took."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
