"""Random numbers that depend on what they are for, not on what was drawn before.

A draw is a function of (seed, sample, position): Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011) with the seed for its key and the place for its counter. Nothing keeps a generator's state, so a replay,
another batch or another device gives the same numbers.
"""

from __future__ import annotations

import secrets
from typing import TypeVar, overload

from torch import Tensor

WORD = 0xFFFFFFFF  # all bits of a 32-bit word
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Whole = TypeVar("Whole", int, Tensor)
Words = tuple[Whole, Whole, Whole, Whole]


def fresh_seed() -> int:
    """A seed from the system's entropy, from 0 to 2^63 - 1, for a request that names none."""
    return secrets.randbits(63)


@overload
def uniform(seed: int, sample: int, position: int) -> float: ...
@overload
def uniform(seed: Tensor, sample: Tensor, position: Tensor) -> Tensor: ...
def uniform(seed, sample, position):
    """The draw of ``sample`` (of those that share ``seed``) at ``position`` of its sequence: float64 in [0, 1), a
    multiple of 2^-53. Three integers from 0 to 2^63 - 1 give a float; three int64 tensors of one shape and device give
    a float64 tensor of that shape. Words 2 and 3 of :func:`place_words` are left for a second draw at the same place.
    """
    high, low, _, _ = place_words(seed, sample, position)
    whole = (high << 21) | (low >> 11)
    return (whole.double() if isinstance(whole, Tensor) else float(whole)) * 2.0**-53


def place_words(seed: Whole, sample: Whole, position: Whole) -> Words[Whole]:
    """The four words of one place: the key is the seed's low and high half, the counter those of the position and then
    those of the sample."""
    counter = (position & WORD, position >> 32, sample & WORD, sample >> 32)
    return philox(counter, (seed & WORD, (seed >> 32) & WORD))


def philox(counter: Words[Whole], key: tuple[Whole, Whole]) -> Words[Whole]:
    """Philox4x32-10 of 32-bit words, each an int or an int64 tensor from 0 to 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product has 64 bits: int64 wraps around, and the mask gives its upper half all the same.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & WORD) ^ c1 ^ k0, second & WORD
        c2, c3 = ((first >> 32) & WORD) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3
