"""Where each quantity lives in the retriever's residual stream, and the shape that follows."""

from __future__ import annotations

Span = tuple[int, ...]

LAYERS = 8
HIDDEN = 384
INTERMEDIATE = 192  # two streams of 48 multiplied in place, and their scratch cleared

_BYTE = 48  # dimensions of a byte's code as the value to copy
_CODE = 44  # dimensions of an n-gram's code
_SLOT = 4  # dimensions of one 6-gram's code among the last 48 bytes
SLOTS = 8
_HASH = 36  # dimensions of the 12-gram's code that the match compares


class _Allocator:
    def __init__(self) -> None:
        self.used = 0

    def take(self, width: int) -> Span:
        start, self.used = self.used, self.used + width
        if self.used > HIDDEN:
            raise ValueError(f"the layout needs {self.used} dimensions, the residual stream has {HIDDEN}")
        return tuple(range(start, self.used))


_allocator = _Allocator()
CONSTANTS = _allocator.take(6)  # six of 384: with equal values their RMS is 1/8 of the value, a power of two
IS_BOS = _allocator.take(1)[0]  # 1 at the beginning of the text, the match head's sink
BYTE = _allocator.take(_BYTE)  # the position's own token, as the copied value
STREAM_A = _allocator.take(_CODE)  # code of the n bytes ending here; n grows from 1 to 12
STREAM_B = _allocator.take(_CODE)  # code of the n bytes ending one before
SCRATCH_A = _allocator.take(_CODE)  # what a look-back brought, until the MLP has multiplied it in
SCRATCH_B = _allocator.take(_CODE)
# Codes of the 6-grams ending 0, 6, .. 42 bytes earlier, as seen by either stream.
SLOT_A = tuple(_allocator.take(_SLOT) for _ in range(SLOTS))
SLOT_B = tuple(_allocator.take(_SLOT) for _ in range(SLOTS))
BAG = _allocator.take(43)  # the clipped average of recent 6-gram codes

# The scratch is free, and zero, in the bag's layer (which clears it again) and from the slots' layers on.
BAG_RAW = SCRATCH_B[: len(BAG)]
OUT = (SCRATCH_A + SCRATCH_B)[:_BYTE]  # the code of the token to emit
ONE = CONSTANTS[0]
HASH_A, HASH_B = STREAM_A[:_HASH], STREAM_B[:_HASH]
