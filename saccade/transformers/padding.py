"""Which columns of a batch are padding, as transformers' attention masks say it."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.transformers.rows import Places


def whole_mask(mask: Tensor | None, before: Tensor | None, batch: int, stored: int, columns: int) -> Tensor | None:
    """bool [batch, stored + columns] of an attention ``mask`` of this shape; None where none is padding. ``before``:
    what it was for the ``stored`` columns alone. SaccadeError for one that does not go with that."""
    there = stored + columns
    if mask is None:
        if before is not None:
            raise SaccadeError("earlier columns of this cache were padding; give attention_mask with every call")
        return None
    if mask.shape != (batch, there):
        raise SaccadeError(
            f"attention_mask has shape {tuple(mask.shape)}, and must have {(batch, there)}: a column for each of "
            f"{stored} that are stored and {columns} new ones"
        )
    whole = mask.cpu()
    known = torch.ones(batch, stored, dtype=torch.bool) if before is None else before
    if not torch.equal(whole[:, :stored], known):
        raise SaccadeError("attention_mask calls earlier columns padding that were none, or the other way round")
    return None if bool(whole.all()) else whole


def places(real: Tensor) -> Places:
    """The true places of a row, as a range where nothing lies between them."""
    found: list[int] = real.nonzero()[:, 0].tolist()
    if not found:
        return range(0)
    first, last = found[0], found[-1] + 1
    return range(first, last) if last - first == len(found) else found


def has_holes(mask: Tensor) -> bool:
    """Whether padding lies between tokens of a row of bool [batch, columns]."""
    begins = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0].long()
    return bool((begins > 1).any())
