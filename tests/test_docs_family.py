"""The family that docs/adding-a-family.md adds: its two lines, as they are printed there, make it run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_models
import torch
from dense_store import DenseStore, greedy, run_packed
from tiny_models import make_checkpoint, one_thread, oracle, oracle_greedy, oracle_logits, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.errors import ModelError
from saccade.models import families, load_model

ROOT = Path(__file__).parent.parent
ROW, CONFIG = re.findall(r"```text\n(.*?)\n```", (ROOT / "docs/adding-a-family.md").read_text(), re.DOTALL)


def test_the_lines_are_those_of_the_tree():
    for file, line in (("saccade/models/families.py", ROW), ("tests/tiny_models.py", CONFIG)):
        assert f"    {line}\n" in (ROOT / file).read_text()


def test_two_lines_are_all_it_takes(tmp_path, monkeypatch):
    """Without them it is refused by name; with them logits, chunks and tokens are transformers'."""
    name = re.match(r'"(\w+)"', CONFIG)[1]
    monkeypatch.delitem(families.FAMILIES, name)
    monkeypatch.delitem(tiny_models.CONFIGS, name)
    tiny_models.CONFIGS.update(eval(f"{{{CONFIG}}}", vars(tiny_models)))
    folder = make_checkpoint(name, tmp_path / name)
    with pytest.raises(ModelError, match=f"'{name}' is not supported; supported: "):
        load_model(folder)
    (family,) = eval(f"[{ROW}]", vars(families))
    families.FAMILIES[name] = family
    ours, theirs, ids = load_model(folder), oracle(folder), random_ids(30, seed=1)
    assert ours.runner.llama is not None
    assert ours.spec.windows == (7, None, 7)
    logits = run_packed(ours.runner, DenseStore(), {"a": ids})["a"]
    torch.testing.assert_close(logits, oracle_logits(theirs, ids), rtol=2e-5, atol=2e-5)
    prompts = {"a": ids, "b": ids[:5]}
    got = greedy(ours.runner, DenseStore(), prompts, count=8, eos=ours.eos_token_ids)
    expected = {one: oracle_greedy(theirs, prompt, 8) for one, prompt in prompts.items()}
    assert got == expected
    with LLM(folder, kv_memory="4MiB", prefill_chunk=8, block_size=16) as llm:
        answer = llm.generate(ids, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids
    assert answer == expected["a"]
