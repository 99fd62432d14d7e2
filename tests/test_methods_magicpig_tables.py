"""Draws from hash tables and attention over them: what the kernels do against the definition, one key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import generator

from saccade.kv.view import KVView
from saccade.ops import Call, attend, cpu, run
from saccade.selection import Sampled, Shape, Tokens
from saccade_contrib.magicpig.tables import GUARD, HashTables, draw

HEADS, KV_HEADS, DIM, BITS, TABLES = 6, 2, 48, 3, 20
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=["torch", *cpu.supported_isas()])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cpu, "serves", lambda *_: "patched")
        yield "reference"
        return
    cpu.set_isa(request.param)
    yield "cpu"
    cpu.set_isa(None)


def problem(n: int, first: int, last: int, dtype: torch.dtype, seed: int = 0):
    rng = generator(seed)
    k = (torch.randn(KV_HEADS, n, DIM, generator=rng) + 0.5).to(dtype)
    v = torch.randn(KV_HEADS, n, DIM, generator=rng).to(dtype)
    q = torch.randn(HEADS, 1, DIM, generator=rng).to(dtype)
    codes = torch.randint(0, 2**BITS, (KV_HEADS, TABLES, last - first), generator=rng).to(torch.int16)
    asked = torch.randint(0, 2**BITS, (HEADS, TABLES), generator=rng).to(torch.int16)
    mean = k[:, first:last].float().mean(1)
    return q, k, v, KVView.from_tensors(k, v, shuffle_seed=seed), codes, asked, mean


def test_buckets_give_back_the_codes_they_were_made_from(backend):
    q, _, _, view, codes, _, mean = problem(300, 4, 260, torch.float32)
    tables = HashTables.of(q, view, 4, 260, BITS, mean, codes)
    assert (tables.buckets is None) == (backend == "reference")
    assert torch.equal(tables.with_codes().codes, codes)
    elsewhere = tables.to("meta")
    assert elsewhere.codes.shape == codes.shape
    assert elsewhere.codes.device.type == "meta"
    assert elsewhere.buckets is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "first", "last"), [(300, 4, 260), (70, 0, 69), (9, 2, 5)])
def test_keys_that_agree_twice_are_drawn_and_corrected(backend, dtype, n, first, last):
    q, k, _, view, codes, asked, mean = problem(n, first, last, DTYPES[dtype], seed=n)
    shape = Shape.suffix(HEADS, KV_HEADS, 1, n)
    sampled, drawn = draw(q, view, shape, HashTables.of(q, view, first, last, BITS, mean, codes), asked)
    sampled.check()
    total = 0
    for head, got in enumerate(sampled.tokens.lists()):
        g = head // 3
        want = dict.fromkeys([*range(first), *range(last, n)], 0.0)
        for i in range(first, last):
            if int((codes[g, :, i - first] == asked[head]).sum()) < 2:
                continue
            a, b = q[head, 0].double(), k[g, i].double() - mean[g].double()
            p = (1 - math.acos(float(a @ b / a.norm() / b.norm())) / math.pi) ** BITS
            chance = 1 - (1 - p) ** TABLES - TABLES * p * (1 - p) ** (TABLES - 1)
            want[i] = -math.log(chance + GUARD)
            total += 1
        assert got.tolist() == sorted(want)
        span = slice(*sampled.tokens.offsets[head : head + 2].tolist())
        assert sampled.bias[span].tolist() == pytest.approx([want[i] for i in sorted(want)], abs=2e-4)
    assert drawn == total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_biases_join_the_logits(backend, dtype, softcap):
    q, k, v, view, *_ = problem(500, 4, 400, DTYPES[dtype])
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 500)
    rng = generator(7)
    mask = torch.rand(HEADS, 1, 500, generator=rng) < 0.4
    mask[1] = False  # a head that reads nothing
    tokens = Tokens.from_mask(shape, mask)
    selection = Sampled(tokens, 3 * torch.rand(tokens.indices.numel(), generator=rng))
    ran = run(Call.of(q, view, selection, softcap=softcap), backend)
    out, lse = ran.out, ran.lse
    assert ran.backend.startswith(backend)
    for head in range(HEADS):
        keys = mask[head, 0].nonzero()[:, 0]
        if head == 1:
            assert (out[head] == 0).all()
            assert torch.isneginf(lse[head]).all()
            continue
        span = slice(*tokens.offsets[head : head + 2].tolist())
        logits = k[head // 3, keys].double() @ q[head, 0].double() / math.sqrt(DIM)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits + selection.bias[span]
        want = torch.softmax(logits, 0) @ v[head // 3, keys].double()
        close = 1e-5 if dtype == "float32" else 1e-2
        torch.testing.assert_close(out[head, 0].double(), want, atol=close, rtol=2 * close)
        assert float(lse[head, 0]) == pytest.approx(float(torch.logsumexp(logits, 0)), abs=1e-4)


@pytest.mark.skipif(not cpu.available(), reason="no C++ kernels here")
def test_more_threads_change_nothing():
    q, _, _, view, codes, asked, mean = problem(900, 4, 800, torch.bfloat16)
    shape, results = Shape.suffix(HEADS, KV_HEADS, 1, 900), []
    before = torch.get_num_threads()
    for threads in (1, 5):
        try:
            torch.set_num_threads(threads)
            sampled, _ = draw(q, view, shape, HashTables.of(q, view, 4, 800, BITS, mean, codes), asked)
        finally:
            torch.set_num_threads(before)
        results.append([sampled.tokens.indices, sampled.bias, *attend(q, view, sampled, threads=threads)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
