"""``benchmarks/gpu/unions.py`` counts each key once that any query head of its KV head reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from saccade.selection import Band, Dense, Shape, Tokens

HEADS, KV_HEADS, KEYS = 6, 2, 50


@pytest.fixture
def unions(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))
    import unions

    yield unions.Unions()
    sys.modules.pop("unions")


def lists_of(units: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(units)
    sizes = torch.randint(0, KEYS, (units,), generator=generator).tolist()
    return [torch.randperm(KEYS, generator=generator)[:size] for size in sizes]


@pytest.mark.parametrize("units", [HEADS, KV_HEADS, 1])
def test_each_key_of_a_kv_head_counts_once(unions, units):
    lists, read, listed = lists_of(units), 0, 0.0
    for kv_head in range(KV_HEADS):
        heads = range(kv_head * HEADS // KV_HEADS, (kv_head + 1) * HEADS // KV_HEADS)
        own = [set(lists[head * units // HEADS].tolist()) for head in heads]
        read += len(set.union(*own))
        listed += sum(map(len, own)) / len(own)
    for _ in range(2):
        unions.add(Tokens.from_lists(Shape.suffix(HEADS, KV_HEADS, 1, KEYS), lists))
    assert (unions.read, unions.listed) == (2 * read, pytest.approx(2 * listed))
    assert unions.share == pytest.approx(read / listed)
    assert (unions.share > 1) == (units == HEADS)


def test_dense_layers_weigh_with_the_others(unions):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, KEYS)
    unions.add(Dense(shape))
    assert (unions.read, unions.share) == (KEYS * KV_HEADS, 1)
    unions.add(Tokens.from_lists(shape, [torch.tensor([head]) for head in range(HEADS)]))
    assert unions.share == pytest.approx((KEYS * KV_HEADS + HEADS) / (KEYS * KV_HEADS + KV_HEADS))


def test_what_is_not_known_changes_nothing(unions):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, KEYS)
    unions.add(Tokens.from_lists(shape, lists_of(HEADS)))
    assert unions.share > 1
    unions.add(Band(shape, window=3))
    assert unions.share == 1
