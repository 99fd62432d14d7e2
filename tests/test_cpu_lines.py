"""The C++ kernels on vertical and slash lines, tri-shapes and heads of different kinds, against the reference."""

import pytest
import torch
from covering import covered
from cpu_helpers import attend_cpu, compare, problem, random_blocks

from saccade.ops import cpu
from saccade.selection import Dense, Lines, Mixed, Shape, Tri

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")

ISAS = cpu.supported_isas()
DTYPES = [torch.float32, torch.bfloat16]
# How the distances of a head may lie: the kernel reads stretches of them by tiles and lone ones row by row.
DISTANCES = ("none", "zero", "lone", "crowded", "window", "stretches", "all")


@pytest.fixture(autouse=True)
def _restore_isa():
    yield
    cpu.set_isa(None)


def lines(shape, kind, columns, units, seed=0):
    """Random lines: ``columns`` of them vertical, distances of one of DISTANCES."""
    generator = torch.Generator().manual_seed(seed)
    last = shape.q_start + shape.q_len

    def draw(count):
        return torch.randperm(last, generator=generator)[:count]

    def distances():
        if kind == "window":
            return torch.arange(min(last, 150))
        if kind == "stretches":  # with gaps on both sides of where a stretch ends, and lone ones between
            starts = torch.arange(10, max(last, 11), 211)
            runs = (starts[:, None] + torch.arange(40)).flatten()
            return torch.cat([runs, starts + 70, starts + 160])
        return {"none": draw(0), "zero": torch.tensor([0]), "lone": draw(9), "crowded": draw(last // 3)}.get(
            kind, torch.arange(last)
        )

    chosen = [distances() for _ in range(units)]
    return Lines.from_lists(shape, [draw(columns) for _ in range(units)], [part[part < last] for part in chosen])


@covered({"isa": ISAS, "dtype": DTYPES, "kind": DISTANCES, "columns": [0, 130]})
def test_lines_of_every_kind(isa, dtype, kind, columns):
    cpu.set_isa(isa)
    for q_start, q_len, extra in ((0, 391, 0), (200, 333, 13)):
        shape = Shape(4, 2, q_len, q_start + q_len + extra, q_start)
        q, view = problem(shape, 64, dtype, seed=columns)
        compare(q, view, lines(shape, kind, columns, 4, seed=q_start))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_start", "q_len"), [(0, 1), (0, 2), (0, 64), (63, 2), (127, 1), (128, 128), (517, 1), (77, 65)]
)
def test_lines_of_rows_anywhere(isa, dtype, q_start, q_len):
    cpu.set_isa(isa)
    shape = Shape(4, 2, q_len, q_start + q_len + 5, q_start)
    q, view = problem(shape, 32, dtype, page=16, seed=q_len)
    for kind in ("zero", "lone", "stretches", "all"):
        compare(q, view, lines(shape, kind, min(20, q_start + q_len), 4))


@covered({"isa": ISAS, "head_dim": [16, 80, 128, 256], "units": [1, 2, 4, 8]})
def test_lines_of_every_head_size_and_sharing(isa, head_dim, units):
    cpu.set_isa(isa)
    shape = Shape.suffix(8, 2, 190, 320)
    for dtype in DTYPES:
        q, view = problem(shape, head_dim, dtype, page=64)
        for kind in ("lone", "stretches"):
            compare(q, view, lines(shape, kind, 30, units))


@pytest.mark.parametrize("isa", ISAS)
def test_a_cell_on_two_lines_counts_once(isa):
    """Every column and every distance: each pair lies on two lines, and the result is dense attention."""
    cpu.set_isa(isa)
    shape = Shape.suffix(4, 2, 150, 200)
    q, view = problem(shape, 64, torch.float32)
    everything = [torch.arange(200)] * 4
    out, lse = compare(q, view, Lines.from_lists(shape, everything, everything))
    expected, expected_lse = attend_cpu(q, view, Dense(shape), scale=1 / 8)
    assert float((out - expected).abs().max()) < 1e-5
    assert float((lse - expected_lse).abs().max()) < 1e-5


@pytest.mark.parametrize("isa", ISAS)
def test_capped_logits_of_lines(isa):
    cpu.set_isa(isa)
    shape = Shape.suffix(4, 2, 190, 320)
    q, view = problem(shape, 64, torch.bfloat16)
    for kind in ("lone", "stretches"):
        compare(q, view, lines(shape, kind, 9, 4), scale=0.3, softcap=20.0)


@covered({"isa": ISAS, "dtype": DTYPES, ("q_start", "q_len"): [(0, 300), (311, 200), (400, 1), (400, 2)]})
def test_tri_shapes(isa, dtype, q_start, q_len):
    cpu.set_isa(isa)
    shape = Shape(4, 2, q_len, q_start + q_len + 3, q_start)
    q, view = problem(shape, 32, dtype)
    for dense_rows in (0, 1, 2, 100, q_len - 1, q_len, q_len + 1):
        compare(q, view, Tri(shape, window=50, sinks=4, dense_rows=max(0, dense_rows)))


@covered(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        "choice": [[0, 1, 1, 0, 2, 1, 0, 2], [0] * 8, [1] * 8, [2, 2, 2, 2, 0, 0, 0, 0]],
        "q_len": [1, 230],
    }
)
def test_heads_of_different_kinds(isa, dtype, choice, q_len):
    cpu.set_isa(isa)
    shape = Shape.suffix(8, 2, q_len, 300)
    q, view = problem(shape, 64, dtype)
    parts = (lines(shape, "stretches", 20, 8), random_blocks(shape, 64, 2), Tri(shape, window=20, dense_rows=40))
    compare(q, view, Mixed(shape, parts, torch.tensor(choice)))


def test_threads_do_not_change_a_bit_of_lines():
    shape = Shape.suffix(4, 2, 600, 900)
    for dtype in DTYPES:
        q, view = problem(shape, 64, dtype)
        selection = Mixed(
            shape,
            (lines(shape, "stretches", 40, 4), random_blocks(shape, 64, 4)),
            torch.tensor([0, 1, 0, 0]),
        )
        one = attend_cpu(q, view, selection, scale=0.1, threads=1)
        for threads in (2, 5):
            many = attend_cpu(q, view, selection, scale=0.1, threads=threads)
            assert torch.equal(one[0], many[0])
            assert torch.equal(one[1], many[1])
