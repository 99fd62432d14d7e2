"""``readers.py`` for kernels in Gluon, which copy rows as they lie into shared memory: rows of 16-bit floats."""

from __future__ import annotations

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # 3.9 renamed it
except (ImportError, AttributeError):  # it is experimental
    gluon = None

if gluon is not None:

    @gluon.jit
    def copy_rows(target, pool, row, channel, there, D: gl.constexpr):
        """Start to copy channels of rows to ``target``; zeros of those that are not ``there``. Arguments as in
        ``readers.load_keys``."""
        gl.static_assert(pool.dtype.element_ty.primitive_bitwidth == 16, "rows of 16-bit floats are copied alone")
        load(target, (pool + row * D) + channel, mask=there & (channel < D))
