"""Blocks guessed by labels (ops/triton/batched_labels.py), ranked, and read until the rule for guesses holds
(ops/triton/stop_rule.py), under Triton's interpreter: as the host's path does."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import generator
from label_cases import LabelledRows, same_labels

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.methods.labels import Labels
from saccade.methods.psa import PSA
from saccade.ops import Call, run
from saccade.ops.progressive import attend_ranking
from saccade.ops.triton import batched_guesses, progressive
from saccade.ops.triton.batched_guesses import Estimates, Guesses, largest_shares, ordered_guesses
from saccade.ops.triton.batched_labels import estimate_labelled, label_keys
from saccade.ops.triton.batched_reading import rank_rows
from saccade.ops.triton.common import kept_zeros
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection import Ranking, Shape
from saccade.selection.forms import Rule, Summarized
from saccade.selection.readings import Choice

KEYS = {"rank": "keys", "rest": "estimate"}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "bits", "dtype", "softcap"),
    [
        (2, 2, 64, 8, 4, torch.float32, None),
        (6, 2, 128, 32, 2, torch.float32, 5.0),
        (7, 1, 80, 16, 8, torch.float16, None),
        (3, 1, 256, 128, 4, torch.float16, None),
        (4, 2, 64, 64, 4, torch.float32, None),
    ],
)
def test_labels_and_estimates_are_the_hosts(heads, kv_heads, dim, size, bits, dtype, softcap):
    """Ragged rows, padding, one without a frame, one that reads everything: its key has a label all the same."""
    method = PSA(block_size=size, bits=bits, microbatch=1, **KEYS)
    least = method.dense_upto
    lengths = [max(least + 3 * size, 90) + 1, 0, max(least + size, 80), least - 3, max(least + 1, 70), least + size + 5]
    prompts = [lengths[0] - 1, 0, 70, least - 9, 40, 20]
    rows = LabelledRows(method, lengths, prompts, heads, kv_heads, dim, dtype)
    framed = [labels is not None and labels.frame is not None for labels in rows.labels]
    assert framed == [True, False, True, least > 72, False, False]
    got = estimate_labelled(rows.q, rows.pages, rows.words, rows.choice, rows.dense_upto, 0.11, softcap)
    for row, length in enumerate(lengths):
        if not length:
            continue
        host = rows.host_labels(row)
        same_labels(rows.labels[row], host, length)
        if length > least:
            stop = length // size - 1
            want = host.block_weights(rows.query(row, 0.11, softcap).q[:, 0], size, 0.11, softcap, 2, stop)
            assert want.shape[1] > 0
            torch.testing.assert_close(got.blocks[row, :, 2:stop], want, atol=2e-5, rtol=2e-5)
            tops, weights = got.sums[row].unbind(2)
            total = torch.logsumexp(tops + weights.log(), 1)
            torch.testing.assert_close(total, torch.logsumexp(want, 1), atol=2e-5, rtol=2e-5)


def test_keys_alike_and_keys_far_out_have_the_hosts_labels():
    """Steps of nothing, of denormal numbers, ties, and a channel that never moved in the prompt."""
    method = PSA(block_size=16, microbatch=1, **KEYS)
    for seed, scale in enumerate((0.0, 1e-38, 1.0, 1e30)):
        rows = LabelledRows(method, [130, 99], [120, 30], 2, 2, 32, seed=seed)
        for row in range(2):
            last = rows.lengths[row] - 1
            new = (torch.randn(2, 32, generator=generator(seed)) * 3).round() * scale
            slot = rows.pages.tables[row, 0, last // 32]
            rows.pages.k[slot, :, last % 32] = new
            view = rows.views[row]
            k = torch.cat([view.keys(0, last), new[:, None]], 1)
            rows.views[row] = KVView.from_tensors(k, k)
        estimate_labelled(rows.q, rows.pages, rows.words, rows.choice, rows.dense_upto, 0.1, None)
        for row, length in enumerate(rows.lengths):
            same_labels(rows.labels[row], rows.host_labels(row), length)


def test_labels_of_some_channels_are_made_without_a_frame():
    """As Double Sparsity and HShare have them: nobody looks for one."""
    rows = LabelledRows(PSA(block_size=16, microbatch=1, **KEYS), [50, 33], [40, 20], 4, 2, 32)
    made = []
    for row, length in enumerate(rows.lengths):
        labels = Labels(torch.tensor([[5, 2, 30], [1, 0, 7]]), 4)
        labels.extend(rows.views[row].upto(length - 1))
        labels.reserve(length + 9)
        said = labels.words()._replace(frame=12345)
        rows.words[row, : len(said)] = torch.tensor(said)
        made.append(labels)
    label_keys(rows.pages, rows.words, 3, 4)
    for row, length in enumerate(rows.lengths):
        whole = Labels(made[row].channels, 4)
        whole.extend(rows.views[row])
        same_labels(made[row], whole, length)


@pytest.mark.parametrize(
    ("stop", "heads", "kv_heads", "size", "microbatch", "epsilon"),
    [
        ("mean", 3, 1, 16, 3, 0.85),
        pytest.param("all", 6, 2, 16, 1, 0.5, marks=pytest.mark.thorough),
        pytest.param("all", 2, 2, 32, 2, 0.7, marks=pytest.mark.thorough),
    ],
)
def test_what_is_read_is_what_the_host_reads(stop, heads, kv_heads, size, microbatch, epsilon):
    method = PSA(epsilon, size, microbatch, stop=stop, **KEYS)
    lengths = [method.dense_upto + 9 * size + 5, 0, method.dense_upto + 1, 60, method.dense_upto + 4 * size]
    rows = LabelledRows(method, lengths, [length * 4 // 5 for length in lengths], heads, kv_heads, 32)
    ranked = rank_rows(rows.q, rows.pages, None, rows.words, rows.choice, rows.dense_upto, 0.3, None)
    assert isinstance(ranked.guesses, Guesses)
    rule = Rule(epsilon, microbatch, "estimate", stop, rows.choice.stops.margin)
    done = attend_progressive(
        rows.q, rows.pages, ranked.always, ranked.order, size, rule, scale=0.3, counts=ranked.counts,
        guesses=ranked.guesses,
    )  # fmt: skip
    read = 0
    for row, length in enumerate(lengths):
        entries = slice(row * kv_heads, (row + 1) * kv_heads)
        if length <= method.dense_upto:
            assert ranked.counts[1, entries].tolist() == [0] * kv_heads
            continue
        query = rows.query(row, 0.3)
        ranking = method.select_decode(query, rows.host_labels(row))
        count = ranking.order.shape[1]
        assert torch.equal(ranked.order[entries, :count], ranking.order)
        out, lse, used, coverage = attend_ranking(query.q, query.kv, ranking, scale=0.3)
        torch.testing.assert_close((done.out[row], done.lse[row]), (out[:, 0], lse[:, 0]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(done.coverage[entries], coverage, atol=1e-4, rtol=1e-4)
        blocks = [ranking.always.shape[1] + min(count, microbatch * int(one)) for one in done.used[entries]]
        assert blocks == used.block_mask().sum((1, 2)).tolist()
        read += count > min(microbatch * int(one) for one in done.used[entries])
    assert read  # a rule has stopped before the end
    assert not kept_zeros(rows.q.device, 1).any()


@pytest.mark.parametrize("case", ["few", "far", "light", "wrong"])
def test_the_rule_goes_by_guesses_as_the_loop_does(case, monkeypatch):
    """Runs over several windows; rankings of one and two blocks; guesses all of them far too low, or without any truth;
    heads whose blocks are too light for float32 beside the first."""
    monkeypatch.setattr(progressive, "WINDOW", 8)
    monkeypatch.setattr(progressive, "WINDOW_AT_END", 16)
    rng, size, blocks = generator(7), 16, {"few": 2, "far": 12, "light": 10, "wrong": 14}[case]
    k, v = torch.randn(2, 1, size * (blocks + 2), 32, generator=rng)
    q = 2 * torch.randn(3, 1, 32, generator=rng)
    if case == "light":
        monkeypatch.setattr(progressive, "processors", lambda device: 0)  # one reader, which has seen the first blocks
        q = q[:1] * torch.tensor([1.0, 0.9, 1.1])[:, None, None]
        k[:, : 2 * size] += 25 * q[0] / q[0].norm()
    view = KVView.from_tensors(k, v)
    truth = torch.logsumexp((q[:, 0] @ k[0].T * 0.5).unflatten(1, (-1, size)), 2)[:, 2:]
    guess = truth + 0.3 * torch.randn(truth.shape, generator=rng)
    guess = {"far": guess - 300, "wrong": 9 * torch.randn(truth.shape, generator=rng)}.get(case, guess)
    for count in (1, 2) if case == "few" else (blocks,):
        order = torch.randperm(blocks, generator=rng)[:count]
        stopped = 0
        for microbatch, margin, epsilon in ((1, 0.5, 0.6), (3, 1.0, 0.8)):
            ranking = Ranking(
                Shape.suffix(3, 1, 1, view.length), size, torch.tensor([[0, 1]], dtype=torch.int32),
                (order + 2)[None].to(torch.int32), epsilon, microbatch, "estimate", estimates=guess[:, order],
                stop="mean" if case == "light" else "all", margin=margin,
            )  # fmt: skip
            got, expected = (run(Call.of(q, view, ranking, scale=0.5), name) for name in ("triton", "reference"))
            assert got.backend == "triton"
            assert torch.equal(got.used.block_mask(), expected.used.block_mask()), (microbatch, margin, epsilon)
            torch.testing.assert_close(got.out, expected.out, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(got.coverage, expected.coverage, atol=1e-4, rtol=1e-4)
            stopped += int(expected.used.block_mask().sum()) < count + 2
        assert (stopped > 0) == (case != "few")  # one block has no deviation: the second one is read
    assert not kept_zeros(q.device, 1).any()


@pytest.mark.parametrize("readers", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_any_number_of_readers_and_what_the_last_step_needed_give_the_same(readers):
    method = PSA(0.5, 16, 1, **KEYS)
    rows = LabelledRows(method, [method.dense_upto + 100], [100], 2, 1, 32)
    ranked = rank_rows(rows.q, rows.pages, None, rows.words, rows.choice, rows.dense_upto, 0.3, None)
    call = (rows.q, rows.pages, ranked.always, ranked.order, 16, Rule(0.5, 1, "estimate", "all", 0.5))
    options = {"scale": 0.3, "counts": ranked.counts, "guesses": ranked.guesses}
    wanted = attend_progressive(*call, **options, readers=2)
    for known in (None, torch.tensor([[40]], dtype=torch.int32)):
        got = attend_progressive(*call, **options, readers=readers, before=known, held_back=1)
        assert torch.equal(got.used, wanted.used)
        torch.testing.assert_close((got.out, got.coverage), (wanted.out, wanted.coverage))


def test_guesses_in_order_and_what_is_left_of_them(monkeypatch):
    """Spans of more than one turn, ranges beyond float32's, and rows of which nothing is ranked."""
    monkeypatch.setattr(batched_guesses, "HELD", 1024)
    blocks, counts = 1500, [1400, 1025, 3, 0]
    rng = generator(3)
    estimates = 60 * torch.randn(2, 4, blocks, generator=rng)
    order = torch.stack([torch.randperm(blocks, generator=rng) for _ in counts]).to(torch.int32)
    got = ordered_guesses(estimates, order, torch.tensor([[0] * 4, counts], dtype=torch.int32), 4)
    for row in range(2):
        for head in range(4):
            unit = row * 2 + head // 2
            own = estimates[row, head, order[unit, : counts[unit]].long()].double()
            torch.testing.assert_close(got.blocks[row, head, : counts[unit]].double(), own * 1.4426950408889634)
            wanted = [torch.logsumexp(own[at:], 0) / 0.6931471805599453 for at in range(0, counts[unit], 4)]
            left = got.left[row, head, : len(wanted) + 1].double()
            assert left[-1] == -torch.inf
            torch.testing.assert_close(left[:-1], torch.stack(wanted) if wanted else left[:0], atol=1e-3, rtol=1e-5)
    whole = Guesses.of(estimates[0], 4)
    assert whole.left.shape == (1, 4, 376)
    torch.testing.assert_close(whole.left[0, :, 5], torch.logsumexp(estimates[0, :, 20:], 1) / 0.6931471805599453)


@pytest.mark.parametrize("span", [16, 512])
def test_shares_are_the_largest_of_any_head(span, monkeypatch):
    method = PSA(block_size=16, microbatch=1, **KEYS)
    rows = LabelledRows(method, [16 * 40, 79, 16 * 33 + 2], [200, 70, 300], 4, 2, 16)
    estimates = 20 * torch.randn(3, 4, 40, generator=generator(1))
    sums = torch.empty(3, 4, 3, 2)
    for row, stop in ((0, 39), (1, 2), (2, 32)):  # blocks 2 to 8, and 9 to the end; a program that guessed nothing
        for part, own in enumerate((estimates[row, :, 2:9], estimates[row, :, 9:stop])):
            top = own.amax(1) if own.numel() else torch.full((4,), -torch.inf)
            sums[row, :, part] = torch.stack([top, (own - top[:, None]).exp().sum(1)], 1)
        sums[row, :, 2] = torch.tensor([-torch.inf, 0.0])
    monkeypatch.setattr(batched_guesses, "SPAN", span)
    got = largest_shares(Estimates(estimates, sums), rows.pages, rows.choice, rows.dense_upto)
    assert bool((got[1] == -torch.inf).all())
    for row, stop in ((0, 39), (2, 32)):
        shares = torch.log_softmax(estimates[row, :, 2:stop], 1).view(2, 2, -1).amax(1)
        torch.testing.assert_close(got[row, :, 2:stop], shares, atol=1e-4, rtol=1e-5)
        assert bool((got[row, :, :2] == -torch.inf).all() and (got[row, :, stop:] == -torch.inf).all())


def test_the_last_block_is_not_ranked_by_labels():
    with pytest.raises(SaccadeError, match="last must be at least 1"):
        Choice(Summarized(16, "labels"), 1, 2, 0, 200, rule=Rule(0.5, 1, "estimate", "all"))
