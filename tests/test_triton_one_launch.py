"""CIS's recorded choice in one launch, with attention and without, against sharing.py, step by step, under Triton's
interpreter: rows of unequal lengths, pools with odd strides before them, keys that tie, padding and rows too short to
choose."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)

from saccade.kv.view import KVView
from saccade.methods.cis import CIS, triton_one_launch
from saccade.methods.cis.anchors import PARTS, Anchors
from saccade.methods.cis.recorded import Reals, Words, _parts
from saccade.methods.cis.sharing import keep, leave_out, share
from saccade.methods.cis.triton_keeping import list_and_keep
from saccade.ops import Call, run
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_lists import new_lists
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import arrivals
from saccade.ops.triton.dispatch import pages_of
from saccade.selection import Candidates, Cone, Shape, Tokens

DIM, STEPS = 16, 3
START = (0, 131, 20, 197)  # keys before the first step; 0: padding


class Step:
    """Some rows of one pool, their anchors on the device and, for the reference, on their own."""

    def __init__(self, method: CIS, heads: int, kv_heads: int, share_hidden: float) -> None:
        generator = torch.Generator().manual_seed(heads * 7 + kv_heads)
        self.method, self.heads, self.kv_heads, self.share_hidden = method, heads, kv_heads, share_hidden
        longest = max(START) + STEPS
        k, v = torch.randn(2, kv_heads, len(START) * longest, DIM, generator=generator)
        k[:, 40:90] = k[:, 100:150]  # keys that tie
        self.base = torch.randn(len(START), heads, DIM, generator=generator)
        self.noise = torch.randn(STEPS, len(START), heads, DIM, generator=generator)
        self.views = [
            KVView.from_tensors(k[:, at * longest :][:, :longest], v[:, at * longest :][:, :longest], block_size=16)
            for at in range(len(START))
        ]
        pools = [view.paged() for view in self.views]
        self.k, self.v = (torch.cat([getattr(pool, name) for pool in pools]) for name in ("k", "v"))
        before = [sum(pool.k.shape[0] for pool in pools[:at]) for at in range(len(pools))]
        self.tables = torch.stack([pool.block_table[:1] + first for pool, first in zip(pools, before)])
        capacity, most = method.room(longest)
        self.own = [self.anchors(capacity, most, method.s) for _ in START]
        self.reference = [self.anchors(capacity, most, 1) for _ in START]

    def anchors(self, capacity: int, most: int, places: int) -> Anchors:
        parts = _parts(Anchors.empty(self.heads, DIM, capacity, most))
        directions, has, counts, keys, positions, moving = (part.repeat_interleave(places, 0) for part in parts)
        return Anchors(directions, has, counts, keys, positions, moving)

    def cone(self, length: int) -> Cone | None:
        return Cone(self.share_hidden, self.method.sinks - 1, 8, 1) if self.share_hidden and length else None

    def rows(self, step: int) -> LayerRows:
        method = self.method
        lengths = [0 if start == 0 else start + step + 1 for start in START]
        q = torch.empty(len(START), self.heads, DIM + 3)[..., 3:]  # rows are not in one piece
        q.copy_(self.query(step))
        words = torch.zeros(len(START), 32, dtype=torch.int64)
        cones = torch.zeros(len(START), 4, dtype=torch.float64)
        for row, (start, own) in enumerate(zip(START, self.own)):
            if not start:
                continue
            numbers = Words(
                begins=start, steps=method.s, k=method.k, sinks=method.sinks, local=method.local, reach=method.r,
                best=-1 if method.m is None else method.m, follow=-1 if method.follow is None else method.follow,
                capacity=own.capacity, most=own.most, **{name: getattr(own, name).data_ptr() for name in PARTS},
            )  # fmt: skip
            words[row, : len(numbers)] = torch.tensor(numbers)
            if self.share_hidden:
                cones[row] = torch.tensor([self.share_hidden, method.sinks - 1, 8, 1], dtype=torch.float64)
        counted = torch.tensor(lengths, dtype=torch.int32)
        pages = type(pages_of(self.views[:1]))(self.k, self.v, self.tables, counted, max(lengths))
        reals = torch.tensor([Reals(tau=method.tau, k=method.k)] * len(START), dtype=torch.float64)
        none = torch.zeros(len(START), dtype=torch.int32)
        return LayerRows(0, q, pages, words, reals, cones, none, none, DIM**-0.5)

    def query(self, step: int) -> torch.Tensor:
        near = torch.arange(self.heads) % 3 != step % 3  # the others turn away and search
        return torch.where(near[:, None], self.base + 0.1 * self.noise[step], self.noise[step])

    def expected(self, row: int, step: int) -> tuple[list[set[int]], int]:
        """What each head reads, by sharing.py, and how many searched."""
        method, n = self.method, START[row] + step + 1
        view, anchors, q = self.views[row].upto(n), self.reference[row], self.query(step)[row][:, None]
        shape = Shape.suffix(self.heads, self.kv_heads, 1, n)
        cone = self.cone(n)
        hidden = (0, 0) if cone is None or cone.start(n - 1) <= cone.sink_keys else (cone.sink_keys, cone.start(n - 1))
        if n <= method.sinks + method.budget(n) + method.local:
            seen = set(range(n)) - set(range(*hidden))
            return [seen] * self.heads, 0
        moves = method.follow or 0, method.sinks
        offsets, shared, searching = share(anchors, q[:, 0], method.tau, method.local, n, True, moves)
        k_of = torch.where(searching, method.budget(n), n)
        chosen = Candidates(shape, offsets, shared, k_of, method.sinks, method.local, searching, hidden=hidden)
        done = run(Call.of(q, view, chosen, want_weights=True), "reference")
        assert isinstance(done.used, Tokens)
        keep(
            anchors, done.used, done.weights, searching, n - 1, (method.sinks, n - method.local), method.spread(n),
            method.r,
        )  # fmt: skip
        if hidden[1]:
            leave_out(anchors, hidden)
        lists = [
            set(done.used.indices[a:b].tolist()) - set(range(*hidden))
            for a, b in zip(done.used.offsets, done.used.offsets[1:])
        ]
        return lists, int(searching.sum())

    def attention(self, row: int, step: int, wanted: list[set[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Over what each head reads, in float64."""
        view = self.views[row].upto(START[row] + step + 1)
        outs, logs = [], []
        for head, keys in enumerate(wanted):
            which = torch.tensor(sorted(keys))
            kv_head = head // (self.heads // self.kv_heads)
            k, v = (part[kv_head][which].double() for part in (view.keys(), view.values()))
            logits = k @ self.query(step)[row, head].double() * DIM**-0.5
            outs.append(logits.softmax(0) @ v)
            logs.append(logits.logsumexp(0))
        return torch.stack(outs), torch.stack(logs)


@pytest.mark.parametrize(
    ("how", "heads", "kv_heads", "options", "hides"),
    [
        ("attends", 4, 4, {}, 0.0),
        ("listed", 2, 2, {"r": 2, "m": 7}, 0.0),
        ("attends", 3, 1, {"s": 2}, 0.4),
        ("listed", 3, 1, {"s": 2}, 0.4),
        ("listed", 4, 2, {"r": 0}, 0.3),
        ("held", 2, 2, {"follow": None, "m": 99}, 0.3),
        ("attends", 2, 1, {"follow": None, "m": 99}, 0.3),
    ],
)
def test_reads_and_keeps_what_sharing_says(monkeypatch, how, heads, kv_heads, options, hides):
    held, attends = how != "listed", how == "attends"
    monkeypatch.setattr(triton_one_launch, "HELD", 1 << 14 if held else 1)
    pieces = 24 if heads > kv_heads else 4  # pieces of lists also for groups
    monkeypatch.setattr(triton_one_launch, "RESIDENT", pieces)
    if how == "listed":
        monkeypatch.setattr(batched_best, "SPAN", 16)  # lists by several programs
    method = CIS(k=24, sinks=3, local=6, tau=0.7, **options)
    steps = Step(method, heads, kv_heads, hides)
    both = 0
    for step in range(min(STEPS, method.s)):
        rows = steps.rows(step)
        assert triton_one_launch.fuses(rows) == held
        width = rows.pages.longest
        counts, indices = triton_one_launch.kept_lists(rows, width) if attends else new_lists(rows, heads, width)
        chosen = triton_one_launch.choose(rows, counts, indices, attends)
        assert chosen.done == held
        if not held:
            list_and_keep(rows, chosen.searching, chosen.bounds, counts, indices, chosen.scores)
        for row, start in enumerate(START):
            lists = [indices[entry, : counts[entry]].tolist() for entry in range(row * heads, (row + 1) * heads)]
            if not start:
                assert lists == [[]] * heads
                assert not attends or not chosen.out[row].any()
                continue
            wanted, searches = steps.expected(row, step)
            if attends:
                out, lse = steps.attention(row, step, wanted)
                assert torch.allclose(chosen.out[row].double(), out, atol=1e-5)
                assert torch.allclose(chosen.lse[row].double(), lse, atol=1e-5)
            assert [set(one) for one in lists] == wanted
            assert [len(one) for one in lists] == [len(one) for one in wanted]
            assert chosen.searches[row].sum() == searches
            both |= (searches > 0) + 2 * (searches < heads)
            own, reference = steps.own[row], steps.reference[row]
            assert torch.equal(own.has[step], reference.has[step] if searches else torch.zeros_like(own.has[step]))
            for head in own.has[step].nonzero().flatten().tolist():
                size = int(own.counts[step, head])
                assert size == int(reference.counts[step, head])
                assert torch.equal(own.keys[step, head, :size], reference.keys[step, head, :size])
                assert torch.equal(own.moving[step, head], reference.moving[step, head])
    assert both == 3
    assert not arrivals(torch.device("cpu"), 32)[:32].any()
