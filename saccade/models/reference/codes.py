"""The retriever's alphabet: bytes and three specials, each with a fixed vector of +1 and -1.

Codes come from SHA-256, not from a random generator, so that every platform and library version builds the same
weights. An n-gram's code is the elementwise product of its bytes' codes, each rolled by the byte's distance: two
n-grams that differ anywhere have independent codes, equal ones have equal codes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

BYTES = 256
BOS, EOS, PAD = 256, 257, 258
VOCABULARY = 259
LINE_FEED = 10
SPECIAL_TOKENS = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}


def sign_codes(width: int, purpose: str) -> Tensor:
    """Float32 [VOCABULARY, width] of +1 and -1; ``purpose`` names an independent set."""
    rows = []
    for token in range(VOCABULARY):
        digest = hashlib.sha256(f"{purpose}:{token}".encode()).digest()
        bits = [digest[i // 8] >> (i % 8) & 1 for i in range(width)]
        rows.append([2.0 * bit - 1.0 for bit in bits])
    return torch.tensor(rows)


def byte_codes(width: int, mark: int) -> Tensor:
    """Float32 [VOCABULARY, width]: signs, but dimension ``mark`` is 1, or 0 for the line feed.

    In a product of codes the mark tells whether a line begins inside the n-gram.
    """
    table = sign_codes(width, "byte")
    table[:, mark] = 1.0
    table[LINE_FEED, mark] = 0.0
    return table
