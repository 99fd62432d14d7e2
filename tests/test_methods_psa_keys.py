"""Blocks guessed by every key in a few bits (psa, rank=keys): what it says is covered is covered."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from helpers import generator
from torch import Tensor

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.labels import Labels, store
from saccade.methods.policy import Policy
from saccade.methods.psa import PSA
from saccade.methods.psa.estimates import FRAMED, keys_in_few_bits
from saccade.ops import cpu
from saccade.ops.progressive import attend_ranking

HEADS, KV_HEADS, DIM = 6, 2, 32


@pytest.fixture(params=["torch", *cpu.supported_isas()], autouse=True)
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cpu, "available", lambda: False)
        yield "torch"
        return
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


def wide_keys(length: int, seed: int) -> Tensor:
    """Keys as models have them: a few channels of a large mean and range beside many small ones."""
    rng = generator(seed)
    k = torch.randn(KV_HEADS, length, DIM, generator=rng)
    k[..., 3] = 40 + 8 * k[..., 3]
    k[..., 17] = -25 + 5 * k[..., 17]
    return k


def truly_read(method: PSA, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
    """True weight read by each head, the rule's estimate for each unit, and the share of keys read."""
    kv = KVView.from_tensors(k, k)
    query = Query.of(q, kv)
    ranking = method.select_decode(query, method.begin(Chunk.of(q, kv)))
    _, lse, read, estimate = attend_ranking(q, kv, ranking, scale=query.scale)
    scores = q[:, 0].unflatten(0, (KV_HEADS, -1)) @ k.transpose(1, 2) * query.scale
    return torch.exp(lse[:, 0] - torch.logsumexp(scores, -1).flatten()), estimate, read.density()


def induction(seed: int, length: int = 1500) -> tuple[Tensor, Tensor]:
    """Of each group one query head that looks for one key, which lies in a block of light ones, while the others look
    at the last key and nowhere less than at that block."""
    rng = generator(seed)
    k, q = 0.3 * torch.randn(KV_HEADS, length, DIM, generator=rng), torch.empty(HEADS, 1, DIM)
    for group in range(KV_HEADS):
        at, head = 400 + 37 * seed + 3 * group, seed % 3
        wanted, last = torch.linalg.qr(torch.randn(DIM, 2, generator=rng)).Q.T
        block = at // 32 * 32
        k[group, block : block + 32] -= 2.0 * wanted + 24.0 * last
        k[group, at], k[group, -1] = 8.0 * wanted - 24.0 * last, 8.0 * last
        rows = q.unflatten(0, (KV_HEADS, -1))[group]
        rows[:, 0], rows[head, 0] = 8.0 * last, 8.0 * wanted
    return q, k


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("epsilon", [0.8, 0.9])
def test_one_heavy_key_among_light_ones_is_read(seed, epsilon):
    q, k = induction(seed)
    true, _, density = truly_read(PSA(epsilon), q, k)
    assert float(true.min()) > epsilon
    assert density < 0.2
    for rest in ("last_max", "min"):  # what the heads' mean ranks last is left unread, and the estimate does not know
        true, estimate, _ = truly_read(PSA(epsilon, rank="cuboid", rest=rest), q, k)
        assert float(true.min()) < 0.05
        assert float(estimate.min()) > epsilon


@pytest.mark.parametrize("length", [300, 1111])
def test_what_is_said_to_be_covered_is_covered_of_wide_channels_too(length):
    short = []
    for seed in range(12):
        k, q = wide_keys(length, seed), torch.randn(HEADS, 1, DIM, generator=generator(100 + seed))
        q[..., (3, 17)] *= 0.1
        true, estimate, _ = truly_read(PSA(0.9, block_size=16), q, k)
        short.append(0.9 - true)
        assert (true.unflatten(0, (KV_HEADS, -1)).amin(1) - estimate).abs().max() < 0.05
    short = torch.cat(short)
    assert short.mean() < 0.02
    assert short.max() < 0.05


def test_frames_keep_small_channels(backend):
    k = wide_keys(500, 1)
    view, q = KVView.from_tensors(k, k), torch.randn(HEADS, DIM, generator=generator(2))
    want = (q.unflatten(0, (KV_HEADS, -1)) @ k.transpose(1, 2)).flatten(0, 1)
    plain = Labels(torch.arange(DIM).repeat(KV_HEADS, 1), 4)
    plain.extend(view)
    framed = keys_in_few_bits(view, 4)
    deviation = [float((one.scores(q) - want).std()) for one in (framed, plain)]
    assert deviation[0] < 0.35 * deviation[1]
    best = framed.top(q, "q_head", 20, 5, 480)
    expected = torch.topk(framed.scores(q)[:, 5:480], 20).indices.sort(1).values + 5
    assert best.tolist() == expected.tolist()


def test_labels_with_a_frame_grow_as_if_made_at_once(backend, monkeypatch):
    k = wide_keys(200, 3)
    view, q = KVView.from_tensors(k, k), torch.randn(HEADS, DIM, generator=generator(4))
    grown = keys_in_few_bits(view.upto(90), 4)
    whole = Labels(grown.channels, 4, frame=grown.frame)
    whole.extend(view)
    monkeypatch.setattr(store, "STEP_KEYS", 32)
    for length in (91, 96, 97, 140, 200):
        grown.extend(view.upto(length))
        torch.testing.assert_close(grown.scores(q), whole.scores(q)[:, :length], atol=1e-4, rtol=1e-5)
    grown.truncate(120)
    grown.extend(view)
    torch.testing.assert_close(grown.scores(q), whole.scores(q), atol=1e-4, rtol=1e-5)


@covered(
    {
        ("length", "size"): [(64, 8), (333, 32), (1023, 8), (1024, 128), (1025, 32), (2300, 64), (5, 8)],
        "softcap": [None, 20.0],
        "bits": [2, 4, 8],
    }
)
def test_weights_are_those_of_the_labels(backend, length, size, softcap, bits):
    k = wide_keys(length, length)
    view, q = KVView.from_tensors(k, k, shuffle_seed=1), torch.randn(HEADS, DIM, generator=generator(6))
    labels = keys_in_few_bits(view, bits)
    got = labels.block_weights(q, size, 0.3, softcap, 0, length // size)
    logits = 0.3 * labels.scores(q).double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    assert got.shape == (HEADS, length // size)
    for first, last in ((0, 0), (length // size // 3, length // size), (2, min(9, length // size))):
        if first <= last:  # to the last bit what is said of all of them
            assert torch.equal(labels.block_weights(q, size, 0.3, softcap, first, last), got[:, first:last])
    for block in range(length // size):
        want = torch.logsumexp(logits[:, size * block : size * (block + 1)], 1)
        torch.testing.assert_close(got[:, block].double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_in_a_frame_are_those_of_torch(backend, dtype, monkeypatch):
    """Bit for bit: pages in any order, a tile begun, halves too."""
    k = wide_keys(531, 8).to(dtype)
    view = KVView.from_tensors(k, k, shuffle_seed=2)
    begun = keys_in_few_bits(view.upto(300), 4)
    for length in (309, 531):
        begun.extend(view.upto(length))
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "available", lambda: False)
        made = Labels(begun.channels, 4, frame=begun.frame)
        made.extend(view)
    got, want = begun.saved_fields(), made.saved_fields()
    assert all(torch.equal(got[name], want[name]) for name in ("_codes", "_range"))


@pytest.mark.parametrize("length", [1, 2, FRAMED - 1, FRAMED])
def test_few_keys_have_no_frame(length):
    k = torch.ones(KV_HEADS, length, DIM)
    labels = keys_in_few_bits(KVView.from_tensors(k, k), 4)
    assert (labels.frame is not None) == (length >= FRAMED)
    labels.extend(KVView.from_tensors(torch.cat([k, 1e4 * k], 1), torch.cat([k, k], 1)))
    scores = labels.scores(torch.ones(HEADS, DIM))
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores[:, 0], torch.full((HEADS,), float(DIM)), atol=1e-2, rtol=1e-3)


def test_options_that_do_not_go_together_are_named():
    with pytest.raises(PolicyError, match="rank=moments or rank=keys"):
        PSA(rank="cuboid", rest="estimate")
    with pytest.raises(PolicyError, match="bits=3"):
        PSA(rank="keys", bits=3)
    assert Policy.parse("psa(rank=keys)").decode.text == "psa"
    assert [PSA(rank=rank).rule for rank in ("keys", "moments", "cuboid")] == ["estimate", "estimate", "last_max"]
