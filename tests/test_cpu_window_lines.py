"""The C++ kernels on selections inside a window that grows with the row, against the reference."""

import pytest
import torch
from covering import covered
from cpu_helpers import attend_cpu, compare, problem, random_blocks
from engine_helpers import GREEDY, make, tokens
from tiny_models import make_checkpoint, random_ids

from saccade.ops import Call, cpu, run
from saccade.selection import Band, Blocks, Cone, Dense, Lines, Mixed, Shape, Tri, Windowed, cut

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")

ISAS = cpu.supported_isas()
DTYPES = [torch.float32, torch.bfloat16]
# Rows of a task share their start, tiles do, none do, and grids that cut across both; with and without sinks.
CONES = [
    Cone(0.4, sinks=16, local=64, block_size=128),
    Cone(0.3, sinks=0, local=64, block_size=64),
    Cone(0.7, sinks=5, local=0, block_size=1),
    Cone(1.0, sinks=20, local=40, block_size=1),
    Cone(0.5, sinks=3, local=7, block_size=48),
]


@pytest.fixture(autouse=True)
def _restore_isa():
    yield
    cpu.set_isa(None)


def lines(shape, units, kind="mixed", seed=0):
    """Columns everywhere; distances near and far, alone ("lone"), in stretches, or both."""
    generator = torch.Generator().manual_seed(seed)
    last = shape.q_start + shape.q_len

    def distances():
        lone = torch.randperm(last, generator=generator)[:9]
        starts = torch.arange(int(torch.randint(0, 30, (1,), generator=generator)), last, 170)
        runs = (starts[:, None] + torch.arange(60)).flatten()
        return {"lone": lone, "stretches": runs, "mixed": torch.cat([lone, runs]), "none": lone[:0]}[kind]

    columns = [torch.randperm(last, generator=generator)[:40] for _ in range(units)]
    return Lines.from_lists(shape, columns, [part[part < last] for part in (distances() for _ in range(units))])


def agree(shape, head_dim, dtype, selection, **options):
    """Kernel and reference agree, and the pairs are those of the mask."""
    q, view = problem(shape, head_dim, dtype)
    compare(q, view, selection, **options)
    assert torch.equal(selection.unit_pairs(), selection.unit_mask().flatten(1).sum(1))


@covered({"isa": ISAS, "dtype": DTYPES, "cone": CONES, "kind": ["none", "lone", "stretches", "mixed"]})
def test_lines_inside_a_window(isa, dtype, cone, kind):
    cpu.set_isa(isa)
    for q_start, q_len, extra in ((0, 391, 0), (317, 233, 13)):
        shape = Shape(4, 2, q_len, q_start + q_len + extra, q_start)
        agree(shape, 64, dtype, Windowed(lines(shape, 4, kind, seed=q_start), cone))


@covered({"isa": ISAS, ("q_start", "q_len"): [(0, 1), (127, 1), (511, 2), (128, 128), (577, 65)], "units": [1, 2, 8]})
def test_rows_anywhere_and_units_of_any_size(isa, q_start, q_len, units):
    cpu.set_isa(isa)
    shape = Shape(8, 2, q_len, q_start + q_len + 5, q_start)
    for cone in CONES:
        selection = Lines.from_lists(
            shape, [torch.arange(0, q_start + 1, 7)] * units, [torch.arange(0, q_start + 1, 9)] * units
        )
        agree(shape, 80, torch.float32, Windowed(selection, cone))
        agree(shape, 32, torch.bfloat16, Windowed(selection, cone), scale=0.3, softcap=20.0)


@covered({"isa": ISAS, "dtype": DTYPES, "cone": CONES, "size": [16, 128]})
def test_blocks_inside_a_window_of_another_grid(isa, dtype, cone, size):
    """Sparse lists: some rows lose all they read, and then keep their own key."""
    cpu.set_isa(isa)
    for q_start, q_len, extra in ((0, 391, 0), (317, 233, 13), (420, 1, 0)):
        shape = Shape(4, 2, q_len, q_start + q_len + extra, q_start)
        for density in (0.15, 0.8):
            agree(shape, 32, dtype, Windowed(random_blocks(shape, size, 4, density), cone))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 15.0])
def test_a_row_that_loses_its_last_key_keeps_its_own(isa, dtype, softcap):
    """A column or a distance that falls out of the window; rows before the first line read nothing, then as now."""
    cpu.set_isa(isa)
    shape = Shape(4, 2, 300, 300, 0)
    cone = Cone(0.5, sinks=10, local=0, block_size=1)
    none = torch.tensor([], dtype=torch.int64)
    selection = Lines.from_lists(
        shape,
        [torch.tensor([50]), torch.tensor([3, 70]), none, none],
        [none, none, torch.tensor([140]), torch.tensor([0, 90])],
    )
    windowed = Windowed(selection, cone)
    # Key 50 is hidden when 51 < floor(t / 2), from t = 104: row 103. Row r reads r - 140 from row 140 on; of those are
    # r - 140 < 10 sinks, and the rest seen when r - 139 >= floor((r + 1) / 2), from row 278 on.
    assert windowed.emptied(0).tolist() == list(range(103, 300))
    assert windowed.emptied(1).tolist() == []
    assert windowed.emptied(2).tolist() == list(range(150, 278))
    assert windowed.emptied(3).tolist() == []
    agree(shape, 64, dtype, windowed, softcap=softcap)


@covered({"isa": ISAS, "dtype": DTYPES, "cone": CONES, ("q_start", "q_len"): [(0, 300), (311, 200), (400, 1)]})
def test_bands_tri_shapes_and_everything_inside_a_window(isa, dtype, cone, q_start, q_len):
    cpu.set_isa(isa)
    shape = Shape(4, 2, q_len, q_start + q_len + 3, q_start)
    inner = [Dense(shape), Tri(shape, window=50, sinks=4, dense_rows=100), Tri(shape, window=280, sinks=90)]
    inner += [Band(shape, window=250, sinks=0), Band(shape, window=9, sinks=150), Band(shape, window=330, sinks=130)]
    for selection in inner:
        agree(shape, 32, dtype, Windowed(selection, cone))


@covered({"isa": ISAS, "dtype": DTYPES, "choice": [[0, 1, 1, 0, 2, 1, 0, 2], [0] * 8], "q_len": [1, 230]})
def test_heads_of_different_kinds_inside_a_window(isa, dtype, choice, q_len):
    cpu.set_isa(isa)
    shape = Shape.suffix(8, 2, q_len, 600)
    parts = (lines(shape, 8), random_blocks(shape, 64, 8, density=0.9), Tri(shape, window=400, dense_rows=40))
    left = cut(Mixed(shape, parts, torch.tensor(choice)), Cone(0.4, sinks=16, local=64, block_size=64))
    narrowed = Lines if q_len == 1 else Windowed
    assert [type(part) for part in left.parts] == [narrowed, Blocks, narrowed]
    left.check()
    agree(shape, 64, dtype, left)
    q, view = problem(shape, 64, dtype)
    ran = run(Call.of(q, view, left))
    assert ran.backend == f"cpu/{isa}"


def test_threads_do_not_change_a_bit_inside_a_window():
    shape = Shape.suffix(4, 2, 600, 900)
    for cone in CONES[::2]:
        q, view = problem(shape, 64, torch.float32)
        selection = Windowed(lines(shape, 4), cone)
        one = attend_cpu(q, view, selection, scale=0.1, threads=1)
        many = attend_cpu(q, view, selection, scale=0.1, threads=5)
        assert torch.equal(one[0], many[0])
        assert torch.equal(one[1], many[1])


ETF = "etf(psi=0.3, start_layer=2, sinks=3)"
LITERAL = "psaw(phi=0.3, local=0, block_size=1)"
LINES = "minference(vertical=12, slash=9, keep_columns=3, keep_diagonals=5)"
FLEX = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=6, head_dim=32, max_position_embeddings=2048
    )


@covered(
    {
        "window": [LITERAL, "psaw(phi=0.2, start_layer=2, sinks=3, local=4, block_size=16)"],
        "method": [FLEX, "loopserve(alpha=0.5)", LINES, "tri_shape(window=99, last=40)", "xattention(block_size=64)"],
    },
    strength=1,
)
def test_a_policy_with_a_window_prefills_on_the_kernels(folder, method, window):
    """Chunks, of one row too, frozen rows and a second turn: no layer falls back, and tokens and densities are the
    reference backend's."""
    ids, answers, prefills = random_ids(903, 1), [], []
    for backend in ("cpu", "reference"):
        llm = make(folder, blocks=1000, chunk=301, backend=backend)
        with llm.session(f"prefill={method}, window={window}, freeze={ETF}") as session:
            outputs = [session.generate(turn, GREEDY) for turn in (ids[:603], ids[603:])]
        answers.append([tokens(output) for output in outputs])
        prefills.append([output.report["prefill"] for output in outputs])
    assert answers[0] == answers[1]
    for ours, theirs in zip(*prefills):
        assert set(ours["backends"]) == {f"cpu/{cpu.isa()}"}
        assert set(theirs["backends"]) == {"reference"}
        assert ours["rows_frozen"] > 0
        assert ours["density"] < 0.9
        for count in ("keys_attended", "rows_frozen", "selections"):
            assert ours[count] == theirs[count]
    grid_of_blocks = "xattention" in method and window != LITERAL  # then what is left is a list of blocks
    assert grid_of_blocks != any("windowed" in ours["selections"] for ours in prefills[0])
