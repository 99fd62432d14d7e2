"""transformers' modules with our kernels inside, Triton's on a GPU and those of C++ on a CPU: a norm in one pass where
torch takes eight, a gate in one, products of few rows at the rate at which weights are read.

A module is what it computes: one is taken over where a kernel gives what it gives for random rows (and weights), to
the rounding of its type. All others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.models.rebuilt import plain_forward, with_functions
from saccade.ops import cpu_modules, row_passes, slotted
from saccade.ops.matrices import DenseMatrix
from saccade.ops.norming import PLUS_ONE, ROUNDED, WHOLE, Norming

_MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of a gate, what it gates, and back
_ROTATION = "apply_rotary_pos_emb"
_ROWS = 3  # by which a module is judged
_CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class _Kernels(NamedTuple):
    """Those of a device."""

    norm: Callable[..., Tensor]
    product: Callable[[Tensor, DenseMatrix], Tensor]
    gated: Callable[[Tensor, DenseMatrix, DenseMatrix], Tensor]
    dtypes: tuple[torch.dtype, ...]  # of products
    most: int | None  # rows of a product; None: of any number
    rotate: Callable[..., None]


def _kernels(device: torch.device) -> _Kernels:
    if slotted.on_host(device):
        own = cpu_modules
        of_all = torch.float32, torch.bfloat16
        return _Kernels(own.norm, own.product, own.gated, of_all, None, row_passes.rotate)
    from saccade.ops.triton import norms, products, rows

    halves = torch.float16, torch.bfloat16
    return _Kernels(norms.norm, products.product, products.gated, halves, products.MOST_ROWS, rows.rotate)


def serves(device: torch.device) -> bool:
    """Whether the kernels run on modules that lie on ``device``."""
    return slotted.serves(device)


def fuse(model: nn.Module) -> int:
    """Take over what can be of the modules in ``model``, which lies on a device of our kernels; returns how many
    are."""
    taken = 0
    kernels = _kernels(next(model.parameters()).device)
    with torch.inference_mode():
        for module in model.modules():
            if "forward" not in vars(module):
                made = (
                    _norm(module, kernels)
                    or _mlp(module, kernels)
                    or _linear(module, kernels)
                    or _rotating(module, kernels)
                )
                if made is None:
                    continue
                module.forward = made
            taken += 1
    return taken


def _same(ours: Tensor, theirs: Tensor) -> bool:
    bound = _CLOSE[theirs.dtype]
    return ours.dtype == theirs.dtype and torch.allclose(ours.float(), theirs.float(), rtol=bound, atol=bound / 8)


def _norm(module: nn.Module, kernels: _Kernels) -> Callable[..., Tensor] | None:
    """For an RMS norm of one weight, and a gate if it takes one."""
    own = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(own) != {"weight"} or "Norm" not in type(module).__name__ or not isinstance(epsilon, float):
        return None
    weight = own["weight"]
    if weight.dim() != 1 or weight.dtype not in _CLOSE:
        return None
    rows, gates = torch.randn(2, 1, _ROWS, len(weight), dtype=weight.dtype, device=weight.device)
    other = {"weight": 0.5 + torch.rand_like(weight)}
    given = (rows,) if "Gated" not in type(module).__name__ else (rows, gates)
    try:
        theirs = torch.func.functional_call(module, other, given)
    except Exception:  # it takes something else
        return None
    for how in _normings(module, len(weight), gated=len(given) > 1):
        if _same(kernels.norm(rows, other["weight"], epsilon, how, *given[1:]), theirs):
            return _FusedNorm(module, epsilon, how, kernels)
    return None


class _FusedNorm:
    """The forward of a module that norms."""

    def __init__(self, module: Any, epsilon: float, how: Norming, kernels: _Kernels) -> None:
        self.module, self.epsilon, self.how, self.kernels = module, epsilon, how, kernels

    def __call__(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.kernels.norm(x, self.module.weight, self.epsilon, self.how, gate)


def norm_of(module: Any) -> tuple[Tensor, float, Norming] | None:
    """Weight, epsilon and kind of a module whose norm has been taken over; None of any other."""
    forward = getattr(module, "forward", None)
    return (forward.module.weight, forward.epsilon, forward.how) if isinstance(forward, _FusedNorm) else None


def _normings(module: nn.Module, channels: int, gated: bool) -> Iterator[Norming]:
    groups = getattr(module, "n_groups", None) or channels // getattr(module, "group_size", channels)
    for weights, first in product((ROUNDED, PLUS_ONE, WHOLE), (False, True) if gated else (False,)):
        yield Norming(weights, first, groups)


def _mlp(module: nn.Module, kernels: _Kernels) -> Callable[..., Tensor] | None:
    """For a gated MLP of three products."""
    for names in _MLPS:
        parts = [getattr(module, name, None) for name in names]
        if not all(type(part) is nn.Linear for part in parts) or len(list(module.parameters())) > 2 * len(parts):
            continue
        gate, up, down = parts
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)

        def forward(x: Tensor, gate: Any = gate, up: Any = up, down: Any = down) -> Tensor:
            flat = x.flatten(0, -2)
            inner = kernels.gated(flat, _matrix(gate), _matrix(up))
            return kernels.product(inner, _matrix(down)).view(x.shape)

        rows = torch.randn(1, _ROWS, gate.in_features, dtype=gate.weight.dtype, device=gate.weight.device)
        try:
            theirs = module(rows)
        except Exception:  # it takes something else
            continue
        if isinstance(theirs, Tensor) and theirs.shape == rows.shape and _same(forward(rows), theirs):
            return forward
    return None


def _linear(module: nn.Module, kernels: _Kernels) -> Callable[..., Tensor] | None:
    if type(module) is not nn.Linear or module.weight.dtype not in kernels.dtypes:
        return None

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if not rows or (kernels.most is not None and rows > kernels.most):
            return nn.functional.linear(x, module.weight, module.bias)
        return kernels.product(x.reshape(rows, -1), _matrix(module)).view(*x.shape[:-1], -1)

    return forward


def _rotating(module: nn.Module, kernels: _Kernels) -> Callable[..., Tensor] | None:
    """For a layer's attention that rotates queries and keys which nothing else reads, halves against each other."""
    forward = plain_forward(module)
    if _ROTATION not in getattr(forward, "__code__", _rotating.__code__).co_names:
        return None
    theirs = forward.__globals__[_ROTATION]
    weight = next((one for one in module.parameters() if one.dtype in _CLOSE), None)
    if weight is None:
        return None
    q, k = torch.randn(2, 1, 2, _ROWS, 32, dtype=weight.dtype, device=weight.device)
    cos, sin = torch.randn(2, 1, _ROWS, 32, dtype=weight.dtype, device=weight.device)
    ours = _rotate(theirs, kernels)
    try:
        expected = theirs(q, k, cos, sin)
    except Exception:  # it takes something else
        return None
    if not all(map(_same, ours(q.clone(), k.clone(), cos, sin), expected)):
        return None
    return with_functions(module, {_ROTATION: ours})


def _rotate(otherwise: Callable[..., tuple[Tensor, Tensor]], kernels: _Kernels) -> Callable[..., tuple[Tensor, Tensor]]:
    """Of one sequence's ``q``, ``k`` [1, heads, rows, head_dim], by ``cos``, ``sin`` [1, rows, n], in place."""

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if more or named or len(q) != 1 or q.stride(-1) != 1 or k.stride(-1) != 1 or not q.shape[2]:
            return otherwise(q, k, cos, sin, *more, **named)
        kernels.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q, k

    return call


def _matrix(linear: nn.Linear) -> DenseMatrix:
    return DenseMatrix(linear.weight, linear.bias)
