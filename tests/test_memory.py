"""What a process takes beside weights, keys and values, and what states of methods keep alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.engine.steps.step import CallCount
from saccade.kv.view import KVView
from saccade.machine import forget_file_pages
from saccade.methods import Chunk, Policy
from saccade.methods.base import Cost
from saccade.methods.registry import KNOWN
from saccade.methods.state import MethodState
from saccade.models.baseline import save_random_llama
from saccade.selection import Shape, Tokens

SCRIPT = Path(__file__).parents[1] / "tools" / "peak_memory.py"
MODEL = {
    **{"hidden_size": 288, "intermediate_size": 576, "num_hidden_layers": 4, "vocab_size": 512},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 4096},
}
POLICIES = ("topp(prefill=true)", "magicpig(tables=40)", "flexprefill(gamma=0.9)+lfps", "random(k=0.5)", "dense")


def test_a_process_takes_what_it_says(tmp_path):
    """Several policies in one process, prompts of two lengths, four times over.

    What the first requests leave (code loaded, the C library's arenas) varies by MiB from run to run, and no more comes
    once every policy has run twice; what a request would leave behind comes with each of the last twenty.
    """
    folder = save_random_llama(tmp_path / "model", **MODEL)
    asked = [word for policy in (*POLICIES, *reversed(POLICIES)) * 2 for word in ("--policy", policy)]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "--kv-memory", "16MiB", "--tokens", "400,100", *asked],
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "SACCADE_DEBUG"},  # whose checks take memory
    )
    assert ran.returncode == 0, ran.stderr
    loading, *found = map(json.loads, ran.stdout.splitlines())
    assert loading["loading"] <= 100
    assert len(found) == 4 * len(POLICIES)
    for one in found:  # a model so small leaves more than half of the 300 MiB
        assert one["beyond"] <= 130, found
    grown = found[-1]["after"] - found[2 * len(POLICIES) - 1]["after"]
    assert grown <= 8, f"20 requests left {grown} MiB behind: {found}"


def test_counts_of_a_prefill_keep_no_lists():
    shape = Shape.suffix(4, 2, 30, 70)
    read = Tokens.from_mask(shape, torch.rand(4, 30, 70, generator=torch.Generator().manual_seed(1)) < 0.3)
    kept = CallCount.of(0, read, Cost(), "reference").used
    assert torch.equal(kept.pairs, read.pairs())
    assert kept.shape == shape
    assert kept.kind is Tokens
    assert not any(isinstance(part, torch.Tensor) and part.numel() > 4 for part in vars(kept).values())


def test_pages_of_a_file_are_let_go_and_come_back(tmp_path):
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.arange(1 << 20, dtype=torch.float32)}, tmp_path / "one.safetensors")
    mapped, own = load_file(tmp_path / "one.safetensors")["weight"], torch.arange(1 << 20, dtype=torch.float32)
    for tensor in (mapped, own):  # memory that is no file's stays as it is
        forget_file_pages(tensor)
        assert torch.equal(tensor, torch.arange(1 << 20, dtype=torch.float32))


def held(value: Any) -> int:
    """Bytes of all storages that a state keeps alive."""
    found: dict[int, int] = {}

    def visit(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            visit(list(one.values()))
        elif isinstance(one, (list, tuple)):
            for part in one:
                visit(part)
        elif isinstance(one, MethodState):
            visit(vars(one))

    visit(value)
    return sum(found.values())


@pytest.mark.parametrize(
    "text",
    [
        *(name for name, part in KNOWN.items() if "decode" in part.phases and name not in ("auto", "lossless")),
        "vattention(certify=true)",
        "topk(prefill=true)",
    ],
)
def test_states_take_a_seventh_of_the_keys_or_their_method_says_so(text):
    options = {
        "infinigen": "skew=off, query=own, dense_layers=0",
        "hshare": "source=prompt",
        "magicpig": "dense_every=0",
    }
    options |= {"double_sparsity": "source=prompt, dense_layers=0", "twilight": "dense_layers=0"}
    method = Policy.parse(f"decode={text}({options[text]})" if text in options else f"decode={text}").decode
    n, rng = 4096, torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, n, 64, generator=rng).bfloat16() for heads in (9, 3, 3))
    view = KVView.from_tensors(k, v)
    past = method.watch(Chunk.of(q, view)) if method.watches else None
    state = method.begin(Chunk.of(q[:, n - max(1, method.tail_rows) :], view, past=past))
    share = held(state) / (k.nbytes + v.nbytes)
    assert share <= 1 / 7 or method.extra_memory is not None
    if method.name == "magicpig":  # tables, and where each code's keys begin
        assert held(state) <= 3 * method.tables * 4 * (n + 2**method.bits + 1) + (1 << 16)
