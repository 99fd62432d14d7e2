"""PSAW's windows and ETF's freezes against the paper's equations, and windows against every kind of selection."""

from __future__ import annotations

import itertools
from fractions import Fraction
from itertools import product

import pytest
import torch
from covering import quick
from helpers import KINDS, brute_force, generator, phases_and_rows, planted_heads, random_selection
from method_matrix import MATRIX

from saccade.errors import PolicyError, SaccadeError
from saccade.kv.view import KVView
from saccade.methods import Policy
from saccade.methods.base import Chunk, Query
from saccade.methods.prehoc import ETF, PSAW
from saccade.ops import Call, run
from saccade.ops import cpu as cpu_ops
from saccade.selection import Band, Blocks, Candidates, Cone, Dense, Lines, Mixed, Ranking, Shape, Tokens, Windowed, cut

ROWS = ((40, 40), (40, 300), (1, 300), (1, 700), (77, 633), (300, 300))  # (q_len, k_len)


def hidden_by_the_paper(phi: float, alpha: float, layer: int, layers: int, t: int, sinks: int) -> set[int]:
    """Positions a row of 1-based count t does not see at 1-based layer l, as 5.4 prints it (rational where phi is)."""
    start = 3 * layers // 4
    if layer < start:
        return set()
    power = alpha * Fraction(layer - start, layers - start)
    exact = Fraction(str(phi)) ** int(power) if power == int(power) else Fraction(phi ** float(power))
    bound = int((1 - exact) * t)  # floor
    return {i for i in range(sinks, t) if i + 1 < bound}


def cone_mask(cone: Cone, shape: Shape) -> torch.Tensor:
    return cone.row_mask(shape, 0, shape.q_len) & shape.causal_mask()


@pytest.mark.parametrize("layers", [4, 5, 8, 32])
@pytest.mark.parametrize(("phi", "alpha", "sinks"), [(0.7, 1, 16), (0.5, 2, 0), (0.9, 1, 3), (0.1, 1, 1)])
def test_psaw_hides_what_the_paper_hides(layers, phi, alpha, sinks):
    method = PSAW(phi=phi, alpha=alpha, sinks=sinks, local=0, block_size=1)
    shape = Shape.suffix(1, 1, 90, 90)
    for layer in range(1, layers + 1):
        cone = method.at(layer - 1, layers)
        seen = shape.causal_mask() if cone is None else cone_mask(cone, shape)
        for row in range(90):
            hidden = hidden_by_the_paper(phi, alpha, layer, layers, row + 1, sinks)
            assert set((~seen[row, : row + 1]).nonzero()[:, 0].tolist()) == hidden, (layer, row)


def test_psaw_sizes_at_the_defaults():
    """5.4: at N = 32 the layers 25 .. 32 mask 4.4 to 30 %, together 4.4 % of all keys of a long decode step."""
    method, position = PSAW(), 1_000_000 - 1
    shares = []
    for layer in range(32):
        cone = method.at(layer, 32)
        shares.append(0.0 if cone is None else cone.start(position) / (position + 1))
    assert shares[:24] == [0.0] * 24
    assert shares[24] == pytest.approx(0.044, abs=0.001)
    assert shares[31] == pytest.approx(0.3, abs=0.001)
    assert sum(shares) / 32 == pytest.approx(0.044, abs=0.001)


@pytest.mark.parametrize("local", [0, 1, 64, 500])
@pytest.mark.parametrize("size", [1, 16, 128])
def test_the_last_keys_are_never_hidden(local, size):
    cone = Cone(0.95, sinks=4, local=local, block_size=size)
    shape = Shape.suffix(1, 1, 400, 400)
    seen = cone_mask(cone, shape)
    for row in range(400):
        assert seen[row, max(0, row + 1 - local) : row + 1].all()
        assert seen[row, row]
        assert seen[row, : min(4, row + 1)].all()


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_the_grid_rounds_outwards_by_less_than_two_blocks(size, share):
    positions = torch.arange(3000)
    fine = Cone(share, sinks=10, local=64).starts(positions)
    coarse = Cone(share, sinks=10, local=64, block_size=size).starts(positions)
    assert coarse[::7].tolist() == [Cone(share, 10, 64, size).start(p) for p in range(0, 3000, 7)]
    assert (coarse <= fine).all()
    assert (fine - coarse < 2 * size).all()
    assert (coarse % size == 0).all()
    assert (coarse.diff() >= 0).all()
    assert (fine.diff() >= 0).all()
    assert (coarse[::size].repeat_interleave(size)[:3000] == coarse).all(), "rows of a block share its start"


def expected_mask(selection, cone: Cone) -> torch.Tensor:
    """What is left of a selection inside a cone: key by key, with what cut() says of emptied rows and of rankings."""
    shape, chosen = selection.shape, selection.mask()
    if isinstance(selection, Mixed):
        parts = torch.stack([expected_mask(part, cone) for part in selection.parts])
        return parts[selection.choice, torch.arange(shape.heads)]
    keep = cone.row_mask(shape, 0, shape.q_len)[None].expand_as(chosen)
    if isinstance(selection, Ranking):
        size = selection.block_size
        padded = torch.nn.functional.pad(keep, (0, -shape.k_len % size))
        keep = padded.unflatten(-1, (-1, size)).any(-1).repeat_interleave(size, -1)[..., : shape.k_len]
    seen = chosen & keep
    own = torch.zeros_like(seen)
    blocks = isinstance(selection, Blocks) and cone.block_size >= 16
    size = min(selection.block_size, cone.block_size) if blocks else 1
    for row, position in enumerate(shape.rows.tolist()):
        own[:, row, position // size * size : position + 1] = True
    emptied = chosen.any(-1) & ~seen.any(-1)
    if blocks:  # a list serves all rows of its block
        for row in range(shape.q_len):
            same = [r for r in range(shape.q_len) if (shape.q_start + r) // size == (shape.q_start + row) // size]
            emptied[:, row] = chosen[:, same].flatten(1).any(1) & ~seen[:, same].flatten(1).any(1)
    return torch.where(emptied[..., None], own, seen)


GRIDS = (1, 16, 32, 128)


@pytest.mark.parametrize(
    ("kind", "grid"),
    quick(product(KINDS, GRIDS), lambda kind, grid: (KINDS.index(kind) + GRIDS.index(grid)) % 2 == 0),
)
def test_a_cut_selection_is_the_intersection(kind, grid):
    rng, sparser = generator(grid), 0
    for (q_len, k_len), share, block_size in itertools.product(ROWS, (0.5, 0.9), (16, 32, 64)):
        if kind == "ranking" and q_len != 1:
            continue
        shape = Shape.suffix(4, 2, q_len, k_len)
        selection = random_selection(kind, shape, units=2, rng=rng, block_size=block_size)
        if isinstance(selection, Ranking):  # as methods make them: every unit ranks the same blocks
            selection = Ranking(shape, block_size, selection.always, selection.order[:1].flip(1).repeat(2, 1), 1.0)
            selection.order[1] = selection.order[0].flip(0)
        cone = Cone(share, sinks=5, local=3, block_size=grid)
        left = cut(selection, cone)
        left.check()
        assert left.shape == shape
        assert torch.equal(left.mask(), expected_mask(selection, cone)), (q_len, k_len, share, block_size)
        assert torch.equal(left.pairs().expand(4), left.mask().flatten(1).sum(1))
        sparser += left.density() < selection.density()
    assert sparser >= 4


def test_cuts_stay_in_kinds_that_have_kernels():
    cone = Cone(0.5, sinks=20, local=10, block_size=64)
    chunk, step = Shape.suffix(4, 2, 200, 1000), Shape.suffix(4, 2, 1, 1000)
    assert isinstance(cut(Dense(chunk), cone), Blocks)
    band = cut(Dense(step), cone)
    assert (type(band), band.window, band.sinks) == (Band, 1000 - 448, 64)  # floor(0.5 * 961) - 1 = 479 -> 448
    for size in (16, 64, 128):
        blocks = Blocks.from_block_mask(chunk, size, torch.ones(4, 999 // size - 800 // size + 1, -(-1000 // size)) > 0)
        assert isinstance(cut(blocks, cone), Blocks)
    narrow = Band(chunk, window=100, sinks=4)
    assert cut(narrow, cone) is narrow
    assert isinstance(cut(Band(step, window=700, sinks=4), cone), Band)
    assert isinstance(cut(Dense(chunk), Cone(0.5, 20, 10)), Windowed)
    early = Shape.suffix(4, 2, 64, 64)
    assert isinstance(cut(Dense(early), cone), Dense), "nothing hidden yet"


@pytest.mark.parametrize("q_len", [1, 37, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_read_the_cut(q_len, dtype):
    """Dense and block selections through the C++ kernels, against masked attention in float64."""
    if not cpu_ops.available():
        pytest.skip("no C++ kernels here")
    q, k, v = (part.to(dtype) for part in planted_heads(4, 2, 500, seed=q_len))
    q = q[:, -q_len:]
    view = KVView.from_tensors(k, v, shuffle_seed=1)
    shape, cone = Shape.suffix(4, 2, q_len, 500), Cone(0.6, sinks=5, local=8, block_size=32)
    q_blocks = 499 // 64 - (500 - q_len) // 64 + 1
    some = torch.rand(4, q_blocks, 8, generator=generator(q_len)) < 0.6
    for selection in (Dense(shape), Blocks.from_block_mask(shape, 64, some)):
        left = cut(selection, cone)
        ran = run(Call.of(q, view, left))
        out = ran.out
        assert ran.backend.startswith("cpu/")
        want, _ = brute_force(q, k, v, expected_mask(selection, cone))
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", [case for case in MATRIX if case.name != "dense"], ids=lambda case: case.name)
def test_every_method_within_a_window(case):
    """What each method selects, cut and attended, equals attention over the two masks together."""
    q, k, v = planted_heads(4, 2, 700, seed=5)
    view, cone = KVView.from_tensors(k, v), Cone(0.6, sinks=16, local=16, block_size=128)
    for phase, rows in phases_and_rows(case.methods()[0], (1, 200)):
        method, tail = case.methods()[0], q[:, -rows:]
        chunk = (Chunk if phase == "prefill" else Query).of(tail, view, window=cone)
        if phase == "prefill":
            selection = method.select_prefill(chunk)
        else:
            selection = method.select_decode(chunk, method.begin(Chunk.of(tail, view, window=cone)))
        ran = run(Call.of(tail, view, cut(selection, cone)), "reference")
        out = ran.out
        used = ran.used.mask()
        if not isinstance(selection, (Ranking, Candidates)):  # of which the op reads a part
            assert torch.equal(used, expected_mask(selection, cone))
        assert not (used & ~cone_mask(cone, chunk.shape)).any()
        assert used.any(-1).all()
        if not case.reweights:
            torch.testing.assert_close(out.double(), brute_force(tail, k, v, used)[0], atol=1e-5, rtol=1e-5)


def test_unequal_rankings_are_refused():
    shape = Shape.suffix(4, 2, 1, 320)
    order = torch.tensor([[0, 1, 2], [5, 6, 7]], dtype=torch.int32)
    ranking = Ranking(shape, 32, torch.full((2, 1), 9, dtype=torch.int32), order, 1.0)
    with pytest.raises(SaccadeError, match="rank the same blocks"):
        cut(ranking, Cone(0.5, sinks=0, local=0, block_size=32))


def test_cut_parts_of_mixed_heads():
    shape = Shape.suffix(2, 1, 100, 300)
    lines = Lines.from_lists(shape, [torch.tensor([3, 120])] * 2, [torch.tensor([0, 250])] * 2)
    mixed = Mixed(shape, (Tokens.from_mask(shape, torch.rand(2, 100, 300) < 0.3), lines), torch.tensor([1, 0]))
    cone = Cone(0.4, sinks=4, local=1)
    left = cut(mixed, cone)
    assert isinstance(left, Mixed)
    assert torch.equal(left.mask(), expected_mask(mixed, cone))


@pytest.mark.parametrize("layers", [4, 7, 12, 32])
@pytest.mark.parametrize(("psi", "gamma", "sinks"), [(0.5, 1, 16), (0.2, 1, 0), (0.9, 2, 5)])
def test_etf_freezes_what_the_paper_freezes(layers, psi, gamma, sinks):
    method, start = ETF(psi=psi, gamma=gamma, sinks=sinks), 3 * layers // 4
    for length in (1, 17, 100, 257):
        first = method.first_frozen(torch.arange(length), length, layers)
        for layer, position in itertools.product(range(1, layers + 1), range(length)):
            bound = 0
            if layer > start:
                power = Fraction(layer - start, layers - start) * gamma
                share = Fraction(str(psi)) ** int(power) if power == int(power) else Fraction(psi ** float(power))
                bound = int((1 - share) * length)
            frozen = sinks <= position < min(bound, length - 1)
            assert (int(first[position]) < layer) == frozen, (length, layer, position)


def test_etf_sizes_at_the_defaults():
    """5.5: up to half of the rows at the top layer, 7.7 % of all token-layers."""
    ends = ETF().ends(100_000, 32)
    assert ends[-1] == 50_000
    assert sum(ends) / (32 * 100_000) == pytest.approx(0.077, abs=0.001)


@pytest.mark.parametrize("off", [{"alpha": 0}, {"phi": 1.0}, {"start_layer": 8}, {"start_layer": 100}])
def test_psaw_off(off):
    assert all(PSAW(**off).at(layer, 8) is None for layer in range(8))


@pytest.mark.parametrize("off", [{"gamma": 0}, {"psi": 1.0}, {"start_layer": 8}])
def test_etf_off(off):
    assert (ETF(**off).first_frozen(torch.arange(50), 50, 8) == 8).all()


def test_models_of_fewer_than_four_layers_are_left_alone_unless_asked():
    assert all(PSAW().at(layer, 3) is None for layer in range(3))
    assert (ETF().first_frozen(torch.arange(50), 50, 3) == 3).all()
    assert PSAW(start_layer=2).at(2, 3) is not None
    assert (ETF(start_layer=1).first_frozen(torch.arange(50), 50, 3) < 3).any()


POLICIES = ("psaw", "etf", "psaw+etf", "flexprefill+psa+psaw(alpha=2.0)+etf(reuse=kv)", "streaming+etf(start_layer=2)")


@pytest.mark.parametrize("text", POLICIES)
def test_policy_text_round_trips(text):
    policy = Policy.parse(text)
    assert policy.text == text
    assert Policy.parse(policy.text) == policy
    assert (
        Policy.parse({phase: getattr(policy, phase) for phase in ("prefill", "decode", "window", "freeze")}) == policy
    )
    mapping = {"prefill": policy.prefill.text, "decode": policy.decode.text}
    mapping |= {phase: part.text for phase in ("window", "freeze") if (part := getattr(policy, phase)) is not None}
    assert Policy.parse(mapping) == policy
    assert Policy.parse(", ".join(f"{phase}={part}" for phase, part in mapping.items())) == policy


def test_mixed_forms_of_policies():
    text = "prefill=streaming(window=3), decode=psa, window=psaw"
    policy = Policy.parse(text)
    assert (policy.window, policy.freeze, policy.text) == (PSAW(), None, text)
    assert Policy.parse(PSAW(phi=0.5)) == Policy(window=PSAW(phi=0.5))
    assert Policy.parse("etf + psaw + psa") == Policy.parse("psa+psaw+etf")
    assert Policy.parse("psaw+topk") == Policy(decode=Policy.parse("topk").decode, window=PSAW())


def test_a_preset_may_hold_a_window_and_join_others(monkeypatch):
    from saccade.methods import policy

    monkeypatch.setitem(policy.PRESETS, "deep", "psa(epsilon=0.9)+psaw+etf")
    monkeypatch.setitem(policy.PRESETS, "spelt", "prefill=streaming, decode=psa, window=psaw")
    assert Policy.parse("deep") == Policy.parse("psa(epsilon=0.9)+psaw+etf")
    assert Policy.parse("flexprefill + deep") == Policy.parse("flexprefill+psa(epsilon=0.9)+psaw+etf")
    assert Policy.parse("spelt").window == PSAW()
    with pytest.raises(PolicyError, match="window is taken by 'psaw'"):
        Policy.parse("deep+psaw")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("window=psa", "'psa' is no window, only in decode"),
        ("freeze=psaw", "'psaw' is no freeze, only in window"),
        ("decode=etf", "'etf' does not select in decode, only in freeze"),
        ("psaw+psaw(phi=0.5)", "nothing is left for 'psaw' (window is taken by 'psaw')"),
        ("psaw(phi=0)", "phi=0 is out of range: a number above 0"),
        ("psaw(phi=1.5)", "phi=1.5 is out of range: a number from 0.0 to 1.0"),
        ("psaw(alpha=-1)", "alpha=-1"),
        ("psaw(block_size=8)", "one of 1, 16, 32, 64, 128"),
        ("psaw(start_layer=0)", "start_layer=0 is out of range: an integer >= 1"),
        ("psaw(psi=0.5)", "no option 'psi' (did you mean 'phi'?); known: alpha, block_size, local, phi, sinks"),
        ("etf(reuse=keys)", "reuse=keys is out of range: one of hidden, kv"),
        ("etf(gamma=true)", "gamma=True"),
        ("psaaw", "did you mean 'psaw'"),
    ],
)
def test_wrong_policies_are_named(text, says):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    assert says in str(caught.value)
