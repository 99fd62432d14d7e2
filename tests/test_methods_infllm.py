"""InfLLM's choice against the paper's formulas, key by key in float64."""

from __future__ import annotations

import pytest
import torch

from saccade.kv.view import KVView
from saccade.methods import Chunk
from saccade.methods.infllm import InfLLM
from saccade.selection import Dense


def formula(q, k, method, start):
    """bool [q_blocks, k_blocks]: r_m and sim(X, B) as the paper writes them, one product at a time."""
    size, rows, keys = method.block_size, q.shape[1], k.shape[1]
    heads = q.double().unflatten(0, (k.shape[0], -1)).mean(1)
    first, last = -(-method.sinks // size), -(-method.window // size)
    votes = []
    for m in range(keys):
        at = min(max(m + 1 - start, 0), rows - 1)
        after = heads[:, at : min(at + method.window, rows)]
        votes.append((after @ k[:, m].double()[:, :, None]).mean(1)[:, 0])
    votes = torch.stack(votes, 1)
    wanted = []
    for block in range(start // size, -(-keys // size)):
        own = [row - start for row in range(max(start, block * size), min(keys, (block + 1) * size))]
        sims = []
        for other in range(block + 1):
            inside = slice(other * size, min(keys, (other + 1) * size))
            sim = 0.0
            for head in range(len(heads)):
                best = votes[head, inside].topk(min(method.representatives, inside.stop - inside.start)).indices
                sim += float((heads[head, own] @ k[head, inside][best].double().T).sum())
            sims.append(sim)
        middle = [other for other in range(block + 1) if other >= first and other <= block - last]
        best = sorted(middle, key=lambda other: -sims[other])[: method.budget // size]
        always = [other for other in range(block + 1) if other < first or other > block - last]
        wanted.append([other in best or other in always for other in range(-(-keys // size))])
    return torch.tensor(wanted)


@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (300, 333), (75, 290), (1, 310)])
def test_it_reads_the_blocks_of_the_papers_formulas(rows, keys):
    generator = torch.Generator().manual_seed(rows + keys)
    q = torch.randn(4, rows, 16, generator=generator)
    k, v = (torch.randn(2, keys, 16, generator=generator) for _ in range(2))
    method = InfLLM(sinks=20, window=40, budget=64, representatives=3, block_size=32)
    chosen = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, v)))
    assert not isinstance(chosen, Dense)
    assert chosen.units == 1
    assert torch.equal(chosen.block_mask()[0], formula(q, k, method, keys - rows))
    assert 0.2 < chosen.density() < 0.9


def test_a_block_of_which_one_key_is_asked_for_is_found():
    q, k = torch.randn(2, 512, 16) * 0.01, torch.randn(1, 512, 16) * 0.01
    k[0, 130] = 3.0
    q[:, 131:140] = q[:, 480:] = 3.0  # near rows ask for the key, and the last ones do again
    method = InfLLM(sinks=0, window=32, budget=32, block_size=32)
    mask = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, k))).block_mask()[0]
    assert mask[15, 4]
    assert mask[15].sum() == 2
