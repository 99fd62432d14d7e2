"""benchmarks/other_checkpoints.py: what it makes loads, and answers otherwise than what it was made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from drift_texts import TEXT
from tiny_models import make_checkpoint, random_ids

from saccade import LLM
from saccade.eval.drift.measure import run
from saccade.methods.policy import Policy
from saccade.passage import Passage

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import other_checkpoints


def logits(folder: Path, lora: Path | None = None) -> torch.Tensor:
    with LLM(folder, dtype="float32", kv_memory="16MiB", lora=lora) as llm:
        return run(llm, Passage(tuple(random_ids(201, seed=3)), 196), Policy(), weights=False)[0]


@pytest.mark.parametrize("kind", ["yarn", "linear", "flat", "sharp", "lora", "trained"])
def test_each_is_another_model(tmp_path, monkeypatch, kind):
    source = make_checkpoint("llama", tmp_path / "source", max_position_embeddings=256)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = tmp_path / "out"
    asked = [kind, str(source), str(out), "--text", str(text), "--steps", "2", "--length", "40"]
    monkeypatch.setattr(sys, "argv", ["other_checkpoints.py", *asked])
    other_checkpoints.main()
    own = logits(source, out) if kind == "lora" else logits(out)
    assert own.isfinite().all()
    assert (own - logits(source)).abs().max() > 1e-2
