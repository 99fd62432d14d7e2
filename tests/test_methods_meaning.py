"""What a method says of itself and what its options mean: as it acts, and alike on every device."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch
from helpers import Planted, brute_force, planted_heads
from method_matrix import MATRIX

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods import Chunk, Query, parse_method
from saccade.methods.registry import KNOWN
from saccade.ops import Call, run, triton

N = 480
DECODE = [
    *(case.type(**one) for case in MATRIX if "decode" in case.type.phases for one in (*case.sparse, case.dense or {})),
    *map(
        parse_method,
        (
            "lfps(k=40, least=1, blocks=0, probes=16)",
            "lfps(k=40, least=1, blocks=0, probes=16, epsilon=1)",
            "lfps(k=40, least=1, blocks=0, rest=none, epsilon=1)",
            "lfps(k=40, least=1, blocks=0, rest=none, epsilon=0.0, sinks=0)",
            "lfps(k=40, least=1, blocks=0, rest=none, epsilon=1.0)",
            "lfps(k=40, least=1, blocks=0, rest=none, epsilon=0.0, bypass=sink)",
            "lfps(k=40, least=1, blocks=0, rest=none, epsilon=0.0)",
            "lfps(k=40, least=1, blocks=0, rest=none, epsilon=0.0, bypass=mean)",
            "magicpig(dense_upto=0, dense_every=1)",
            "magicpig(dense_upto=0, dense_every=0, tables=40)",
            "vattention(epsilon=0)",
            "vattention(sinks=16, local=16, heavy=0.05, epsilon=0.5)",
            "psa(epsilon=0.3, tail=mean)",
            "psa(epsilon=0.3)",
        ),
    ),
]


@pytest.mark.parametrize("method", dict.fromkeys(DECODE), ids=lambda method: method.text)
def test_what_stands_in_is_said(method):
    """The log-sum-exp of a step is that of the keys that it read, unless something may stand for others."""
    q, k, v = planted_heads(4, 2, N, 32, 1, Planted(columns=(7, 101), slashes=(13,), blocks=(3,)), noise=0.4)
    view, state = KVView.from_tensors(k, v), None
    start = N - 1
    before = Chunk.of(q[:, :start], view.upto(start))
    past = method.watch(before) if method.watches else None
    tail = q[:, start - max(1, method.tail_rows) : start]
    state = method.begin(Chunk.of(tail, view.upto(start), past=past))
    query = Query.of(q[:, start:], view, states=[state])
    ran = run(Call.of(query.q, view, method.select_decode(query, state), threads=1))
    read = brute_force(query.q, k, v, ran.used.mask())[1]
    alike = torch.allclose(ran.lse.double(), read, atol=1e-4, rtol=1e-4)
    assert alike or method.stands_in
    if method.name == "lfps" and method.k == 40:
        assert alike != method.stands_in


def compared(part: type) -> set[tuple[str, str]]:
    """(option, text) of every comparison of an option with a text, in the modules that say what ``part`` does."""
    package = inspect.getmodule(part).__name__.removesuffix(".method")
    root = importlib.import_module(package)
    names = [package, *(f"{package}.{one.name}" for one in pkgutil.iter_modules(getattr(root, "__path__", [])))]
    names += [base.__module__ for base in part.__mro__ if base.__module__.startswith("saccade.methods")]
    found = set()
    for name in dict.fromkeys(names):
        path = importlib.util.find_spec(name).origin
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Attribute):
                continue
            if not isinstance(node.left.value, ast.Name) or node.left.value.id not in ("self", "method"):
                continue
            texts = [one.value for side in node.comparators for one in ast.walk(side) if isinstance(one, ast.Constant)]
            found |= {(node.left.attr, text) for text in texts if isinstance(text, str)}
    return found


def refusal(part: type, option: str, text: str) -> str | None:
    """Why the option cannot have that value at all; None where it can, with whatever else goes with it."""
    try:
        part(**{option: text})
    except PolicyError as error:
        return str(error) if f"{option}={text} is out of range" in str(error) else None
    return None


@pytest.mark.parametrize("part", KNOWN.values(), ids=KNOWN)
def test_options_are_compared_with_values_that_they_may_have(part):
    """A comparison with another value is one that cannot change its mind."""
    options = {one.name for one in part.__dataclass_fields__.values()}
    refused = [why for one in sorted(compared(part)) if one[0] in options and (why := refusal(part, *one)) is not None]
    assert not refused


class OnCuda(torch.Tensor):
    """A tensor of this machine that says it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    "method",
    [one for case in MATRIX if "prefill" in case.type.phases for one in (case.type(), *case.methods())],
    ids=lambda method: method.text,
)
def test_what_a_prefill_reads_is_alike_on_every_device(method, monkeypatch):
    """By the same arithmetic, and whatever kernels the device has: no option means another thing there."""
    if method.name == "flashprefill":
        pytest.skip("a GPU lists its blocks by a kernel, which this machine does not run")
    if method.calibration is not None:
        pytest.skip("needs a calibration")
    monkeypatch.setattr(triton, "available", lambda: False)
    for name in dir(triton):
        if name.startswith("serves"):
            monkeypatch.setattr(triton, name, lambda *given: "no kernels here")
    q, k, v = planted_heads(4, 2, 700, 32, 1, Planted(columns=(7, 101), slashes=(13,), blocks=(3,)), noise=0.4)
    here, there = (
        method.select_prefill(Chunk.of(of(q), KVView.from_tensors(of(k), of(v))))
        for of in (lambda one: one, lambda one: one.as_subclass(OnCuda))
    )
    assert type(here) is type(there)
    assert torch.equal(here.mask().as_subclass(torch.Tensor), there.mask().as_subclass(torch.Tensor))


def test_a_device_of_another_size_resolves_no_option_of_a_method():
    """``auto`` alone measures the machine, and its report says what it chose."""
    sources = [Path(importlib.util.find_spec(one.__module__).origin) for one in KNOWN.values()]
    for path in dict.fromkeys(sources):
        text = path.read_text(encoding="utf-8")
        for word in ("get_device_capability", "on_hopper", "multi_processor_count", "get_device_properties"):
            assert word not in text, f"{path.name} asks for the device's {word}"
