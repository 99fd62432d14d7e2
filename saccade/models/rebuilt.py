"""Forwards of transformers' modules with other functions under the names that they call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature, unwrap
from types import FunctionType, MethodType
from typing import Any

CACHES = ("cache", "cache_params", "past_key_values")  # from 5.24 on, and before: of some modules, of all others


def plain_forward(module: Any) -> FunctionType:
    """The forward of a module's class without what wraps it, which fires hooks of offloading: we do not use them."""
    forward: FunctionType = unwrap(type(module).forward)
    return forward


def cache_argument(forward: Callable[..., Any]) -> str:
    """What this version of transformers calls the cache that ``forward``, of a model, a layer or a module, is given."""
    asked = signature(forward).parameters
    return next((name for name in CACHES if name in asked), CACHES[-1])


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
