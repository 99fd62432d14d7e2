"""lm-eval's own ``hf`` model with saccade's attention, on long tasks that nothing is downloaded for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
LENGTH, COUNT, TASKS = 3000, 2, ("niah_multikey_2", "vt")


def written(model: Path, folder: Path) -> Path:
    spec = importlib.util.spec_from_file_location("lm_eval_ruler", ROOT / "benchmarks" / "lm_eval_ruler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(model), str(folder), "--length", str(LENGTH), "--count", str(COUNT), "--tasks", ",".join(TASKS)])
    return folder


def evaluated(model: Path, tasks: Path, out: Path, *before: str) -> tuple[dict[str, list[str]], str]:
    """(answers by task, what was said besides)."""
    command = [sys.executable, *(before or ("-m", "lm_eval")), "--model", "hf", "--include_path", str(tasks)]
    command += ["--model_args", f"pretrained={model},dtype=float32,max_length=4096", "--tasks", f"ruler_{LENGTH}"]
    command += ["--output_path", str(out), "--log_samples", "--device", "cpu"]
    env = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "home")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for file in sorted(out.rglob("samples_*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(0 <= record["said"] <= 1 for record in records)
        found[file.name.split("_2")[0]] = [record["resps"][0][0] for record in records]
    return found, done.stderr


def test_tasks_are_as_long_as_asked(tmp_path):
    model = tmp_path / "model"
    make_checkpoint("llama", model, max_position_embeddings=4096)
    folder = written(model, tmp_path / "tasks")
    for task in TASKS:
        records = [json.loads(line) for line in (folder / f"{task}_{LENGTH}.jsonl").read_text().splitlines()]
        assert len(records) == COUNT
        for record in records:  # the tokenizer's tokens are bytes
            assert 0.8 * LENGTH < len(record["text"].encode()) <= LENGTH
            assert all(answer in record["text"] for answer in record["answers"])


@pytest.mark.thorough
def test_hf_answers_as_under_sdpa_where_attention_is_dense_and_otherwise_where_it_is_sparse(tmp_path):
    for package in ("lm_eval", "accelerate"):
        pytest.importorskip(package, reason="lm-eval is not installed; pip install 'lm-eval[hf]'")
    model = tmp_path / "model"
    make_checkpoint("llama", model, max_position_embeddings=4096)
    tasks = written(model, tmp_path / "tasks")
    theirs, _ = evaluated(model, tasks, tmp_path / "sdpa")
    ours = ("-m", "saccade.transformers", "--policy")
    dense, said = evaluated(model, tasks, tmp_path / "dense", *ours, "dense", "lm_eval")
    assert len(theirs) == len(TASKS)
    assert dense == theirs
    assert "does not attend by saccade" not in said
    sparse, _ = evaluated(model, tasks, tmp_path / "sparse", *ours, "streaming(sinks=2, window=32)", "lm_eval")
    assert sparse != theirs
    assert [len(answers) for answers in sparse.values()] == [COUNT] * len(TASKS)
