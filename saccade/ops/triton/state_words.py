"""Names for the words of a device state (methods/device_state.py): the host that packs them and the kernels that read
them share one definition.

The host declares a ``NamedTuple`` and packs it by keyword::

    class Words(NamedTuple):
        sinks: int
        keys: int  # address of int32 [units, room]

    def words(self, layer):
        return Words(sinks=4, keys=keys.data_ptr())

A kernel reads them by their places::

    W = places(Words)  # a global of the kernels' module

    first = tl.load(own + W.sinks)
    keys = tl.load(own + W.keys).to(tl.pointer_type(tl.int32))

A misspelt name is an error on either side, and the places are part of what Triton's cache of kernels goes by.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl


class _Places(tl.constexpr):
    """A constexpr of a tuple of places. Compiled kernels look for names in its value; the interpreter asks it."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("_") or name == "value":
            raise AttributeError(name)
        return getattr(self.value, name)


def places(words: type[tuple[Any, ...]]) -> Any:
    """The place of each field of the ``NamedTuple`` class ``words``, for kernels. It must be a global of the kernels'
    module, under a name of its own: of what a module holds Triton's cache sees nothing. TypeError for a field that a
    constexpr has already."""
    names: tuple[str, ...] = words._fields  # type: ignore[attr-defined]
    if taken := [name for name in names if name in ("value", "type") or hasattr(tl.constexpr, name)]:
        raise TypeError(f"{words.__name__}.{taken[0]} is an attribute of Triton's constexpr; name that word otherwise")
    return _Places(words(*range(len(names))))
