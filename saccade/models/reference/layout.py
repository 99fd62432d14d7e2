"""Where each quantity lives in the retriever's residual stream, and the shape that follows."""

from __future__ import annotations

Span = tuple[int, ...]

LAYERS = 8
HIDDEN = 384
INTERMEDIATE = 192  # two streams of 48 multiplied in place, and their scratch cleared

SLOTS = 8  # 6-grams in the last 48 bytes
_BYTE = 48  # dimensions of a byte's code as the value to copy
_HASH = 34  # dimensions of the n-gram code that the match compares
_SLOT = 5  # dimensions of the code that is kept for each of the last 6-grams
_CODE = _HASH + _SLOT + 1  # an n-gram's code in a stream, with one dimension that is 0 if a line begins in it, else 1


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
BAG = _allocator.take(39)  # the clipped average of recent 6-gram codes

# The scratch is free, and zero, in the bag's layer (which clears it again) and from the slots' layers on.
BAG_RAW = SCRATCH_B[: len(BAG)]
OUT = (SCRATCH_A + SCRATCH_B)[:_BYTE]  # the code of the token to emit
ONE = CONSTANTS[0]


def parts(stream: Span) -> tuple[Span, Span, Span]:
    """A stream's (or its scratch's) hash, slot code and line mark."""
    return stream[:_HASH], stream[_HASH : _HASH + _SLOT], stream[_HASH + _SLOT :]
