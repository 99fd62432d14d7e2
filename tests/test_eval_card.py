"""What answers hang on, and the model card: key ranges, needles, budgets, the card's tables and its command."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from engine_helpers import make
from helpers import planted_heads
from tiny_models import byte_tokenizer, one_thread  # noqa: F401

from saccade.errors import PolicyError, SaccadeError
from saccade.eval import gates
from saccade.eval.gates_accuracy import KeyRanges, budget_policies, causal, discrimination, needle_ranges
from saccade.eval.gates_card import Plan, Roles, markdown, measure_card, with_causes
from saccade.eval.render import Prompt
from saccade.eval.samples import Sample, Turn
from saccade.eval_cli.model_card import model_card
from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.policy import Policy
from saccade.selection import Dense


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (KeyRanges(remove=((3, 6),)), [0, 1, 2, *range(6, 20)]),
        (KeyRanges(remove=((3, 6), (15, 30))), [0, 1, 2, *range(6, 15), 19]),
        (KeyRanges(keep=((8, 10),), sinks=2, local=3), [0, 1, 8, 9, 17, 18, 19]),
        (KeyRanges(keep=((8, 10),), sinks=0, local=1, remove=((9, 10),)), [8, 19]),
        (KeyRanges(keep=(), sinks=0, local=50), list(range(20))),
        (KeyRanges(), list(range(20))),
    ],
)
def test_key_ranges(method, expected):
    q, k, v = planted_heads(4, 2, 20, seed=1)
    selection = method.select_decode(Query.of(q[:, -1:], KVView.from_tensors(k, v)), None)
    selection.check()
    assert [row.nonzero()[:, 0].tolist() for row in selection.mask()[:, 0]] == [expected] * 4
    assert isinstance(selection, Dense) == (len(expected) == 20)


def test_bad_key_ranges():
    with pytest.raises(PolicyError, match=r"\(5, 5\)"):
        KeyRanges(remove=((5, 5),))
    with pytest.raises(PolicyError, match="local"):
        KeyRanges(local=0)


def test_needles_are_found_by_their_answers():
    tokenizer = byte_tokenizer()

    class Wrapped:
        def encode(self, text, add_special_tokens=True):
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    text = "." * 200 + "k: 7391;" + "." * 100 + "7392" + "." * 300
    prompt = Prompt(tokenizer.encode(text + "k? 7391"), 1 + len(text), True)  # one token a byte after <bos>
    # Answer at 204..207: from 180 to 216, in blocks of 32 from 160 to 224.
    assert needle_ranges(Wrapped(), prompt, ["7391"]) == [(160, 224)]
    # The other at 309..312: 285 to 321, so 256 to 352.
    assert needle_ranges(Wrapped(), prompt, ["7391", "7392"]) == [(160, 224), (256, 352)]
    assert needle_ranges(Wrapped(), prompt, ["7391", "7777"]) == []
    assert needle_ranges(Wrapped(), Prompt(prompt.ids, 205, True), ["7391"]) == []
    near = Prompt(tokenizer.encode("7391" + "." * 40 + "7391" + "." * 9), 58, True)
    assert needle_ranges(Wrapped(), near, ["7391"]) == [(0, 58)]


def sample(task: str, length: int, index: int, seed: int) -> Sample:
    """A needle in byte text; ``shared`` has two questions, ``pos`` has two segments."""
    filler = "".join(chr(97 + (index * 7 + i * i) % 26) for i in range(length - 40))
    half = len(filler) // 2
    context = (filler[:half], f" code 9{index}7; ", filler[half:])
    turns = [Turn(context, question, (f"9{index}7",), "exact_match", 3) for question in ("which code?", "what is it?")]
    if task == "shared":
        return Sample(task, length, index, seed, (turns[0], Turn((), *_rest(turns[1]))), shared=True)
    return Sample(task, length, index, seed, (turns[0],))


def _rest(turn: Turn) -> tuple:
    return turn.question, turn.answers, turn.metric, turn.max_new_tokens


def test_budgets_and_causal_checks_ask_what_they_say(tiny_llama):
    asked = []

    def evaluate(one: Sample, policy: Policy, protocol: str) -> float:
        asked.append((one.index, policy, protocol))
        return 1.0 if policy == Policy() else 0.25

    samples = [sample("needle", 300, index, 0) for index in (1, 2)]
    scores = discrimination(samples, 300, evaluate)
    assert scores == {"dense": [1, 1], "oracle": [0.25] * 2, "streaming": [0.25] * 2, "random": [0.25] * 2}
    assert {protocol for *_, protocol in asked} == {"B"}
    methods = Counter(policy.decode.text for _, policy, _ in asked)
    assert methods == {"dense": 2, "topk(k=0.1)": 2, "streaming(window=26)": 2, "random(k=0.1)": 2}
    assert all(policy.prefill.text == "dense" for _, policy, _ in asked)
    assert set(budget_policies(40)) == {"dense", "oracle", "streaming", "random"}

    asked.clear()
    llm = make(tiny_llama)
    assert causal(llm, samples, evaluate) == {"dense": [1, 1], "without": [0.25] * 2, "only": [0.25] * 2}
    _, without, only = (policy.decode for index, policy, _ in asked if index == 1)
    assert without.remove == only.keep
    assert only.remove == () and without.keep is None  # noqa: PT018
    ((start, stop),) = without.remove
    assert (start % 32, stop % 32) == (0, 0)
    with pytest.raises(SaccadeError, match="no sample fits"):
        causal(llm, [sample("shared", 300, 1, 0)], evaluate)


ROLES = Roles(("needle", "shared"), ("needle",), ("needle",), ("needle",), ("shared",), ("needle",), ("needle",))


@pytest.fixture(scope="module")
def card(tiny_llama):
    def evaluate(one: Sample, policy: Policy, protocol: str) -> float:
        if one.task == "shared":
            return 0.5
        return {"dense": 1.0, "topk": 1.0, "key_ranges": 0.0}.get(policy.decode.name, 0.2)

    plan = Plan(lengths=(256, 512), length=512, samples=2, prompts=1, seed=4)
    return measure_card(make(tiny_llama, chunk=400), sample, ROLES, plan, evaluate)


def test_a_card_has_every_gate_measured(card):
    assert [one.name for one in card.gates] == [
        "dense accuracy",
        *gates.SHAPE_GATES,
        "query-dependent blocks",
        "temporal overlap",
        "question at the end",
        "discrimination",
        "causal",
    ]
    assert {one.name for one in card.gates} == set(gates.THRESHOLDS)
    verdicts = {one.name: one.passed for one in card.gates}
    assert verdicts["discrimination"] is True
    assert verdicts["dense accuracy"] is verdicts["causal"] is False
    assert all(one.measured for one in card.gates), [one.note for one in card.gates if not one.measured]
    assert [(row["task"], row["length"], row["score"]) for row in card.accuracy] == [
        ("needle", 256, 1.0),
        ("needle", 512, 1.0),
        ("shared", 256, 0.5),
        ("shared", 512, 0.5),
    ]
    assert json.loads(json.dumps(card.as_dict()))["gates"][0]["threshold"]


def test_the_card_reads(card):
    text = markdown(with_causes(card, {"causal": "the model is random"}))
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert lines["needle"] == "| needle | 100.0 | 100.0 | 70 | yes |"
    assert lines["shared"] == "| shared | 50.0 | 50.0 | 70 | dropped |"
    assert lines["causal"].endswith("| FAIL | the model is random |")
    assert "dense 1, oracle 1, streaming 0.2, random 0.2" in lines["discrimination"]
    assert "| pass |" in lines["discrimination"]
    with pytest.raises(SaccadeError, match="no gate"):
        with_causes(card, {"casual": "x"})


def test_roles_without_tasks_leave_gates_unmeasured(tiny_llama):
    bare = measure_card(make(tiny_llama), sample, Roles(("needle",), ("needle",)), Plan((256,), 256, 1), lambda *_: 1.0)
    unmeasured = {one.name for one in bare.gates if one.passed is None}
    assert unmeasured == {
        "query-dependent blocks",
        "temporal overlap",
        "question at the end",
        "discrimination",
        "causal",
    }
    assert all(one.note for one in bare.gates if one.passed is None)
    assert "not measured" in markdown(bare)


def test_roles_follow_what_a_source_has():
    roles = Roles((), ("a", "b"), retrieval=("b", "c"))
    assert roles.within(["a", "c", "d"]) == Roles(("a", "c", "d"), ("a",), retrieval=("c",))
    assert Roles(("a", "b"), ("b",)).within(["a"]) == Roles(("a",), ())


def test_bad_plans_and_roles(tiny_llama):
    for options in ({"length": 10}, {"samples": 0}, {"lengths": ()}, {"lengths": (100,)}, {"seed": -1}):
        with pytest.raises(SaccadeError, match=next(iter(options))):
            Plan(**options)
    with pytest.raises(SaccadeError, match="roles"):
        measure_card(make(tiny_llama), sample, Roles((), ()), Plan())


def test_the_command_writes_the_retrievers_card(capsys, tmp_path):
    """The built-in model answers facts, needs the needle's block and nothing else of the middle, and is no language
    model: its heads look where they are told to."""
    causes = tmp_path / "causes.json"
    causes.write_text(json.dumps({"sinks": "one head has a sink, the others look at fixed distances"}))
    model_card(
        model="retriever",
        out=tmp_path / "card.md",
        source="",
        lengths="700",
        length=700,
        samples=1,
        prompts=1,
        seed=3,
        causes=causes,
        dtype="auto",
        kv_memory=None,
        prefill_chunk=4096,
    )
    card = json.loads((tmp_path / "card.json").read_text())
    found = {one["name"]: one for one in card["gates"]}
    assert (tmp_path / "card.md").read_text() == capsys.readouterr().out
    assert {row["task"]: row["score"] for row in card["accuracy"]} == {"single": 1, "shared": 1, "turns": 1}
    assert found["causal"]["measured"] == {"dense": 1, "without": 0, "only": 1, "samples": 1}
    assert found["discrimination"]["measured"]["oracle"] == 1
    assert found["sinks"]["measured"]["heads_above_0.3"] == pytest.approx(1 / 8)
    assert found["sinks"]["cause"].startswith("one head")
    assert found["question at the end"]["passed"] is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lengths": "4k"}, "4k"),
        ({"source": "rulers"}, "rulers"),
        ({"causes": "absent.json"}, "absent.json"),
        ({"out": "absent/card.md"}, "absent"),
        ({"samples": 0}, "samples=0"),
    ],
)
def test_bad_input_of_the_command(options, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = {
        "model": "retriever", "out": "card.md", "source": "", "lengths": "700", "length": 700, "samples": 1,
        "prompts": 1, "seed": 3, "causes": None, "dtype": "auto", "kv_memory": None, "prefill_chunk": 4096,
    }  # fmt: skip
    asked = {**plain, **options}
    for name in ("out", "causes"):
        asked[name] = Path(asked[name]) if asked[name] else None
    with pytest.raises(SaccadeError, match=match):
        model_card(**asked)
