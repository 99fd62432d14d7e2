"""Words of a state by name: a kernel finds what the host packed, and Triton's cache sees where words lie."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from triton.runtime.jit import JITFunction

from saccade.ops.triton.state_words import places


class Words(NamedTuple):
    sinks: int
    count: int
    keys: int  # address of int32 [count]
    own: int


W = places(Words)


@triton.jit
def _pointer(own, WORD: tl.constexpr):
    return tl.load(own + WORD).to(tl.pointer_type(tl.int32))


@triton.jit
def _sum(words, out):
    at = tl.arange(0, 8)
    keys = tl.load(_pointer(words, W.keys) + at, mask=at < tl.load(words + W.count), other=0)
    tl.store(out, tl.sum(keys, 0) + (tl.load(words + W.own) - tl.load(words + W.sinks)).to(tl.int32))


def test_kernels_find_words_by_name():
    keys, out = torch.tensor([3, 50, 700], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    words = torch.tensor(Words(own=90_000, keys=keys.data_ptr(), sinks=1000, count=2))
    _sum[(1,)](words, out)
    assert out.item() == 53 + 90_000 - 1000


def test_a_kernel_of_other_places_is_another_kernel(monkeypatch):
    def reads(words, out):
        tl.store(out, tl.load(words + W.own))

    class Moved(NamedTuple):
        own: int
        sinks: int

    assert (W.own, W.sinks) == (3, 0)
    assert copy.deepcopy(W) == W
    first, again = JITFunction(reads).cache_key, JITFunction(reads).cache_key
    monkeypatch.setitem(globals(), "W", places(Moved))
    assert first == again != JITFunction(reads).cache_key


@pytest.mark.parametrize("name", ["value", "type", "logical_and"])
def test_names_that_a_constexpr_has_are_refused(name):
    with pytest.raises(TypeError, match=f"Words.{name} is an attribute"):
        places(NamedTuple("Words", [("sinks", int), (name, int)]))


def test_a_name_that_no_word_has_is_an_error():
    with pytest.raises(AttributeError, match="sink"):
        _ = W.sink
