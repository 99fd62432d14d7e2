"""The state of a decode method: copied, moved, taken back and written out.

A method keeps what it learns in a :class:`MethodState`, one per sequence and layer, or keeps nothing (None). The
functions here work on a state, on None, on a tensor, and on lists, tuples and dicts of these: whatever a method's
``begin`` or ``watch`` returns, or the list of all layers' states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor

from saccade.errors import SaccadeError, shown
from saccade.methods.fitting import Fitting, Sizes, is_of

_PLAIN = (type(None), bool, int, float, str)
_KINDS: dict[str, type[MethodState]] = {}  # by class name

Saved = tuple[dict[str, Tensor], Any]  # tensors by name, and the rest as JSON can hold it


class MethodState:
    """Base of a state: a dataclass whose fields are tensors, plain values, other states, and lists, tuples and dicts of
    these.

    A copy clones every tensor but those of two kinds of fields. ``replaced``: their tensors are never written to, only
    replaced by others, so all copies share them. ``grown``: their tensors are written to only behind what the state
    knows of, so a copy that never goes on beside the original shares them too (:func:`snapshot`). ``version`` counts
    changes of what the fields mean; a state saved under another version is refused.
    """

    version: ClassVar[int] = 1
    replaced: ClassVar[frozenset[str]] = frozenset()
    grown: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__ in _KINDS:
            raise TypeError(
                f"there is a method state named {cls.__name__} already; saved states are known by that name"
            )
        _KINDS[cls.__name__] = cls

    def fork(self) -> Self:
        """A copy that goes its own way."""
        return self._changed(partial(self._copied, self.replaced), fork)

    def snapshot(self) -> Self:
        """A copy of this moment. Of it and the original only one may go on."""
        return self._changed(partial(self._copied, self.replaced | self.grown), snapshot)

    def to(self, device: torch.device | str) -> Self:
        """The state with its tensors on ``device``; it takes the place of this one, with which it may share some."""
        return self._changed(lambda _, tensor: tensor.to(device), partial(to, device=device))

    def holds(self, length: int) -> bool:
        """Whether it can tell by itself what it was when the sequence held ``length`` tokens."""
        return False

    def truncate(self, length: int) -> None:
        """Become what it was when the sequence held ``length`` tokens. SaccadeError unless it ``holds`` that."""
        if not self.holds(length):
            raise SaccadeError(
                f"a {type(self).__name__} cannot go back to {length} tokens by itself: take it from a StateHistory "
                "that was marked there, or begin it again"
            )

    def learnt(self) -> int | None:
        """How many tokens it has learnt from; None where it keeps no count. Fewer than there are where a layer's own
        window has ruled since."""
        return None

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """Hold the fields of a state that was read to what its kind takes for granted: SaccadeError by ``fitting``
        where one cannot be of a sequence of such ``sizes``. Types are those of the annotations by then, and states
        within are looked at by themselves."""

    def saved_fields(self) -> dict[str, Any]:
        """What is written of it, by field: no more than what it means."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def cloned(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the field ``name``."""
        return tensor.clone()

    def _copied(self, shared: frozenset[str], name: str, tensor: Tensor) -> Tensor:
        return tensor if name in shared else self.cloned(name, tensor)

    def _changed(self, tensors: Callable[[str, Tensor], Tensor], states: Callable[[MethodState], MethodState]) -> Self:
        """A copy whose tensors and states went through ``tensors``, with their field's name, and ``states``."""
        made = copy.copy(self)
        for field in fields(self):  # type: ignore[arg-type]
            value = _mapped(getattr(self, field.name), partial(tensors, field.name), states)
            setattr(made, field.name, value)
        return made


def can_copy(value: Any) -> bool:
    """Whether it is a state as a method is to keep it, or none: what the functions below work on."""
    return isinstance(value, (*_PLAIN, MethodState, Tensor, list, tuple, dict))


def fork(value: Any) -> Any:
    """A copy that goes its own way."""
    return _mapped(value, torch.clone, MethodState.fork)


def snapshot(value: Any) -> Any:
    """A copy of this moment, cheaper than a fork: of it and the original only one may go on."""
    return _mapped(value, torch.clone, lambda state: state.snapshot())


def to(value: Any, device: torch.device | str) -> Any:
    """The value with its tensors on ``device``."""
    return _mapped(value, lambda tensor: tensor.to(device), lambda state: state.to(device))


def save(value: Any) -> Saved:
    """Tensors by name, contiguous copies, and what is not a tensor as plain data that JSON can hold."""
    tensors: dict[str, Tensor] = {}
    return tensors, _encoded(value, (), tensors)


def load(tensors: Mapping[str, Tensor], data: Any) -> Any:
    """What ``save`` was given. The tensors become the value's own.

    Raises SaccadeError for a kind or version of state that this build does not know, and for damaged data.
    """
    if isinstance(data, _PLAIN):
        return data
    if not isinstance(data, Mapping):
        raise SaccadeError(f"saved method state: {shown(data, 80)} is not what a state is saved as")
    if "state" in data:
        return _loaded_state(tensors, data)
    if isinstance(name := data.get("tensor"), str):
        if name not in tensors:
            raise SaccadeError(f"saved method state: the tensor {shown(name, 80)} is missing")
        return tensors[name]
    if isinstance(parts := data.get("list"), list):
        return [load(tensors, part) for part in parts]
    if isinstance(parts := data.get("tuple"), list):
        return tuple(load(tensors, part) for part in parts)
    if isinstance(parts := data.get("dict"), Mapping):
        return {name: load(tensors, part) for name, part in parts.items()}
    raise SaccadeError(f"saved method state: {shown(dict(data), 80)} is not what a state is saved as")


def check(value: Any, sizes: Sizes) -> None:
    """Raise SaccadeError where a state, or one within, cannot be of a sequence of such ``sizes``."""
    if isinstance(value, MethodState):
        value.fit(sizes, Fitting(type(value).__name__))
        value = [getattr(value, field.name) for field in fields(value)]  # type: ignore[arg-type]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            check(part, sizes)


def _loaded_state(tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> MethodState:
    name, version = data["state"], data.get("version")
    kind = _kind_named(name) if isinstance(name, str) else None
    if kind is None or kind.version != version:
        known = f"version {kind.version}" if kind is not None else "no such state, only " + ", ".join(sorted(_KINDS))
        raise SaccadeError(
            f"a method state was saved as {name} version {version}; this build knows {known}. Compute the turn again, "
            "or load it with the build that saved it"
        )
    parts = data.get("fields", {})
    wanted = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(parts, Mapping) or set(parts) != wanted:
        raise SaccadeError(f"a saved {name} has the fields {shown(parts, 120)}, not {sorted(wanted)}: it is damaged")
    loaded = {field: load(tensors, part) for field, part in parts.items()}
    hints = get_type_hints(kind)
    for field, value in loaded.items():
        if not is_of(value, hints[field]):
            raise SaccadeError(f"a saved {name} has {field}={shown(value, 60)}: it is damaged")
    return kind(**loaded)


def _kind_named(name: str) -> type[MethodState] | None:
    """The state of a class name, of methods from outside the package too."""
    if name not in _KINDS:
        from saccade.methods.outside import load_outside  # which imports methods, and these this module

        load_outside()
    return _KINDS.get(name)


def _mapped(value: Any, tensors: Callable[[Tensor], Tensor], states: Callable[[MethodState], MethodState]) -> Any:
    if isinstance(value, Tensor):
        return tensors(value)
    if isinstance(value, MethodState):
        return states(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, tensors, states) for part in value)
    if isinstance(value, dict):
        return {name: _mapped(part, tensors, states) for name, part in value.items()}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"a method state cannot hold a {type(value).__name__}: {value!r:.80}")


def _encoded(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = ".".join(path) or "value"
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, MethodState):
        named = {name: _encoded(part, (*path, name), tensors) for name, part in value.saved_fields().items()}
        return {"state": type(value).__name__, "version": value.version, "fields": named}
    if isinstance(value, (list, tuple)):
        parts = [_encoded(part, (*path, str(at)), tensors) for at, part in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": parts}
    if isinstance(value, dict):
        return {"dict": {name: _encoded(part, (*path, name), tensors) for name, part in value.items()}}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"a method state cannot hold a {type(value).__name__}: {value!r:.80}")
