"""``saccade bench recall``: truth, recall and the oracle against brute force, and the tables that come of them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import generator, random_selection

from saccade.bench.inputs import problem_of
from saccade.bench.recall.equal import at_equal_recall
from saccade.bench.recall.families import FAMILIES, generate
from saccade.bench.recall.ladders import DECODE, PREFILL, declared, ladder, ladders
from saccade.bench.recall.measure import RecallRow, Settings, layer_of, measure, prefill, steps
from saccade.bench.recall.table import markdown
from saccade.bench.recall.truth import Oracle, Truth, sampled_rows, spread_blocks, true_weights
from saccade.cli.main import main
from saccade.errors import SaccadeError
from saccade.methods import parse_method
from saccade.ops import attend
from saccade.selection import Band, Blocks, Dense, Lines, Shape, Tokens


def tensors(heads: int, kv_heads: int, n: int, d: int, dtype=torch.float32):
    """Queries, keys and values that are no contiguous tensors, with some keys far heavier than others."""
    rng = generator(n)
    q, k, v = (torch.randn(n, h, d, generator=rng).to(dtype).transpose(0, 1) for h in (heads, kv_heads, kv_heads))
    assert not q.is_contiguous()
    k[:, 3] *= 6
    return q, k, v


def dense_weights(q, k, scale: float) -> torch.Tensor:
    """[heads, n, n] in float64, by the whole matrix."""
    keys = k.double().repeat_interleave(q.shape[0] // k.shape[0], 0)
    scores = q.double() @ keys.transpose(1, 2) * scale
    n = k.shape[1]
    return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


@pytest.mark.parametrize(("heads", "kv_heads", "n", "dtype"), [(6, 2, 203, torch.float32), (4, 4, 96, torch.bfloat16)])
def test_true_weights_are_dense_attention(heads, kv_heads, n, dtype):
    q, k, _ = tensors(heads, kv_heads, n, 16, dtype)
    rows = sampled_rows(n, 70)
    torch.testing.assert_close(
        true_weights(q, k, rows, 0.25).double(), dense_weights(q, k, 0.25)[:, rows], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("kind", [Blocks, Tokens, Lines, Band])
@pytest.mark.parametrize("q_len", [203, 90])
def test_what_a_selection_keeps_is_its_mask_over_true_weights(kind, q_len):
    """Ragged lengths and blocks, lists of one KV head's group or of every head, chunks that begin within a block."""
    q, k, _ = tensors(6, 2, 203, 16)
    shape = Shape(6, 2, q_len, 203, 203 - q_len)
    rows = torch.tensor([203 - q_len, 150, 160, 161, 202])
    truth = Truth(rows, true_weights(q, k, rows, 0.25))
    for units in (1, 2, 6):
        selection = (
            random_selection(kind.__name__.lower(), shape, units, generator(units))
            if kind is not Band
            else Band(shape, 40, 2)
        )
        expected = (dense_weights(q, k, 0.25)[:, rows] * selection.mask()[:, rows - shape.q_start]).sum(-1)
        torch.testing.assert_close(truth.kept(selection).double(), expected, atol=1e-5, rtol=1e-4)
    assert truth.kept(Dense(shape)).allclose(torch.ones(6, 5))
    with pytest.raises(SaccadeError, match="outside"):
        truth.kept(Dense(Shape(6, 2, 40, 203, 163)))


def test_kept_of_selections_made_by_hand():
    """Two rows whose weights are known without a softmax's help."""
    k = torch.zeros(1, 4, 2)
    k[0, 1, 0] = math.log(3)  # with q = (1, 0): weights 1 : 3 : 1 : 1
    q = torch.tensor([[[1.0, 0.0]] * 4])
    rows = torch.tensor([2, 3])
    truth = Truth(rows, true_weights(q, k, rows, 1.0))
    shape = Shape(1, 1, 4, 4, 0)
    every = [torch.tensor(one) for one in ([0], [0], [1], [0, 3])]
    torch.testing.assert_close(truth.kept(Tokens.from_lists(shape, every)), torch.tensor([[3 / 5, 2 / 6]]))
    blocks = Blocks.from_lists(shape, 2, [torch.tensor([0]), torch.tensor([0])])
    torch.testing.assert_close(truth.kept(blocks), torch.tensor([[4 / 5, 4 / 6]]))


def test_oracle_is_the_best_of_all_sets_of_blocks():
    """Exhaustive search over 2 heads, 2 blocks of rows and 5 blocks of keys, the last of them cut."""
    q, k, _ = tensors(2, 1, 37, 8)
    size, q_blocks = 8, [2, 4]
    oracle = Oracle.of_rows(q, k, q_blocks, size, 0.3)
    weights = dense_weights(q, k, 0.3)
    costs, gains = [], []
    for block in q_blocks:
        rows = range(block * size, min((block + 1) * size, 37))
        for head in range(2):
            gains.append([float(weights[head, list(rows), a : a + size].sum(-1).mean()) for a in range(0, 37, size)])
            costs.append([sum(max(0, min(a + size, row + 1) - a) for row in rows) for a in range(0, 37, size)])
    total = sum(map(sum, costs))
    sets = [one for r in range(6) for one in itertools.combinations(range(5), r)]
    for recall in (0.3, 0.7, 0.9, 0.97):
        fewest = 0
        for gain, cost in zip(gains, costs):
            enough = [one for one in sets if sum(gain[i] for i in one) >= recall]
            least = min(len(one) for one in enough)
            heaviest = max((one for one in enough if len(one) == least), key=lambda one: sum(gain[i] for i in one))
            fewest += sum(cost[i] for i in heaviest)
        assert oracle.each(recall) == pytest.approx(fewest / total)
        flat = sorted((g, c) for gain, cost in zip(gains, costs) for g, c in zip(gain, cost))[::-1]
        kept = list(itertools.accumulate(g for g, _ in flat))
        count = next(i for i, sum_ in enumerate(kept) if sum_ >= recall * len(gains)) + 1
        assert oracle.mean(recall) == pytest.approx(sum(c for _, c in flat[:count]) / total)
        assert oracle.mean(recall) <= oracle.each(recall) + 1e-9
    assert oracle.each(1.0) == 1.0


def test_decode_oracle_takes_each_row_by_itself():
    q, k, _ = tensors(2, 2, 50, 8)
    rows = torch.tensor([20, 49])
    truth = Truth(rows, true_weights(q, k, rows, 0.3))
    least = 0
    for head, (at, row) in itertools.product(range(2), enumerate(rows.tolist())):
        sums = [(float(truth.weights[head, at, a : a + 16].sum()), min(16, row + 1 - a)) for a in range(0, row + 1, 16)]
        kept = 0.0
        for share, pairs in sorted(sums)[::-1]:
            if kept < 0.8:
                least += pairs
            kept += share
    assert Oracle.of_truth(truth, 16).each(0.8) == pytest.approx(least / (2 * 71))


def test_sampled_rows_and_blocks_cover_the_length():
    assert sampled_rows(10, 99).tolist() == list(range(10))
    rows = sampled_rows(1000, 64)
    assert rows.unique().numel() == 64
    assert ((rows - torch.arange(64) * 1000 // 64) < 16).all()
    assert spread_blocks(3, 8) == [0, 1, 2]
    assert spread_blocks(16, 4) == [2, 6, 10, 14]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_frozen(name):
    """Fewer heads are the first ones of more, seeds differ, and heads are not alike."""
    whole = generate(name, 4, 2, 32, 600, torch.float32)
    one = generate(name, 2, 1, 32, 600, torch.float32)
    assert whole.q[:2].equal(one.q)
    assert whole.k[:1].equal(one.k)
    assert not generate(name, 2, 1, 32, 600, torch.float32, seed=1).k.equal(one.k)
    assert all(part.isfinite().all() for part in (whole.q, whole.k, whole.v))
    assert not whole.q[0].equal(whole.q[1])
    known = {
        "topics": ((2.2789, 8.1548), (-1.1140, 2.3672)),
        "needles": ((-6.4625, -1.9609), (-1.4473, 1.1732)),
        "code": ((4.2253, -8.6296), (-0.1526, 2.0162)),
        "flat": ((-0.0302, 1.6398), (-1.5097, 2.0275)),
    }[name]
    own = generate(name, 2, 1, 32, 300, torch.float32)
    for part, expected in zip((own.q[1, 200, :2], own.k[0, 100, :2]), known):
        torch.testing.assert_close(part, torch.tensor(expected), atol=2e-3, rtol=0)


def test_sinks_and_flat_heads_are_what_they_are_called():
    rows = sampled_rows(2048, 64)
    sinks, needed = {}, {}
    for name in ("topics", "needles", "flat"):
        own = generate(name, 4, 2, 64, 2048, torch.float32)
        weights = true_weights(own.q, own.k, rows, 1 / 8)
        sinks[name] = float(weights[..., :4].sum(-1).mean())
        needed[name] = Oracle.of_truth(Truth(rows, weights), 32).each(0.9)
    assert sinks["needles"] > 10 * 4 / 2048
    assert needed["flat"] > 3 * max(needed["topics"], needed["needles"])


def test_ladders():
    texts = [text for text, _ in ladder("minference(vertical=10|20, slash=30|40)", "prefill").steps]
    assert texts == ["minference(vertical=10, slash=30)", "minference(vertical=20, slash=40)"]
    for phase, known in (("prefill", PREFILL), ("decode", (*DECODE, *declared()))):
        assert len({one.text for one in ladders(None, phase)}) == len(known)
    assert [one.text for one in ladders(["flexprefill"], "prefill")] == [
        "flexprefill(lines=token)",
        "flexprefill(lines=block)",
    ]
    for text, why in (
        ("minference(vertical=1|2, slash=3|4|5)", "give each as many"),
        ("quest", "does not select in prefill"),
        ("xattention(threshold=2)", "threshold=2"),
    ):
        with pytest.raises(SaccadeError, match=why):
            ladder(text, "prefill")
    with pytest.raises(SaccadeError, match="calibration"):
        ladder("infinigen", "decode")


def layer(phase: str, rows: int, **options):
    own = generate("topics", 4, 2, 64, 1100, torch.float32)
    settings = Settings(phase, rows, 1, 1, **options)
    return settings, layer_of(settings, problem_of(own.q, own.k, own.v))


def test_prefill_rows_agree_with_what_was_attended():
    """Recall from the truth equals exp(lse read - lse of all), and the error that of the outputs."""
    settings, own = layer("prefill", 40)
    method = parse_method("xattention(threshold=0.7)")
    done = prefill(settings, own, method)
    selection = method.select_prefill(_chunk(own.problem))
    out, lse = attend(own.problem.q, own.problem.views[0], selection, backend="reference")
    full, all_lse = attend(own.problem.q, own.problem.views[0], backend="reference")
    rows = own.truth.rows
    torch.testing.assert_close(done.kept, (lse - all_lse)[:, rows].exp(), atol=1e-4, rtol=1e-3)
    assert done.density == selection.density() < 0.9
    error = (out - full)[:, rows].norm(dim=-1) / full[:, rows].norm(dim=-1)
    assert done.error is not None
    torch.testing.assert_close(done.error, error, atol=1e-3, rtol=1e-2)


def _chunk(problem):
    from saccade.methods import Chunk

    return Chunk.of(problem.q, problem.views[0])


def test_decode_steps_see_their_own_keys_alone():
    settings, own = layer("decode", 5)
    assert own.truth.rows.tolist() == [1095, 1096, 1097, 1098, 1099]
    done = steps(settings, own, parse_method("streaming(window=100, sinks=4)"))
    for at, row in enumerate(own.truth.rows.tolist()):
        read = list(range(4)) + list(range(row - 99, row + 1))
        torch.testing.assert_close(done.kept[:, at], own.truth.weights[:, at, read].sum(-1), atol=1e-5, rtol=1e-4)
    dense = steps(settings, own, parse_method("dense"))
    assert dense.error is not None
    assert float(dense.error.max()) < 1e-4
    assert done.error is not None
    assert float(done.error.mean()) > 1e-3


@pytest.mark.parametrize("text", [*DECODE, *declared()])
def test_every_decode_ladder_runs(text):
    """Methods with states, watching ones among them, over steps that follow each other."""
    settings, own = layer("decode", 3, times=False)
    name, method = ladder(text, "decode").steps[0]
    done = steps(settings, own, method)
    assert done.kept.shape == (4, 3), name
    assert 0 < float(done.kept.mean()) <= 1.0001
    assert 0 < done.density <= 1


@pytest.mark.parametrize(
    ("phase", "hidden", "counting", "by"),
    [
        ("decode", "lfps(unit=kv_head, k=0.01|0.1)", "lfps(unit=kv_head, k=0.5)", "least=256"),
        ("decode", "lfps(least=128, blocks=0, k=0.01|0.1)", "lfps(least=128, blocks=0, k=0.2)", "least=128"),
        ("decode", "topk(k=1|79, sinks=16, local=64)", "topk(k=81, sinks=16, local=64)", "sinks+local=80"),
        (
            "prefill",
            "flexprefill(min_budget=1100, gamma=0.1|0.9)",
            "flexprefill(min_budget=128, gamma=0.5)",
            "min_budget=1100",
        ),
    ],
)
def test_a_row_says_what_hides_its_dial(phase, hidden, counting, by):
    """A hidden dial changes nothing, and only then is it called so; tables have it beside the method."""
    _, own = layer(phase, 5)
    settings = Settings(phase, 5, 1, 1, False)
    found = list(measure(settings, "topics", [own.problem], [ladder(hidden, phase), ladder(counting, phase)], print))
    dense, one, *others, free = found
    assert dense.hidden_by is None
    assert one.hidden_by == by
    assert all((other.density, other.recall, other.hidden_by) == (one.density, one.recall, by) for other in others)
    assert (free.hidden_by, free.density != one.density) == (None, True)
    page = markdown(found, at_equal_recall(found, 0.01, 0.0001), 0.01, 0.0001)
    assert page.count(f"| {by} |") == 1 + len(others) + 1  # and once in the table at equal recall
    assert page.count("| dial hidden by |") == 2
    assert "dial hidden by" not in markdown([dense, free], [], 0.9, 0.8)


def row(ladder_: str, density: float, recall: float, worst: float, ms: float) -> RecallRow:
    return RecallRow(
        "prefill", "topics", 1, 4, 2, 64, 1, ladder_, "m", density, recall, worst, 0.0, None,
        0.1, 0.1, 0.2, ms / 4, 3 * ms / 4, ms, 100.0, 0.0, 100.0 / ms, "cpu",
    )  # fmt: skip


def test_equal_recall_is_where_both_lines_are_high_enough():
    rows = [
        row("dense", 1.0, 1.0, 1.0, 100.0),
        row("a", 0.4, 0.95, 0.9, 40.0),  # rows come in any order
        row("a", 0.2, 0.85, 0.7, 20.0),
        row("b", 0.3, 0.95, 0.85, 30.0),
        row("c", 0.1, 0.5, 0.2, 10.0),
        row("c", 0.9, 0.99, 0.79, 90.0),
    ]
    a, b, c = at_equal_recall(rows)
    assert (a.density, a.ms, a.choosing_ms, a.below) == (
        pytest.approx(0.3),
        pytest.approx(30),
        pytest.approx(7.5),
        False,
    )
    assert a.speedup == pytest.approx(100 / 30)
    assert (b.density, b.ms, b.below, b.oracle) == (0.3, 30.0, True, 0.2)
    assert (c.density, c.ms, c.best_recall, c.best_worst) == (None, None, 0.99, 0.79)
    later = at_equal_recall(rows, mean=0.9, worst=0.85)[0]  # the worst head decides
    assert later.density == pytest.approx(0.35)


def test_command_prints_both_tables_and_writes_files(tmp_path: Path, capsys):
    out, page = tmp_path / "rows.json", tmp_path / "rows.md"
    args = [
        "bench",
        "recall",
        "--lengths",
        "700",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "32",
        "--rows",
        "20",
    ]
    args += ["--family", "topics,flat", "--methods", "xattention(threshold=0.5|0.9);a_shape(window=64, sinks=4)"]
    with pytest.raises(SystemExit) as ended:
        main([*args, "--device", "cpu", "--repeats", "1", "--json", str(out), "--markdown", str(page)])
    assert ended.value.code == 0
    facts = json.loads(out.read_text())
    wanted = ["dense", "xattention(threshold=0.5)", "xattention", "a_shape(sinks=4, window=64)"]
    assert [(one["family"], one["method"]) for one in facts["rows"]] == list(
        itertools.product(("topics", "flat"), wanted)
    )
    for one in facts["rows"]:
        assert 0 < one["worst"] <= one["recall"] <= 1
        assert 0 < one["oracle_mean"] <= one["oracle"] <= 1
        assert one["ms"] == pytest.approx(one["choosing_ms"] + one["attention_ms"], abs=1e-5)
    assert facts["rows"][0]["recall"] == pytest.approx(1)
    assert [(one["family"], one["ladder"]) for one in facts["equal"]][:2] == [
        ("topics", "xattention"),
        ("topics", "a_shape(window=64, sinks=4)"),
    ]
    assert "not reached (best 0." in page.read_text()
    assert "of the worst head" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--family", "topcs"], "known: topics, needles, code, flat"),
        (["--heads", "6", "--kv-heads", "4"], "multiple of kv_heads"),
        (["--head-dim", "15"], "head_dim=15 must be even"),
        (["--phase", "decode", "--rows", "300", "--lengths", "300"], "must leave a prompt"),
        (["--mean", "1.5"], "mean=1.5"),
        (["--input", "reference"], "capture:MODEL"),
        (["--lengths", "10"], "from 128"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_command_refuses_what_it_cannot_do(args, why, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "recall", *args])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_measures_a_models_own_attention(tmp_path: Path):
    """All layers of a checkpoint together; rows are those of its own dense prefill."""
    from tiny_models import make_checkpoint

    folder = make_checkpoint("llama", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("words of a text, one after the other. " * 12)
    out = tmp_path / "rows.json"
    args = ["--input", f"capture:{folder}", "--prompt-file", str(text), "--lengths", "200", "--dtype", "float32"]
    args += ["--methods", "xattention(threshold=0.3|0.6, block_size=32)", "--rows", "16", "--layers", "0,2"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "recall", *args, "--device", "cpu", "--no-times", "--json", str(out)])
    assert ended.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert [one["layers"] for one in rows] == [2, 2, 2]
    assert rows[0]["family"] == f"capture:{folder}"
    assert rows[0]["recall"] == pytest.approx(1)
    assert rows[1]["recall"] < rows[2]["recall"] < 1
    assert {one["ms"] for one in rows} == {0}
