"""A-shape and tri-shape: the rows read what the shapes say, and the last rows of a tri-shape everything."""

from __future__ import annotations

import pytest
import torch
from helpers import planted_heads, run_method

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods import Policy
from saccade.methods.dense import DenseMethod
from saccade.methods.shapes import AShape, TriShape
from saccade.selection import Band, Dense


def used(method, rows: int, n: int):
    q, k, v = planted_heads(4, 2, n, seed=1)
    return run_method(method, "prefill", q, KVView.from_tensors(k, v), rows)[2]


@pytest.mark.parametrize(("rows", "n"), [(300, 300), (70, 300), (31, 300), (30, 300), (1, 300)])
@pytest.mark.parametrize("last", [0, 30])
def test_every_row_reads_its_shape(rows, n, last):
    mask = used(TriShape(sinks=5, window=20, last=last), rows, n).mask()
    for row in range(rows):
        position = n - rows + row
        keys = [i for i in range(position + 1) if i < 5 or position - i < 20 or row >= rows - last]
        assert mask[0, row].nonzero()[:, 0].tolist() == keys
    assert torch.equal(mask, mask[:1].expand_as(mask))
    if last == 0:
        assert torch.equal(mask, used(AShape(sinks=5, window=20), rows, n).mask())


def test_minference_defaults_and_short_contexts_are_dense():
    assert (AShape().sinks, AShape().window, TriShape().last) == (128, 3968, 100)
    assert isinstance(used(AShape(sinks=5, window=20), 25, 25), Dense)
    assert isinstance(used(AShape(sinks=5, window=20), 26, 26), Band)
    assert isinstance(used(TriShape(sinks=5, window=20, last=10), 10, 200), Dense)


def test_decode_is_dense():
    policy = Policy.parse("tri_shape(last=7)")
    assert policy.prefill == TriShape(last=7)
    assert policy.decode == DenseMethod()
    assert policy.text == "tri_shape(last=7)"


@pytest.mark.parametrize("options", [{"sinks": -1}, {"window": 0}, {"window": 1.5}, {"last": -1}, {"last": True}])
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        TriShape(**options)
