"""The families that docs/adding-a-family.md adds: their two lines, as they are printed there, make them run."""

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
LINES = re.findall(r"```text\n(.*?)\n```", (ROOT / "docs/adding-a-family.md").read_text(), re.DOTALL)
PAIRS = list(zip(LINES[::2], LINES[1::2], strict=True))


@pytest.mark.parametrize(("row", "config"), PAIRS)
def test_the_lines_are_those_of_the_tree(row, config):
    for file, line in (("saccade/models/families.py", row), ("tests/tiny_models.py", config)):
        assert f"    {line}\n" in (ROOT / file).read_text()


@pytest.mark.parametrize(("row", "config"), PAIRS)
def test_two_lines_are_all_it_takes(tmp_path, monkeypatch, row, config):
    """Without them it is refused by name; with them logits, chunks and tokens are transformers'."""
    name = re.match(r'"(\w+)"', config)[1]
    monkeypatch.delitem(families.FAMILIES, name)
    monkeypatch.delitem(tiny_models.CONFIGS, name)
    tiny_models.CONFIGS.update(eval(f"{{{config}}}", vars(tiny_models)))
    folder = make_checkpoint(name, tmp_path / name)
    with pytest.raises(ModelError, match=f"'{name}' is not supported; supported: |{name}.*keep a state"):
        load_model(folder)
    (family,) = eval(f"[{row}]", vars(families))
    families.FAMILIES[name] = family
    ours, theirs, ids = load_model(folder), oracle(folder), random_ids(30, seed=1)
    assert (ours.runner.llama is not None) == (family.llama_shape is not None)
    assert ours.spec.windows == {"cwm": (7, None, 7), "lfm2": (None,)}[name]
    logits = run_packed(ours.runner, DenseStore(), {"a": ids})["a"]
    torch.testing.assert_close(logits, oracle_logits(theirs, ids), rtol=1e-4, atol=1e-4)
    prompts = {"a": ids, "b": ids[:5]}
    got = greedy(ours.runner, DenseStore(), prompts, count=8, eos=ours.eos_token_ids)
    expected = {one: oracle_greedy(theirs, prompt, 8) for one, prompt in prompts.items()}
    assert got == expected
    with LLM(folder, kv_memory="4MiB", prefill_chunk=8, block_size=16) as llm:
        answer = llm.generate(ids, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids
    assert answer == expected["a"]
