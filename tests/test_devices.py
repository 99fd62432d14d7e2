"""What selections, methods and ops make of tensors lies where their inputs lie, whatever torch's default device is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from helpers import Planted, planted_heads
from method_matrix import MATRIX

import saccade
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Method, Query
from saccade.ops import Call, cpu, run
from saccade.selection import Band, Candidates, Cone, Dense, Shape, Tri, cut, without

ROOT = Path(saccade.__file__).parent
ROOMS = ("selection", "methods", "ops", "kv")
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"scalar_tensor", "tensor", "zeros"}
# Files of bindings: their kernels read and write host memory, and their callers have asked serves(...) before.
HOST_ONLY = ("ops/cpu.py", "ops/cpu_*.py", "ops/layer_rows.py", "ops/step_ops.py", "methods/*/cpu.py")
META, CPU = torch.device("meta"), torch.device("cpu")


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def named(call: ast.Call) -> str:
    return ast.unparse(call.func)


def test_every_new_tensor_names_its_device():
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if any(path.relative_to(ROOT).match(pattern) for pattern in HOST_ONLY):
                continue
            for call in calls(path):
                makes = named(call).startswith("torch.") and named(call).removeprefix("torch.") in FACTORIES
                if makes and all(given.arg != "device" for given in call.keywords):
                    found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}")
    assert found == []


def test_every_shape_made_of_a_call_says_where_it_lies():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for call in calls(path):
            needed = {"Shape": 6, "Shape.suffix": 5}.get(named(call))
            if needed and len(call.args) < needed and all(given.arg != "device" for given in call.keywords):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}")
    # The C++ kernel that is given this one makes nothing of it.
    assert [place for place in found if not place.startswith("methods/lfps/cpu.py")] == []


def test_no_code_depends_on_an_ambient_device():
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for room in (*ROOMS, "engine")
        for path in sorted((ROOT / room).rglob("*.py"))
        for call in calls(path)
        if named(call) in ("torch.get_default_device", "torch.set_default_device")
    ]
    assert found == []


@pytest.mark.parametrize("q_len", [1, 7])
def test_a_shape_carries_its_device_into_what_is_made_of_it(q_len):
    here, there = (Shape.suffix(4, 2, q_len, 40, device) for device in (CPU, META))
    assert here == there  # what a call means does not depend on where it runs
    assert here.to(META).device == META
    assert here.to(CPU) is here
    cone = Cone(share=0.5, sinks=2, local=3, block_size=1)
    made = [there.rows, there.causal_mask(), cone.row_mask(there, 0, q_len)]
    for selection in (Dense(there), Band(there, 5, 2), Tri(there, 5, 2, 1), Dense(here).to(META)):
        made.append(selection.row_mask(0, 0, q_len))
    made += [Band(there, 5, 2).unit_pairs(), Tri(there, 5, 2, 1).unit_pairs()]
    every = Candidates.all_keys(Shape.suffix(4, 2, 1, 40, META), 2, 5, 1, 2)
    made += [every.offsets, every.indices, every.k, every.full]
    assert [tensor.device for tensor in made] == [META] * len(made)


def test_a_selection_moves_with_its_shape():
    selection = cut(Candidates.all_keys(Shape.suffix(4, 2, 1, 40), 2, 5, 1, 2), Cone(0.5, 2, 3))
    moved = selection.to(META)
    assert moved.shape.device == moved.k.device == moved.offsets.device == META
    assert selection.to(CPU) is selection
    narrowed = without(Band(Shape.suffix(4, 2, 7, 40), 30), torch.arange(33)[None] == 20)
    assert narrowed.to(META).shape.device == META


def decoded(method: Method, q: torch.Tensor, view: KVView, steps: int) -> list[torch.Tensor]:
    """What ``steps`` decode steps at the end of ``view`` read, and what it gave."""
    n = view.length
    start = n - steps
    before = Chunk.of(q[:, :start], view.upto(start))
    past = method.watch(before) if method.watches else None
    tail = q[:, start - max(1, method.tail_rows) : start]
    state = method.begin(Chunk.of(tail, view.upto(start), past=past, states=[]))
    out = []
    for step in range(steps):
        row = q[:, start + step : start + step + 1]
        query = Query.of(row, view.upto(start + step + 1), step=step, states=[state])
        selection = method.select_decode(query, state)
        done = run(Call.of(row, query.kv, selection, want_weights=method.wants_weights))
        method.observe(query, done.used, done.weights, state)
        out += [done.out, done.used.unit_pairs()]
    return out


@pytest.mark.parametrize(
    "method", [method for case in MATRIX for method in case.methods() if case.name != "auto"], ids=lambda m: m.text
)
def test_methods_do_not_follow_the_default_device(method, monkeypatch):
    """On plain torch, which is what runs on a GPU where there is no kernel, under a default device that nothing can
    compute on: a tensor that forgot its device would be there, and an operation on it and on others would fail."""
    monkeypatch.setattr(cpu, "native", None)
    n, rows = 330, 9
    q, k, v = planted_heads(4, 2, n, 16, 0, Planted(columns=(7, 101), slashes=(13,), blocks=(3,)))
    view = KVView.from_tensors(k, v)

    def ran() -> list[torch.Tensor]:
        out = []
        if "prefill" in method.phases:
            selection = method.select_prefill(Chunk.of(q[:, -200:], view))
            out += [*run(Call.of(q[:, -200:], view, selection))[:2], selection.unit_pairs()]
        if "decode" in method.phases:
            out += decoded(method, q, view, rows)
        return out

    expected = ran()
    with META:
        got = ran()
    assert expected
    for one, other in zip(got, expected, strict=True):
        assert one.device == CPU
        assert torch.equal(one, other)
