"""The training recipe: rows of exact length, positions that skip at line breaks, runs that resume exactly."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from saccade.eval.suite.filler import NEWLINE, prose
from saccade.eval.suite.rng import Rng
from saccade.models.reference import vocabulary as v
from train import data, reference
from train.model import SIZES, Model


@pytest.mark.parametrize("task", data.MIX)
@pytest.mark.parametrize("length", [256, 1024])
def test_rows_have_the_length_and_teach_the_replies(task: str, length: int) -> None:
    for index in range(5):
        row = data.make_row(Rng("t", task, length, index), task, length, prose("t"))
        assert row.ids.shape == row.kinds.shape == (length,)
        assert row.ids[0] == v.BOS
        assert row.ids[-1] == v.END
        assert row.kinds[-1] == 2
        replies = np.flatnonzero(row.ids == v.ASSISTANT)
        assert len(replies) >= 1
        for start in replies:  # from the token after the role to the end of the message
            stop = start + 1 + int(np.flatnonzero(row.ids[start + 1 :] == v.END)[0])
            assert (row.kinds[start + 1 : stop + 1] == 2).all()
            assert row.kinds[start] == 1


def test_a_row_too_short_for_its_task_is_an_error() -> None:
    with pytest.raises(ValueError, match="'three_turn' does not fit into rows of 64 tokens"):
        data.make_row(Rng("t"), "three_turn", 64, prose("t"))


def test_positions_skip_at_line_breaks_only() -> None:
    batch = data.make_batch(("p", 1), 512, ["multikey"] * 16, span=8192)
    assert batch["positions"].max() < 8192
    steps = np.diff(batch["positions"], axis=1)
    assert (steps >= 1).all()
    rows, columns = np.nonzero(steps > 1)
    assert len(rows) > 8
    assert (batch["ids"][rows, columns + 1] == NEWLINE).all()
    plain = data.make_batch(("p", 1), 512, ["multikey"] * 4)["positions"]
    assert (plain == np.arange(512)).all()


def test_a_batch_is_a_function_of_its_key() -> None:
    one, same, other = (data.make_batch(("k", key), 256, ["vt", "single"]) for key in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in ("ids", "kinds", "positions"))
    assert not np.array_equal(one["ids"], other["ids"])


def test_answers_are_counted_whole() -> None:
    ids = np.array([[5, 6, 7, 8, 9, 10]], dtype=np.uint16)
    batch = {"ids": ids, "kinds": np.array([[0, 2, 2, 0, 2, 2]], dtype=np.uint8), "tasks": ["vt"]}
    foretold = np.array([[6, 7, 0, 9, 10, 0]])  # the prediction of the next token at each place
    assert reference.right_answers(batch, foretold) == {"vt": [2, 2]}
    foretold[0, 4] = 11
    assert reference.right_answers(batch, foretold) == {"vt": [1, 2]}


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_model_is_the_exported_one(tmp_path: Path, hybrid: bool) -> None:
    from train.export import export
    from train.hybrid import Hybrid
    from train.hybrid import export as export_hybrid

    torch.manual_seed(0)
    made, written = (Hybrid, export_hybrid) if hybrid else (Model, export)
    model = made(SIZES["XS"], compiled=False)
    written(model.state_dict(), model.shape, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = data.make_batch(("e",), 256, ["vt", "words"])
    ids, positions, targets, weights = reference.tensors(batch, "cpu")
    with torch.no_grad():
        ours, best = model(ids, positions, targets, weights)
        logits = loaded(ids).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    theirs = (losses * weights.flatten()).sum() / weights.sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=2e-2)
    assert (best == logits.argmax(-1)).float().mean() > 0.9


def test_a_paced_run_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    run = reference.Run.__new__(reference.Run)
    run.options = argparse.Namespace(paced=True, minutes=2.0, decay=0.25)
    run.peak, run.step = 2.0, 10_000
    said = []
    for seconds in (0, 30, 60, 89, 105, 120, 130):
        monkeypatch.setattr(run, "clock", lambda seconds=seconds: float(seconds))
        said.append((reference.CURRICULUM.index(run._stage(run.step)), run.rate()))
    assert [stage for stage, _ in said] == [0, 1, 2, 3, 4, 4, 4]
    assert [rate for _, rate in said] == pytest.approx([2.0, 2.0, 2.0, 2.0, 1.0, 0.0, 0.0])


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = (
        reference.Stage(((256, 1.0),), 4 * 512 / 1e6),
        reference.Stage(((256, 0.5), (512, 0.5)), 2 * 512 / 1e6, 1024),
    )
    monkeypatch.setattr(reference, "CURRICULUM", stages)
    monkeypatch.setattr(reference, "VALIDATE", (256,))
    monkeypatch.setattr(reference, "DELAY", 2)

    def run(folder: Path, **changes: float) -> dict[str, torch.Tensor]:
        options = {
            "size": "XS", "out": folder, "seed": 1, "optimizer": "muon", "rate": 2e-3, "batch": 512, "scale": 1.0,
            "decay": 0.25, "every": 2, "longest": 256, "minutes": 1e9, "workers": 1, "device": "cpu", "hybrid": False,
            "paced": False,
        }  # fmt: skip
        training = reference.Run(argparse.Namespace(**{**options, **changes}))
        training.train()
        return training.model.state_dict()

    whole = run(tmp_path / "whole")
    first = reference.Run.order

    def cut(self: reference.Run, step: int) -> tuple | None:
        if self.step >= 3:
            raise KeyboardInterrupt
        return first(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(reference.Run, "order", cut)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut")
    assert torch.load(tmp_path / "cut" / "state.pt", weights_only=True)["step"] == 2
    resumed = run(tmp_path / "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
