"""InfiniGen against its definition; the skew that is learnt offline; queries that come a layer early."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import GREEDY, make, tokens
from helpers import planted_heads
from module_oracle import with_modules
from tiny_models import make_checkpoint, random_ids

from saccade.engine.observing import observing
from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.selection import Dense
from saccade_contrib.calibrations import Skew
from saccade_contrib.infinigen import InfiniGen

UNITS = {"q_head": [[0], [1], [2], [3]], "kv_head": [[0, 1], [2, 3]]}


def problem(n: int = 120, seed: int = 1):
    q, k, v = planted_heads(4, 2, n, seed=seed)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


@pytest.mark.parametrize("unit", list(UNITS))
@pytest.mark.parametrize(("alpha", "cap"), [(0.3, 1.0), (2.0, 1.0), (5.0, 0.1), (1e-6, 0.5)])
@pytest.mark.parametrize("skewed", [False, True])
def test_as_many_keys_as_lie_near_the_highest_on_average(unit, alpha, cap, skewed):
    n = 120
    q, k, view = problem(n)
    basis = torch.linalg.qr(torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(9)))[0] if skewed else None
    offline = {"skew": basis} if skewed else None
    method = InfiniGen(
        dense_upto=0, alpha=alpha, cap=cap, unit=unit, query="own", skew="offline" if skewed else "off", dense_layers=0
    )
    past = None
    for first, last in ((0, 50), (50, n)):
        past = method.watch(Chunk.of(q[:, first:last], view.upto(last), past=past, offline=offline))
    state = method.begin(Chunk.of(q[:, -1:], view, past=past, offline=offline))
    selection = method.select_decode(Query.of(q[:, -1:], view, offline=offline), state)
    turned = [(q[h] @ basis[h // 2] if skewed else q[h]) for h in range(4)]
    keys = [(k[g] @ basis[g] if skewed else k[g]) for g in range(2)]
    rows = []
    for heads in UNITS[unit]:
        g = heads[0] // 2
        weight = [float(turned[2 * g][:, c].abs().sum() + turned[2 * g + 1][:, c].abs().sum()) for c in range(32)]
        channels = sorted(range(32), key=lambda c: (-weight[c], c))[:6]  # a fifth of 32
        each = [turned[h][-1, channels] @ keys[g][:, channels].T / math.sqrt(32) for h in heads]
        rows.append((sum(each) / len(heads)).tolist())
    near = [sum(x > max(row) - alpha for x in row) for row in rows]
    count = max(1, min(round(sum(near) / len(near)), int(cap * n)))
    for row, got in zip(rows, selection.lists()):
        best = sorted(range(n - 1), key=lambda i: (-row[i], i))[: count - 1]
        assert got.tolist() == sorted([*best, n - 1])


def test_everything_near_and_no_cap_is_dense():
    q, _, view = problem()
    method = InfiniGen(dense_upto=0, alpha=1e6, cap=1.0, skew="off", query="own")
    for layer in (0, 3):
        state = method.begin(Chunk.of(q[:, -1:], view, layer=layer))
        query = Query.of(q[:, -1:], view, layer=layer)
        assert isinstance(method.select_decode(query, state), Dense)
        assert query.cost.estimated == (120 if layer else 0)


def test_the_skew_is_orthogonal_and_gathers_the_queries_weight():
    rng = torch.Generator().manual_seed(2)
    mixing = torch.linalg.qr(torch.randn(16, 16, generator=rng))[0]
    scales = torch.tensor([8.0, 4.0] + [0.1] * 14)
    q = (torch.randn(4, 300, 16, generator=rng) * scales) @ mixing
    k = torch.randn(2, 300, 16, generator=rng)
    skew = Skew()
    for first, last in ((0, 10), (10, 300)):
        view = KVView.from_tensors(k[:, :last], k[:, :last], shuffle_seed=1)
        skew.add(Chunk.of(q[:, first:last], view))
    basis = skew.result()["skew"]
    torch.testing.assert_close(basis @ basis.transpose(1, 2), torch.eye(16).expand(2, -1, -1), atol=1e-5, rtol=0)
    for g in range(2):
        rows = q[2 * g : 2 * g + 2].flatten(0, 1)
        _, _, right = torch.linalg.svd(rows.double(), full_matrices=False)
        for column in range(2):  # up to sign
            assert abs(float(right[column] @ basis[g, :, column].double())) == pytest.approx(1, abs=1e-4)
        turned = (rows @ basis[g]).square().sum(0)
        assert float(turned[:2].sum() / turned.sum()) > 0.99
        assert float(rows.square().sum(0).topk(2).values.sum() / turned.sum()) < 0.9


# --- the query that comes a layer early


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    whole = {"use_sliding_window": False, "max_window_layers": 3}
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), max_position_embeddings=2048, **whole)


def test_a_query_ahead_is_the_next_layer_on_this_layers_input(folder, monkeypatch):
    """Qwen3 norms its queries per head. Reckoned from hidden states that transformers' own layers are given."""
    llm = make(folder)
    monkeypatch.setattr(with_modules(llm.model.runner), "llama", None)  # modules whose hooks can be watched
    layers, early, inputs, true = llm.model.runner.modules.layers, {}, {}, {}
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda module, args, index=index: inputs.setdefault(index, []).append(args[0].clone())
        )
    select = InfiniGen.select_decode

    def spy(self, query, state):
        early.setdefault(query.layer, []).append(query.ahead)
        true.setdefault(query.layer, []).append(query.q)
        return select(self, query, state)

    monkeypatch.setattr(InfiniGen, "select_decode", spy)
    llm.generate(random_ids(100, seed=1), GREEDY, policy="infinigen(dense_upto=0, skew=off)")
    assert all(query is None for query in early[0])
    rotary = llm.model.runner.model.get_decoder().rotary_emb
    for layer in (1, 2):
        attention, module = layers[layer].self_attn, layers[layer]
        # Every step gives layer 0 its input once, and the others an input twice: early, and their own.
        rows = [x for x in inputs[layer - 1] if x.shape[1] == 1][1 if layer > 1 else 0 :: 2 if layer > 1 else 1]
        steps = len(early[layer])
        assert steps == 9
        for step in range(steps):
            position = 100 + step
            hidden = rows[step]
            normed = module.input_layernorm(hidden)
            q = attention.q_norm(attention.q_proj(normed).view(1, 1, 4, -1)).transpose(1, 2)
            cos, sin = rotary(hidden, torch.tensor([[position]]))
            half = q.shape[-1] // 2
            turned = torch.cat([-q[..., half:], q[..., :half]], -1)
            expected = (q * cos[:, None] + turned * sin[:, None])[0]
            torch.testing.assert_close(early[layer][step], expected, atol=1e-5, rtol=1e-4)
            assert not torch.allclose(early[layer][step], true[layer][step], atol=1e-3)


def test_looking_ahead_changes_the_selection_and_no_company(folder):
    """In a batch with requests that do not look ahead, and beside one that does, each gets what it gets alone."""
    llm = make(folder)
    ids = [random_ids(length, seed=length) for length in (150, 90, 200, 130)]
    policies = [
        "infinigen(dense_upto=0, skew=off, alpha=1.0)",
        "dense",
        "infinigen(dense_upto=0, skew=off, alpha=0.5, cap=0.1)",
        "etf(start_layer=1)",
    ]
    alone = [tokens(llm.generate(one, GREEDY, policy=policy)[0]) for one, policy in zip(ids, policies)]
    assert [tokens(output) for output in llm.generate(ids, GREEDY, policy=policies)] == alone
    masks = {}
    for query in ("previous", "own"):
        read = []
        with observing(llm.engine, lambda call, read=read: read.append(call.selection.mask())):
            llm.generate(ids[0], GREEDY, policy=f"infinigen(dense_upto=0, skew=off, alpha=1.0, query={query})")
        masks[query] = read
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(masks["previous"], masks["own"]))


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": -1},
        {"channels": 0},
        {"cap": 1.1},
        {"skew": "online"},
        {"query": "next"},
        {"unit": "layer"},
        {"dense_layers": 0},
    ],
)
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        InfiniGen(**options)
