"""Triton 3.9's interpreter without what it does over and over: import this once, before a kernel runs.

Results are the same, bit for bit; a kernel's test takes a sixth of the time. Upstream, every call of a jitted
function within a kernel patches all of ``triton.language`` anew; every addition of integers is done again in 64 bits,
for an assertion that the interpreter's options then leave out; and types and shapes are made for each value. Here the
language is patched once a process, and types and shapes are kept.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _patch_builtins(package: Any, scope) -> None:
    for name, member in inspect.getmembers(package):
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, None, scope)


class _Forever(interpreter._LangPatchScope):
    """Patches that stay: nothing is compiled in a process whose kernels are interpreted."""

    def __init__(self) -> None:
        super().__init__()
        _patch_builtins(tl.core.tensor_descriptor_base, self)
        for lang in (tl, tl.core):
            for package in (lang, lang.tensor, tl.math):
                _patch_builtins(package, self)
            interpreter._patch_lang_tensor(lang.tensor, self)
            interpreter._patch_lang_core(lang, self)

    def restore(self) -> None:
        pass


@cache
def _patches() -> _Forever:
    return _Forever()


_np_dtype = interpreter._get_np_dtype
_NP_DTYPES: dict[str, np.dtype] = {}


def _get_np_dtype(dtype):
    """By a type's name, in place of a table made anew each time."""
    if (found := _NP_DTYPES.get(dtype.name)) is None:
        found = _NP_DTYPES[dtype.name] = _np_dtype(dtype)
    return found


_block_type = tl.block_type.__init__
_BLOCK_TYPES: dict[tuple[Any, ...], dict[str, Any]] = {}


def _init_block_type(self, element_ty, shape) -> None:
    """As upstream's; one set of fields an element and shape, with a value's ``shape`` and ``numel``."""
    lengths = tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
    key = element_ty.name, lengths
    if (fields := _BLOCK_TYPES.get(key)) is None:
        _block_type(self, element_ty, shape)
        value = object.__new__(tl.tensor)
        _tensor(value, None, self)
        fields = _BLOCK_TYPES[key] = {**vars(self), "of_values": (value.shape, value.numel), "lengths": lengths}
    self.__dict__ = fields.copy()


_OF_SHAPE: dict[tuple[Any, ...], tl.block_type] = {}


def _with_element(self, element) -> tl.block_type:
    key = element.name, self.lengths
    if (found := _OF_SHAPE.get(key)) is None:
        found = _OF_SHAPE[key] = tl.block_type(element, self.shape)
    return found


def _same_block_type(self, other) -> bool:
    return isinstance(other, tl.block_type) and (self.lengths, self.element_ty) == (other.lengths, other.element_ty)


_tensor = tl.tensor.__init__
_SCALAR = tl.tuple([]), tl.constexpr(1)


def _init_tensor(self, handle, type) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_values if isinstance(type, tl.block_type) else _SCALAR


_broadcast = TritonSemantic.broadcast_impl_value
_TOGETHER: dict[tuple[Any, ...], tuple[int, ...] | None] = {}


def _together(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of two that are broadcast; None where they do not go together."""
    try:
        return np.broadcast_shapes(one, other)
    except ValueError:
        return None


def _spread(self, value, like, shape: tuple[int, ...]):
    """``value``, a block or a scalar, over ``shape``. ``like``: a block type, of that shape if it is known."""
    handle, scalar = value.handle, value.type.scalar
    block = isinstance(value.type, tl.block_type)
    data = np.empty(shape, handle.data.dtype if block else _get_np_dtype(handle.dtype))
    data[...] = handle.data
    kind = _with_element(like, scalar) if like.lengths == shape else tl.block_type(scalar, list(shape))
    return self.make_tensor(interpreter.TensorHandle(data, handle.dtype.scalar), kind)


def _broadcast_impl_value(self, lhs, rhs):
    one, other = lhs.type, rhs.type
    if not isinstance(one, tl.block_type):
        return (_spread(self, lhs, other, other.lengths), rhs) if isinstance(other, tl.block_type) else (lhs, rhs)
    if not isinstance(other, tl.block_type):
        return lhs, _spread(self, rhs, one, one.lengths)
    if one.lengths == other.lengths:
        return lhs, rhs
    key = one.lengths, other.lengths
    if key not in _TOGETHER:
        _TOGETHER[key] = _together(*key)
    if (shape := _TOGETHER[key]) is None:
        return _broadcast(self, lhs, rhs)  # which says what is wrong
    return (
        lhs if one.lengths == shape else _spread(self, lhs, other, shape),
        rhs if other.lengths == shape else _spread(self, rhs, one, shape),
    )


_equal = tl.dtype.__eq__


def _same_dtype(self, other) -> bool:
    return self is other or _equal(self, other)


_computed = TritonSemantic.computation_type_impl
_COMPUTED: dict[tuple[Any, ...], tl.dtype] = {}


def _computation_type_impl(self, one, one_is_scalar, other, other_is_scalar, div_or_mod):
    key = one.name, one_is_scalar, other.name, other_is_scalar, div_or_mod
    if (found := _COMPUTED.get(key)) is None:
        found = _COMPUTED[key] = _computed(self, one, one_is_scalar, other, other_is_scalar, div_or_mod)
    return found


_binary = TritonSemantic.binary_op_type_checking_impl


def _binary_op_type_checking_impl(
    self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
):
    """Two values of one type that stays theirs, first."""
    if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
        kind = lhs.dtype
        if not arithmetic_check or _computation_type_impl(self, kind, False, kind, False, div_or_mod) is kind:
            return _broadcast_impl_value(self, lhs, rhs)
    return _binary(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


_cast = TritonSemantic._cast_to_computation_type
_INTEGERS: dict[tuple[Any, ...], tl.tensor] = {}


def _cast_to_computation_type(self, value, dtype):
    """As upstream's, with the constants of kernels made once."""
    if isinstance(value, tl.tensor):
        return value if value.dtype is dtype else self.cast(value, dtype)
    if type(value) is not int:  # 0.0 equals -0.0, and True equals 1
        return _cast(self, value, dtype)
    key = value, dtype.name
    if (found := _INTEGERS.get(key)) is None:
        found = _INTEGERS[key] = _cast(self, value, dtype)
    return found


def _init_handle(self, data, dtype, attr=None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and not interpreter._validate_np_data_size(data, dtype):
        self.__post_init__()  # which says what is wrong


_unwrap = tl.core._unwrap_if_constexpr
_PLAIN = frozenset((tl.tensor, int, float, bool, str, type(None)))


def _unwrap_if_constexpr(value):
    kind = type(value)
    return value if kind in _PLAIN else value.value if kind is tl.constexpr else _unwrap(value)


def _patch_attr(package, name, member, builder, scope) -> None:
    def call(*args, **options):
        options["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **options)

    scope.set_attr(package, name, call)


interpreter._patch_attr = _patch_attr
interpreter.TensorHandle.__init__ = _init_handle
tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
interpreter._patch_lang = lambda fn: _patches()
interpreter._get_np_dtype = _get_np_dtype
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
tl.block_type.__init__, tl.block_type.__eq__ = _init_block_type, _same_block_type
tl.block_type.with_element_ty = _with_element
tl.tensor.__init__, tl.dtype.__eq__ = _init_tensor, _same_dtype
TritonSemantic.broadcast_impl_value = _broadcast_impl_value
TritonSemantic.computation_type_impl = _computation_type_impl
TritonSemantic._cast_to_computation_type = _cast_to_computation_type
TritonSemantic.binary_op_type_checking_impl = _binary_op_type_checking_impl
