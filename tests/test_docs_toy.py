"""The method that docs/adding-a-method.md adds: its four places as they are printed there, on the host and in steps of
the device backend."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Sequences, reference
from helpers import phases_and_rows, planted_heads, run_method
from method_matrix import MethodCase
from tiny_models import make_checkpoint

from saccade.engine.device.backend import DeviceBackend
from saccade.kv.view import KVView
from saccade.methods import registry
from saccade.methods.policy import Policy
from saccade.methods.registry import KNOWN
from saccade.models.loader import load_model
from saccade.ops import attend

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/adding-a-method.md").read_text()
PLACES = re.findall(r"```(?:python|markdown)\n(.*?)```", PAGE.partition("## 1. The file")[2], re.DOTALL)


@pytest.fixture(scope="module")
def toy():
    """The registry's entry for the method, after its file and its line were added; forgotten afterwards."""
    name = "saccade.methods.bookends"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(PLACES[0], "bookends.py", "exec"), module.__dict__)
    source = Path(registry.__file__).read_text()
    imported, entry = PLACES[1].splitlines()
    source = source.replace("\nMETHODS:", f"\n{imported}\n\nMETHODS:", 1)
    source = source.replace("    for method in (\n", f"    for method in (\n{entry}\n", 1)
    made = {"__name__": "registry"}
    exec(compile(source, "registry.py", "exec"), made)
    method = made["METHODS"]["bookends"]
    registry.METHODS["bookends"] = KNOWN["bookends"] = method
    yield method
    del registry.METHODS["bookends"], KNOWN["bookends"], sys.modules[name]


def test_it_takes_four_places_and_few_lines():
    assert len(PLACES) == 4
    assert sum(len(place.splitlines()) for place in PLACES) <= 120


def test_its_row_of_the_matrix_holds(toy):
    case = eval(PLACES[2].strip().removesuffix(","), {"MethodCase": MethodCase})
    assert case.type is toy
    for n in (1, 255, 449, 700):
        q, k, v = planted_heads(4, 2, n, seed=n)
        view = KVView.from_tensors(k, v, shuffle_seed=n)
        expected, _ = attend(q[:, -1:], view, backend="reference")
        settings = [case.type(**case.dense), case.type(**case.budget(n)), *case.methods()]
        for number, method in enumerate(settings):
            assert phases_and_rows(method) == [("decode", 1)]
            out, _, read = run_method(method, "decode", q, view, 1)
            if number < 2:
                torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            elif n == 700:
                assert read.density() < 0.7


def test_its_row_of_the_documentation_fits_the_table(toy):
    header = next(line for line in (ROOT / "docs/methods.md").read_text().splitlines() if line.startswith("| method |"))
    row = PLACES[3].strip()
    assert row.count("|") == header.count("|")
    options = ", ".join(f"{name}={getattr(toy(), name)}" for name in ("ends", "best", "block_size"))
    assert f"`{options}`" in row


def test_the_host_and_the_device_read_the_same(toy, tmp_path):
    folder = make_checkpoint(
        "llama", tmp_path / "llama", max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )
    runner = load_model(folder).runner
    policies = ["bookends(best=1)", "bookends(best=2)", "bookends(best=4)"]
    ours, theirs = (Sequences(runner, policies, [190, 222, 159]) for _ in range(2))
    device, step = DeviceBackend(runner), ours.step()
    assert [device.serves(step, row, ours.memories[row]) for row in range(3)] == [None] * 3
    results = device.run(step, ours.memories)
    logits, context = reference(theirs)
    torch.testing.assert_close(torch.cat([results[100 + row].logits for row in range(3)]), logits, atol=2e-4, rtol=1e-4)
    for row in range(3):
        (late,) = results[100 + row].late.values()
        for layer, counts in late.take().layers.items():
            assert counts.shares()[0] == context.stats[row, layer].shares()[0]
    assert Policy.parse(policies[0]).decode == toy(best=1)
