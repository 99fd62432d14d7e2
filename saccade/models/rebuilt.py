"""Forwards of transformers' modules with other functions under the names that they call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any


def plain_forward(module: Any) -> FunctionType:
    """The forward of a module's class without what wraps it, which fires hooks of offloading: we do not use them."""
    forward: FunctionType = unwrap(type(module).forward)
    return forward


def with_functions(module: Any, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The forward of ``module`` where ``functions`` are what it calls by these names; others' keep their own."""
    forward = plain_forward(module)
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(own, module)
