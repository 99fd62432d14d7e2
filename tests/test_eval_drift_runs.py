"""Drift from dense: advice, runs that resume, texts, and errors of one line."""

from __future__ import annotations

import json

import pytest
import torch
from drift_texts import LENGTH, LONG, STEPS, STREAMING, TEXT, passage
from tiny_models import one_thread, oracle, oracle_logits  # noqa: F401

from saccade.cli.main import main
from saccade.engine.settings import automatic
from saccade.engine.settings.config import EngineConfig
from saccade.errors import PolicyError, RequestError
from saccade.eval.drift import study
from saccade.eval.drift.measure import run
from saccade.eval.drift.recommend import recommend
from saccade.eval.drift.rows import DENSE, ROUNDING, Row
from saccade.eval.drift.study import RECORDS, REPORT, measure_drift
from saccade.eval.setting import load
from saccade.eval.stats import Interval
from saccade.methods.auto import SAFE
from saccade.methods.policy import Policy, split_policies
from saccade.passage import Passage, made_passage, passage_of


@pytest.fixture
def config(tiny_llama) -> EngineConfig:
    return EngineConfig(tiny_llama, dtype="float32", kv_memory="64MiB", prefill_chunk=64)


# --- the recommendation


def row(name: str, kl: float, reads: float, over: float | None = None, oracle: bool = False, width: float = 0.0) -> Row:
    """A policy of KL ``kl`` +- ``width``; ``over``: the upper end of KL minus the rounding's."""

    def about(mean: float, wide: float) -> Interval:
        return Interval(mean, mean - wide, mean + wide, 8)

    phases = {name: {"reads": reads, "density": reads, "kept": None} for name in ("prefill", "decode")}
    difference = None if over is None else Interval(over, over, over, 8)
    one = about(0.0, 0.0)
    return Row(name, about(kl, width), one, one, 2.0, reads, difference, oracle, {**phases, "contradiction": None})


YARDSTICK = row(ROUNDING, 0.001, 1.0)


@pytest.mark.parametrize(
    ("rows", "policy", "within"),
    [
        # within the rounding: the sparsest of those, however sparse others within the bound are
        (
            [row("quest", 0.001, 0.4, -0.0), row("lfps", 0.0005, 0.6, -0.0005), row("cis", 0.01, 0.1, 0.01)],
            "quest",
            "rounding",
        ),
        # none within the rounding: the sparsest within the bound
        ([row("quest", 0.01, 0.4, 0.01), row("lfps", 0.015, 0.3, 0.01), row("cis", 0.03, 0.1, 0.03)], "lfps", "bound"),
        # the interval counts, not the mean
        ([row("quest", 0.015, 0.2, 0.01, width=0.01), row("lfps", 0.01, 0.3, 0.01)], "lfps", "bound"),
        # oracles and what reads no less than dense cannot be used
        ([row("topp", 0.001, 0.1, -0.001, oracle=True), row("psa", 0.001, 1.0, -0.001)], None, None),
        # none within either
        ([row("quest", 0.5, 0.1, 0.4), row("cis", 0.04, 0.2, 0.03)], None, None),
        # the rounding not measured
        ([row("quest", 0.01, 0.1), row("cis", 0.001, 0.2)], "quest", "bound"),
    ],
)
def test_the_sparsest_policy_within_the_rounding_or_the_bound_is_recommended(rows, policy, within):
    measured = any(one.over is not None for one in rows)
    advice = recommend([row(DENSE, 0.0, 1.0, -0.001), *([YARDSTICK] if measured else []), *rows], 0.02)
    assert (advice.policy, advice.within) == (policy, within)
    usable = [one for one in rows if not one.oracle and one.reads < 1]
    if policy is None:
        assert advice.reason.startswith("Stay with dense")
        assert not usable or f"{min(usable, key=lambda one: one.kl.high).id} comes nearest" in advice.reason
    else:
        assert advice.reason.startswith(f"{policy}. ")
        assert ("No policy's drift lies within what the rounding" in advice.reason) == (within == "bound" and measured)
        assert ("was not measured" in advice.reason) == (not measured)


# --- runs


def source(llm) -> tuple[str, Passage]:
    return "lines", passage(llm)


def policies(*texts: str) -> list[Policy]:
    return [Policy.parse(text) for text in texts]


def test_a_run_that_was_cut_off_goes_on_and_ends_alike(config, tmp_path, monkeypatch):
    wanted = policies(STREAMING, "topk(k=20)", "lfps(k=0.2, least=8)")
    _, rows, advice = measure_drift(config, source, wanted, tmp_path / "whole")
    assert [row.id for row in rows] == [DENSE, ROUNDING, *(policy.text for policy in wanted)]

    calls: list[str] = []

    def counted(llm, given, policy, **asked):
        calls.append(policy.text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(llm, given, policy, **asked)

    monkeypatch.setattr(study, "run", counted)
    with pytest.raises(KeyboardInterrupt):
        measure_drift(config, source, wanted, tmp_path / "cut")
    lines = (tmp_path / "cut" / RECORDS).read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [DENSE, wanted[0].text]
    (tmp_path / "cut" / RECORDS).open("a").write('{"id": "topk(k')  # a line that a kill cut off
    done = len(calls)
    _, again, advised = measure_drift(config, source, wanted, tmp_path / "cut")
    assert calls[done:] == ["dense", "topk(k=20)", "lfps(k=0.2, least=8)", "dense"]  # the last one in bfloat16
    assert advised == advice
    for one, other in zip(rows, again):
        assert (one.kl, one.agree, one.nll, one.over) == (other.kl, other.agree, other.nll, other.over)
    assert (tmp_path / "cut" / REPORT).read_text() == (tmp_path / "whole" / REPORT).read_text()

    calls.clear()
    _, third, _ = measure_drift(config, source, wanted[:1], tmp_path / "cut")  # nothing is missing
    assert calls == []
    assert [row.id for row in third] == [DENSE, ROUNDING, wanted[0].text]


def test_what_auto_times_first_is_no_part_of_the_drift(config, tmp_path, monkeypatch):
    """Its runs are other requests, of other lengths: neither their logits nor their weights are the passage's."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timed = []

    def kept(place, times):
        timed.append(times.policy)

    monkeypatch.setattr(automatic, "keep_times", kept)
    policy = Policy.parse("auto(least=1)")
    with load(config) as llm:
        given = passage(llm)
        logits, ran = run(llm, given, policy)
        assert timed == [SAFE]
        assert any("timed here" in note for note in ran["notes"])
        own, named = run(llm, given, Policy.parse(SAFE))
    assert torch.equal(logits, own)
    for phase in ("prefill", "decode"):
        assert ran[phase]["kept"] == named[phase]["kept"]


def test_a_folder_of_another_text_is_refused(config, tmp_path):
    measure_drift(config, source, policies("topk(k=20)"), tmp_path, rounding=False, weights=False)
    other = lambda llm: ("lines", passage_of(TEXT[9:], llm.encode, LENGTH, STEPS))  # noqa: E731
    with pytest.raises(RequestError, match=r"another setting: text\.tokens_sha256"):
        measure_drift(config, other, policies("topk(k=20)"), tmp_path, rounding=False, weights=False)


def test_the_rounding_is_that_of_transformers(config, tiny_llama, tmp_path):
    _, rows, _ = measure_drift(config, source, [], tmp_path, weights=False)
    yardstick = rows[1]
    assert yardstick.id == ROUNDING
    assert 0 < yardstick.kl.mean < 0.5
    record = yardstick.record
    dense = rows[0].record
    assert record["nll_exact"] == dense["nll"]
    ids = passage_ids(config)
    exact, rounded = (oracle_logits(oracle(tiny_llama, dtype), ids) for dtype in (torch.float32, torch.bfloat16))
    p, q = (torch.log_softmax(part[LENGTH - STEPS :].double(), -1) for part in (exact, rounded))
    theirs = float((p.exp() * (p - q)).sum(-1).mean())
    assert 1 / 3 < yardstick.kl.mean / theirs < 3  # rounding differs with the order of operations


def passage_ids(config) -> tuple[int, ...]:
    with load(config) as llm:
        return passage(llm).ids[:-1]


# --- texts and the command


def letters(text: str, first: bool) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("seed", [0, 1])
def test_the_made_text_forces_what_its_context_says(seed):
    made = made_passage(letters, 6000, 700, seed)
    assert made == made_passage(letters, 6000, 700, seed)
    assert made.steps == 700
    assert 5000 < made.context <= 5300
    text = bytes(made.ids).decode(errors="ignore")
    context, forced = bytes(made.ids[: made.context]).decode(), bytes(made.ids[made.context :]).decode(errors="ignore")
    told = [line for line in text.split(". ") if line.startswith("The ") and line in context and line in forced]
    assert len(told) >= 4


@pytest.mark.parametrize(
    ("length", "steps", "says"),
    [
        (100, 99, "at least one token is forced, and a context of two or more"),
        (100, 0, "at least one token is forced"),
        (4000, 10, "has 51 tokens, and --length 4000 takes 4001.*or --length 50 at most"),
    ],
)
def test_lengths_that_do_not_fit_are_named(length, steps, says):
    with pytest.raises(RequestError, match=says):
        passage_of("x" * 51, letters, length, steps)


def test_a_made_text_without_room_for_its_facts_is_refused():
    with pytest.raises(RequestError, match="leaves no room for the 8 facts"):
        made_passage(letters, 200, 20, 0)


def test_policies_in_one_text():
    assert split_policies("psa(epsilon=0.9, block_size=16), lfps") == ["psa(epsilon=0.9, block_size=16)", "lfps"]
    assert split_policies("prefill=dense, decode=streaming") == ["prefill=dense, decode=streaming"]
    with pytest.raises(PolicyError, match="empty part"):
        split_policies("lfps,,psa")


def command(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "drift", *args])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_prints_a_table_and_a_recommendation(capsys, tiny_llama, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    asked = ["-m", str(tiny_llama), "-f", str(file), "--methods", "topk(k=20),lfps", "-p", STREAMING]
    asked += ["--length", str(LENGTH), "--tokens", str(STEPS), "--kv-memory", "64MiB", "-o", str(tmp_path / "out")]
    code, out, _ = command(capsys, *asked)
    assert code == 0
    lines = out.splitlines()
    assert sum(line.startswith("| `") for line in lines) == 3
    assert "| `topk(k=20)` (oracle) |" in out
    assert "| dense, bfloat16 beside float32 |" in out
    assert any(line.startswith("Recommendation: ") for line in lines)
    report = (tmp_path / "out" / REPORT).read_text()
    assert "text.txt: 188 tokens of context, 12 forced" in report
    assert "by layer" in report


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--methods", "quets"], "did you mean 'quest'"),
        (["--length", "5000"], "tokens, and --length 5000 takes 5001"),
        (["--length", "2100"], "2048"),
        (["--bound", "0"], "bound=0.0 must be a number of nats above 0"),
        (["--tokens", "0"], "at least one token is forced"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, tiny_llama, tmp_path, more, says):
    file = tmp_path / "text.txt"
    file.write_text(TEXT + LONG)
    out = tmp_path / "out"
    code, _, err = command(capsys, "-m", str(tiny_llama), "-f", str(file), "-o", str(out), "--methods", "lfps", *more)
    assert code == 2
    (line,) = [line for line in err.splitlines() if not line.startswith("saccade: note")]
    assert says in line
    assert not out.exists()
