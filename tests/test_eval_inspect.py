"""Maps of what heads read: their numbers against brute force, and pictures that tell policies apart."""

from __future__ import annotations

import csv
import sys

import numpy as np
import pytest
import torch
from engine_helpers import make
from eval_calls import make_call, three_heads
from helpers import brute_force, planted_heads
from tiny_models import one_thread, random_ids  # noqa: F401

from saccade.errors import PolicyError, SaccadeError
from saccade.eval.render import render
from saccade.eval.suite import make as make_task
from saccade.eval_cli.inspect import parse_layers
from saccade.llm import LLM
from saccade.selection import Band, Shape

inspect_module = pytest.importorskip("saccade.eval.inspect")
pytest.importorskip("matplotlib", reason="pictures need matplotlib")

FLOOR, Maps, inspect, shade = (getattr(inspect_module, name) for name in ("FLOOR", "Maps", "inspect", "shade"))


def luminance(rgb) -> np.ndarray:
    return np.asarray(rgb) @ np.array([0.2126, 0.7152, 0.0722])


def pixels(path) -> np.ndarray:
    """RGB [height, width, 3], 0 to 1."""
    from matplotlib.image import imread

    return imread(path)[..., :3]


def seen_by(call, prompt: int, pixels: int = 16):
    maps = Maps(prompt, 4, [0], pixels=pixels)
    maps(call)
    return maps, maps.seen.maps["prefill", 0]


def test_maps_are_max_pooled_weights():
    """64 tokens on a grid of cells of 5 (of 68 positions in 16 columns): every row is looked at."""
    q, k, v = planted_heads(4, 2, 64, seed=1)
    shape = Shape.suffix(4, 2, 64, 64)
    band = Band(shape, window=9, sinks=2)
    maps, found = seen_by(make_call(q, k, v, band), 64)
    assert (maps.cell, found.read.shape) == (5, (4, 13, 14))
    read, causal = band.mask()[0], shape.causal_mask()
    scores = 0.25 * q.double() @ k.double().repeat_interleave(2, 0).transpose(1, 2)
    weights = torch.softmax(scores.masked_fill(~causal, -torch.inf), -1)
    for row in range(13):
        for column in range(13):
            cell = (slice(row * 5, row * 5 + 5), slice(column * 5, column * 5 + 5))
            part, chosen, visible = weights[:, cell[0], cell[1]], read[cell], causal[cell]
            torch.testing.assert_close(
                found.read[:, row, column].double(), (part * chosen).amax((1, 2)), atol=1e-6, rtol=1e-4
            )
            torch.testing.assert_close(
                found.unread[:, row, column].double(), (part * ~chosen).amax((1, 2)), atol=1e-6, rtol=1e-4
            )
            share = chosen.sum() / visible.sum() if visible.any() else torch.tensor(torch.nan)
            torch.testing.assert_close(found.share[:, row, column], share.expand(4), equal_nan=True)
    _, lse = brute_force(q, k, v, read.expand(4, 64, 64), 0.25)
    kept = torch.exp(lse - torch.logsumexp(scores.masked_fill(~causal, -torch.inf), -1)).mean(1)
    torch.testing.assert_close(found.mass.double(), kept, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.density, (read.sum() / causal.sum()).expand(4))


def test_chunks_and_repeated_rows_give_the_same_map():
    q, k, v = three_heads(90)
    whole = Maps(90, 0, [0], pixels=90)
    whole(make_call(q, k, v, Band(Shape.suffix(3, 1, 90, 90), window=7)))
    parts = Maps(90, 0, [0], pixels=90)
    for start, stop in ((0, 33), (33, 60), (33, 60), (60, 90)):
        shape = Shape.suffix(3, 1, stop - start, stop)
        parts(make_call(q[:, start:stop], k[:, :stop], v[:, :stop], Band(shape, window=7)))
    for name in ("read", "unread", "share", "density", "mass"):
        one, other = (getattr(maps.seen.maps["prefill", 0], name) for maps in (whole, parts))
        torch.testing.assert_close(one, other, equal_nan=True)


def test_long_prompts_are_sampled_evenly():
    """1600 tokens in 16 cells of 100: every twelfth row, so that each cell has 8 or 9 of them."""
    maps = Maps(1600, 0, [0], pixels=16)
    assert (maps.cell, maps.positions[0], maps.positions[1] - maps.positions[0]) == (100, 6, 12)
    per_cell = torch.bincount(maps.positions // 100)
    assert per_cell.numel() == 16
    assert set(per_cell.tolist()) <= {8, 9}


def test_decode_rows_are_steps():
    q, k, v = three_heads(40)
    maps = Maps(36, 4, [0], pixels=40)
    for step in range(4):
        n = 37 + step
        call = make_call(q[:, n - 1 : n], k[:, :n], v[:, :n], Band(Shape.suffix(3, 1, 1, n), window=3), phase="decode")
        maps(call)
    found = maps.seen.maps["decode", 0]
    assert (maps.seen.prompt, maps.seen.total) == (36, 40)
    assert found.read.shape == (3, 4, 40)
    assert found.unread[0, :, 0].min() > 0.99  # the sink lies outside every window
    for step in range(4):
        assert found.unread[1, step, 36 + step - 5] > 0.99
        assert found.share[0, step].nan_to_num(0).nonzero()[:, 0].tolist() == [34 + step, 35 + step, 36 + step]
        assert torch.isnan(found.share[0, step, 37 + step :]).all()


def test_shades_can_be_told_apart_in_colour_and_in_grey():
    weights = np.geomspace(FLOOR, 1.0, 50)[None, :]
    nothing, everything = np.zeros_like(weights), np.ones_like(weights)
    read, unread = shade(weights, nothing, everything), shade(nothing, weights, nothing)
    grey_read, grey_unread = luminance(read[0]), luminance(unread[0])
    assert (np.diff(grey_read) < 0).all()
    assert (np.diff(grey_unread) < 0).all()
    assert (grey_unread - grey_read > 0.08).all()  # at equal weight
    assert (read[0, 5:, 2] > read[0, 5:, 0]).all()  # blue
    assert (unread[0, 5:, 0] > unread[0, 5:, 2]).all()  # red
    assert shade(nothing, nothing, np.full_like(weights, np.nan)).tolist() == np.ones((1, 50, 3)).tolist()
    grounds = luminance(shade(np.zeros((1, 3)), np.zeros((1, 3)), np.array([[0.0, 0.1, 1.0]]))[0])
    assert grounds[0] > grounds[1] > grounds[2]


def test_pictures_differ_between_policies(tiny_llama, tmp_path):
    llm, ids = make(tiny_llama, chunk=128), random_ids(300, seed=9)
    red, blue = {}, {}
    for policy in ("dense", "streaming(window=30)"):
        paths, seen = inspect(llm, ids, tmp_path / policy[:5], policy, max_tokens=9, pixels=64)
        assert [path.name for path in paths] == ["heads.csv", "layers_00-01.png", "layers_02.png"]
        assert set(seen.maps) == {(phase, layer) for phase in ("prefill", "decode") for layer in range(3)}
        pictures = [pixels(path) for path in paths[1:]]
        assert all(min(picture.shape[:2]) > 300 and picture.std() > 0.05 for picture in pictures)
        # The key at the foot shows both ramps in every picture.
        maps = [picture[: int(0.85 * len(picture))] for picture in pictures]
        red[policy] = np.mean([(part[..., 0] > part[..., 2] + 0.15).mean() for part in maps])
        blue[policy] = np.mean([(part[..., 2] > part[..., 0] + 0.1).mean() for part in maps])
    dense, window = red
    assert red[dense] < 0.001 < 0.05 < red[window]
    assert blue[dense] > blue[window] > 0.01


def test_chosen_layers(tiny_llama, tmp_path):
    paths, seen = inspect(make(tiny_llama), random_ids(40, seed=1), tmp_path, "dense", layers=[2, 0], max_tokens=1)
    assert [path.name for path in paths] == ["heads.csv", "layers_00_02.png"]
    assert set(seen.maps) == {("prefill", 0), ("prefill", 2)}


def test_numbers_are_written_without_matplotlib(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"saccade-llm\[figures\]"):
        paths, seen = inspect(make(tiny_llama), random_ids(40, seed=1), tmp_path, "dense", layers=[1], max_tokens=3)
    assert [path.name for path in paths] == ["heads.csv"]
    rows = list(csv.DictReader(paths[0].open(encoding="utf-8")))
    assert [(row["phase"], row["head"]) for row in rows] == [
        (p, str(h)) for p in ("prefill", "decode") for h in range(4)
    ]
    assert {float(row["density"]) for row in rows} == {1.0}
    assert float(rows[5]["retained_mass"]) == pytest.approx(float(seen.maps["decode", 1].mass[1]), abs=1e-6)


def test_bad_input(tiny_llama, tmp_path):
    llm = make(tiny_llama)
    with pytest.raises(SaccadeError, match="layers 0 to 2"):
        inspect(llm, [1, 2, 3], tmp_path, layers=[7])
    with pytest.raises(SaccadeError, match="pixels=3"):
        inspect(llm, [1, 2, 3], tmp_path, pixels=3)
    with pytest.raises(PolicyError, match="psa"):
        inspect(llm, [1, 2, 3], tmp_path, "pas")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SaccadeError, match="cannot be made"):
        inspect(llm, [1, 2, 3], file)


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "1-"])
def test_layers_that_cannot_be_read(text):
    with pytest.raises(SaccadeError, match="0,3-5"):
        parse_layers(text)


def test_layers_are_numbers_and_ranges():
    assert parse_layers(None) is None
    assert parse_layers("0, 3-5,4") == [0, 3, 4, 5, 4]


def test_the_command_draws_and_says_what_was_kept(capsys, tmp_path):
    from saccade.cli.main import main

    prompt = "The harbour master counted the boats. " * 12
    with pytest.raises(SystemExit) as exit_info:
        main(["inspect", prompt, "-p", "streaming(window=64)", "--layers", "3,7", "-o", str(tmp_path), "-n", "3"])
    out, err = capsys.readouterr()
    assert exit_info.value.code in (0, None), err
    assert str(tmp_path / "layers_03_07.png") in out
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in rows[0]] == ["layer", "phase", "heads", "density", "retained_mass", "lowest_head"]
    densities = {(cells[0].strip(), cells[1].strip()): float(cells[3]) for cells in rows[2:]}
    assert densities["3", "prefill"] == densities["7", "prefill"] < 0.5
    assert (tmp_path / "layers_03_07.png").stat().st_size > 10_000
    with pytest.raises(SystemExit) as exit_info:
        main(["inspect", "hello", "--layers", "0,x"])
    assert exit_info.value.code == 2
    assert "0,3-5" in capsys.readouterr().err


def test_promises_take_prompts_from_tasks(capsys, monkeypatch):
    from saccade.cli.main import main

    seen = []
    monkeypatch.setattr("saccade.eval.micro.promised_against_measured", lambda llm, prompts, **_: seen.extend(prompts))
    monkeypatch.setattr("saccade.eval.micro.text_table", lambda rows: "")
    with pytest.raises(SystemExit) as exit_info:
        main(["inspect", "--promises", "-t", "single", "-t", "vt", "--length", "300", "-m", "reference"])
    assert exit_info.value.code in (0, None)
    llm = LLM("reference")
    assert seen == [render(llm.tokenizer, [], make_task(task, 300, 0).turns[0]).ids for task in ("single", "vt")]
    with pytest.raises(SystemExit):
        main(["inspect", "-t", "single"])
    assert "--promises" in capsys.readouterr().err
