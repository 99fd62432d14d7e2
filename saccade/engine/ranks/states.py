"""Saved states of the model's layers, whole, and what each rank has of them (``StatePart.blocks``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saccade.engine.memory.saved_memory import KEPT, OLDER
from saccade.kv.states import StateFormat, StatePart

AXIS = 1  # behind layers: of heads, groups or channels


def is_state(name: str) -> bool:
    """Whether a saved tensor is one of a state."""
    return name.startswith((f"{KEPT}/", f"{OLDER}/"))


def cut_states(format: StateFormat, parts: Mapping[str, Tensor], ranks: int) -> list[dict[str, Tensor]]:
    """What each of ``ranks`` has of whole ``parts`` [layers, ...]. One of another shape is left to those who refuse
    it."""
    known = {one.name: one.blocks for one in format.parts}
    made: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, whole in parts.items():
        blocks = known.get(name, ())
        fits = bool(blocks) and whole.dim() > AXIS and whole.shape[AXIS] == sum(blocks)
        runs = [one.chunk(ranks, AXIS) for one in whole.split(list(blocks), AXIS)] if fits else []
        for rank, own in enumerate(made):
            own[name] = torch.cat([run[rank] for run in runs], AXIS) if fits else whole
    return made


def joined_state(part: StatePart, all_ranks: Sequence[Tensor]) -> Tensor:
    """A whole part of a state, of those of all ranks."""
    if not part.blocks:
        return all_ranks[0]
    widths = [size // len(all_ranks) for size in part.blocks]
    runs = zip(*(own.split(widths, AXIS) for own in all_ranks))
    return torch.cat([torch.cat(run, AXIS) for run in runs], AXIS)
