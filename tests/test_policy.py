"""Policy text: what is written is what runs, and what is wrong is named."""

from __future__ import annotations

import ast
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from method_matrix import MATRIX

from saccade.errors import PolicyError
from saccade.methods.dense import DenseMethod
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.policy import Policy, parse_method
from saccade.methods.psa import PSA
from saccade.methods.registry import KNOWN, METHODS, PRESETS
from saccade.methods.streaming import Streaming
from saccade.methods.topk import TopK

ALL = [method for case in MATRIX for method in case.methods()]
PREFILL = [method for method in ALL if "prefill" in method.phases]
DECODE = [method for method in ALL if "decode" in method.phases]


# What a text looks like hangs on the phases that both know and on whether they are the same or dense: each method once,
# and every kind of pair.
KINDS = [*{method.phases: method for method in ALL}.values(), DenseMethod()]
PAIRS = [
    *covering([PREFILL, DECODE], strength=1),
    *((one, other) for one in KINDS for other in KINDS if "prefill" in one.phases and "decode" in other.phases),
    *((method, method) for method in PREFILL if method in DECODE),
]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=lambda method: method.text)
def test_text_round_trips(prefill, decode):
    policy = Policy(prefill, decode)
    again = Policy.parse(policy.text)
    assert again == policy
    assert again.text == policy.text == str(policy)
    assert Policy.parse({"prefill": prefill.text, "decode": decode.text}) == policy
    assert Policy.parse({"prefill": prefill, "decode": decode}) == policy


@given(
    epsilon=st.floats(0, 1),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    microbatch=st.integers(1, 10**6),
    unit=st.sampled_from(["kv_head", "layer"]),
    k=st.one_of(st.integers(1, 10**9), st.floats(0, 1, exclude_min=True, exclude_max=True)),
)
def test_any_value_survives_the_text(epsilon, block_size, microbatch, unit, k):
    for method in (PSA(epsilon, block_size, microbatch, unit), TopK(k=k)):
        assert parse_method(method.text) == method
        assert Policy.parse(f" {method.text} ").decode == method


def test_one_thread_at_a_time_parses(monkeypatch):
    """Python 3.11's parser ended one of several with "AST constructor recursion depth mismatch"."""
    real, inside, most = ast.parse, [], []

    def parse(*args, **options):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        tree = real(*args, **options)
        inside.pop()
        return tree

    monkeypatch.setattr(ast, "parse", parse)
    with ThreadPoolExecutor(4) as threads:
        read = list(threads.map(Policy.parse, ["topk(k=3)"] * 8))
    assert set(read) == {Policy(decode=TopK(k=3))}
    assert max(most) == 1


def test_every_method_name_is_a_policy():
    for name, method in METHODS.items():
        policy = Policy.parse(name)
        for phase in ("prefill", "decode"):
            expected = method() if phase in method.phases else DenseMethod()
            assert getattr(policy, phase) == expected


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("flexprefill+psa(epsilon=0.98)", FlexPrefill(), PSA(epsilon=0.98)),
        (" psa ( epsilon = 0.98 , unit = layer ) + flexprefill ", FlexPrefill(), PSA(epsilon=0.98, unit="layer")),
        ("streaming", Streaming(), Streaming()),
        ("streaming+psa", Streaming(), PSA()),
        ("psa+streaming(window=8)", Streaming(window=8), PSA()),
        ("streaming+flexprefill", FlexPrefill(), Streaming()),
        ("streaming+streaming(window=8)", Streaming(), Streaming(window=8)),
        ("dense+psa", DenseMethod(), PSA()),
        ("prefill=streaming, decode=psa(block_size=16, epsilon=.5)", Streaming(), PSA(epsilon=0.5, block_size=16)),
        ("decode=psa; prefill=flexprefill(max_budget=none)", FlexPrefill(), PSA()),
        ("prefill=streaming", Streaming(), DenseMethod()),
        ("topk(k=0.1, prefill=true)", TopK(k=0.1, prefill=True), TopK(k=0.1, prefill=True)),
        ("flexprefill+topk(k=9,prefill=True)", FlexPrefill(), TopK(k=9, prefill=True)),
        ("psa(unit='layer')", DenseMethod(), PSA(unit="layer")),
        ("psa()", DenseMethod(), PSA()),
        ("flexprefill(gamma=9e-1)", FlexPrefill(gamma=0.9), DenseMethod()),
    ],
)
def test_reading(text, prefill, decode):
    assert Policy.parse(text) == Policy(prefill, decode)


def test_other_forms():
    assert Policy.parse(None) == Policy() == Policy.parse("dense")
    policy = Policy.parse("psa")
    assert Policy.parse(policy) is policy
    assert Policy.parse(PSA()) == policy
    assert Policy.parse(Streaming()) == Policy(Streaming(), Streaming())
    assert Policy.parse({"decode": "psa"}) == policy
    assert Policy.parse({"prefill": None, "decode": PSA()}) == policy


NAMES = {*KNOWN, *PRESETS}
WRONG = {
    "pas": ["unknown method 'pas'", "did you mean 'psa'", "known: " + ", ".join(sorted(NAMES))],
    "psa(epsilonn=1)": ["no option 'epsilonn'", "did you mean 'epsilon'", "block_size, epsilon, margin, microbatch"],
    "dense(x=1)": ["no option 'x'", "known: none"],
    "psa(epsilon=2)": ["epsilon=2", "from 0.0 to 1.0", "psa(epsilon=2)"],
    "psa(epsilon=nan)": ["epsilon=nan"],
    "psa(epsilon=1e999)": ["epsilon=inf"],
    "psa(block_size=32.0)": ["block_size=32.0", "8, 16, 32, 64, 128"],
    "psa(epsilon=0.5": ["bracket"],
    "psa)": ["psa)"],
    "psa(epsilon=0.5))": ["psa(epsilon=0.5))"],
    "psa(epsilon=0.5)(epsilon=0.9)": ["psa(epsilon=0.5)(epsilon=0.9)"],
    "psa(epsilon=0.5).x(epsilon=0.9)": ["psa(epsilon=0.5).x(epsilon=0.9)"],
    "psa(0.5)": ["name=value"],
    "psa(**{'epsilon': 0.5})": ["name=value"],
    "psa(epsilon=0.5, epsilon=0.6)": ["psa(epsilon=0.5, epsilon=0.6)"],
    "psa(epsilon=[1])": ["'epsilon' must be a number"],
    "psa(epsilon=open('f'))": ["'epsilon' must be a number"],
    "psa(epsilon=\0)": ["psa(epsilon="],
    "psa(epsilon=" + "(" * 300 + "1" + ")" * 300 + ")": ["psa(epsilon="],
    "psa(epsilon=" + "-" * 50_000 + "1)": ["psa(epsilon="],
    "psa(epsilon=0.5 0.6)": ["cannot be read"],
    "psa+": ["empty part"],
    "+psa": ["empty part"],
    "psa++flexprefill": ["empty part"],
    "psa+topk": ["nothing is left for 'topk'", "decode is taken by 'psa'"],
    "flexprefill+psa+streaming": ["nothing is left for 'streaming'"],
    "prefill=psa": ["'psa' does not select in prefill, only in decode"],
    "decode=flexprefill": ["'flexprefill' does not select in decode"],
    "prefill=dense, prefill=streaming": ["assigns a phase twice"],
    "prefill=dense, middle=psa": ["unknown method"],
    "prefill=": ["unknown method ''"],
    "topk(k=0)": ["k=0"],
    "topk(k=2147483648)": ["k=2147483648", "from 1 to 2147483647"],
    "lfps(s=1000000000000000000000000000000)": ["s=1000000000000000000000000000000", "from 1 to 2147483647"],
    "etf(sinks=9223372036854775808)": ["sinks=9223372036854775808", "from 0 to 2147483647"],
    "magicpig(tables=1000000000)": ["tables=1000000000", "from 2 to 4096"],
    "+".join(["psa"] * 5000): ["a policy of 19999 characters", "at most 2000"],
    "": ["a policy is text"],
    "   ": ["a policy is text"],
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: repr(text)[:40])
def test_what_is_wrong_is_named(text):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in WRONG[text]:
        assert part in message


@pytest.mark.parametrize("value", [5, 1.5, ["psa"], b"psa", object])
def test_other_types_are_refused(value):
    with pytest.raises(PolicyError, match="a policy is text"):
        Policy.parse(value)


def test_bad_mappings_are_refused():
    for mapping, message in (
        ({"middle": "psa"}, "names the phase 'middle'; known: prefill, decode"),
        ({"decode": 5}, "decode must be a method or its text, got 5"),
        ({"decode": "flexprefill"}, "does not select in decode"),
        ({"prefill": PSA()}, "does not select in prefill"),
        ({"decode": "psa(epsilon=3)"}, "epsilon=3"),
    ):
        with pytest.raises(PolicyError, match=message):
            Policy.parse(mapping)


@given(st.text(alphabet="psadenk(),=+;. '\"0123-e\n\\{}*[]_", max_size=30))
def test_arbitrary_text_is_read_or_refused_never_worse(text):
    with contextlib.suppress(PolicyError):
        policy = Policy.parse(text)
        assert Policy.parse(policy.text) == policy
