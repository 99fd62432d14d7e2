"""Tensors of equal content in memory laid out otherwise, for entries of kernels that are told an address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saccade.selection import Selection, Shape


def _garbage(shape: tuple[int, ...], like: Tensor) -> Tensor:
    if like.dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=like.dtype)
    return torch.ones(shape, dtype=like.dtype) if like.dtype == torch.bool else torch.full(shape, 3, dtype=like.dtype)


def sliced(x: Tensor) -> Tensor:
    """``x`` as a slice of a larger tensor, garbage on all sides: its rows lie apart, it begins inside."""
    larger = _garbage(tuple(size + 3 for size in x.shape), x)
    view = larger[tuple(slice(1, 1 + size) for size in x.shape)]
    view.copy_(x)
    return view


def spread(x: Tensor) -> Tensor:
    """``x`` as every other entry of a larger tensor's last axis: no two values of a row lie together."""
    larger = _garbage((*x.shape[:-1], 2 * x.shape[-1] + 1), x)
    view = larger[..., 1::2]
    view.copy_(x)
    return view


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"sliced": sliced, "spread": spread}


def laid(value: Any, layout: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with its tensors laid out by ``layout``: a tensor, a selection, or a tuple of such."""
    if isinstance(value, Tensor):
        return layout(value) if value.dim() and value.numel() else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(laid(part, layout) for part in value)
    if isinstance(value, Selection) and is_dataclass(value):
        parts = {f.name: laid(getattr(value, f.name), layout) for f in fields(value) if not f.name.startswith("_")}
        return replace(value, **{name: part for name, part in parts.items() if not isinstance(part, Shape)})
    return value


def parts(value: Any) -> list[Tensor]:
    """The tensors of a result; of flat lists with room behind the last offset, what means something."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in parts(part)]
    if isinstance(value, Selection):
        return [value.unit_mask()]
    return []


def agrees(entry: Callable[..., Any], *inputs: Any, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> None:
    """``entry`` gives the same, to the last bit, of inputs that are not contiguous."""
    expected = parts(entry(*inputs))
    assert expected
    for name in layouts:
        got = parts(entry(*(laid(value, LAYOUTS[name]) for value in inputs)))
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), name
