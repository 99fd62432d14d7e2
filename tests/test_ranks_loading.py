"""A rank reads, and holds, its part of the weight files alone."""

from __future__ import annotations

import json

import fork_server
import pytest
import torch
from tiny_models import make_checkpoint, one_thread  # noqa: F401
from transformers import AutoModelForCausalLM

from saccade.models.families import FAMILIES
from saccade.models.loader import load_model
from saccade.models.parts import Parts
from saccade.models.shards import Share

BIG = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 12288,
    "attention_bias": True,
}
LOADED = """
import json, sys
from saccade.machine import reset_peak, peak_bytes, resident_bytes
from saccade.models.loader import load_model
from saccade.models.shards import Share

folder, small, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
load_model(small, "float32")  # all that is imported, and kept of imports, is there
before = resident_bytes()
reset_peak()
share = None if ranks == 1 else Share(1, ranks, lambda: None)
model = load_model(folder, "float32", share=share)
print(json.dumps([peak_bytes() - before, resident_bytes() - before, model.weight_bytes]))
"""


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma", marks=pytest.mark.thorough)])
def test_memory_at_load(family, tmp_path):
    """Tied embeddings among it; beside its part a rank holds pieces of files that it has just read."""
    tied = {**BIG, "tie_word_embeddings": True}
    folder = make_checkpoint(family, tmp_path / "big", **tied)
    small = make_checkpoint(family, tmp_path / "small")
    bytes_of_all = (folder / "model.safetensors").stat().st_size
    found = {}
    for ranks in (1, 4):
        done = fork_server.run(["-c", LOADED, str(folder), str(small), str(ranks)])
        assert done.returncode == 0, done.stderr
        found[ranks] = json.loads(done.stdout.splitlines()[-1])
    assert found[1][0] > 0.9 * bytes_of_all
    peak, kept, weights = found[4]
    assert weights < 0.26 * bytes_of_all
    assert kept < 0.26 * bytes_of_all + (8 << 20)
    assert peak < 0.26 * bytes_of_all + (24 << 20)


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "gpt_oss"])
def test_ranks_hold_parts(family, tmp_path):
    """Alike, and together the model: norms, routers and some biases are in each."""
    folder = make_checkpoint(family, tmp_path, intermediate_size=64)
    whole = load_model(folder, "float32").weight_bytes
    held = [load_model(folder, "float32", share=Share(rank, 2, lambda: None)).weight_bytes for rank in (0, 1)]
    assert held[0] == pytest.approx(held[1], rel=0.01)
    assert whole <= sum(held) < 1.06 * whole


def test_what_is_cut_is_put_together_again(tmp_path):
    """Parts of all ranks, one after another, are the tensor, whatever is fused in it."""
    for family in ("phi3", "mixtral", "gpt_oss", "cohere", "granitemoe", "glm4"):
        folder = make_checkpoint(family, tmp_path / family)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ranks = [Parts(model, FAMILIES[family], Share(rank, 2, lambda: None), lambda *_: False) for rank in (0, 1)]
        cut = 0
        for name, whole in model.state_dict().items():
            cuts = [one.cut(name) for one in ranks]
            if cuts[0] is None:
                continue
            cut += 1
            axis = cuts[0].axis
            places = [place for one in cuts for span in one.spans for place in range(*span)]
            assert sorted(places) == list(range(whole.shape[axis])), name
            both = torch.cat([one.tensor(name, whole) for one in ranks], axis)
            assert torch.equal(both, whole.index_select(axis, torch.tensor(places))), name
        assert cut > 10
