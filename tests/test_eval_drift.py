"""Drift from dense: numbers against transformers, runs that resume, intervals, advice, and errors of one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from engine_helpers import EVERY, GREEDY, tokens
from eval_calls import make_call
from helpers import brute_force, planted_heads
from tiny_models import one_thread, oracle, oracle_logits  # noqa: F401

from saccade.cli.main import main
from saccade.engine.config import EngineConfig
from saccade.engine.observe import observing_logits
from saccade.errors import PolicyError, RequestError
from saccade.eval.drift import study
from saccade.eval.drift.kept import Kept, KeptWeight, kept_weight
from saccade.eval.drift.measure import compared, contradiction, run
from saccade.eval.drift.passage import Passage, made_passage, passage_of
from saccade.eval.drift.recommend import recommend
from saccade.eval.drift.rows import DENSE, ROUNDING, Row
from saccade.eval.drift.study import RECORDS, REPORT, measure_drift
from saccade.eval.stats import Interval, stretch_interval
from saccade.methods.policy import Policy, split_policies
from saccade.selection import Band, Shape

LONG = " ".join(f"line {at}," for at in range(400))
TEXT = " ".join(f"the {word} of line {at} is {at * at % 97};" for at in range(12) for word in ("sum", "name", "end"))
STREAMING = "prefill=dense, decode=streaming(sinks=3, window=20)"
LENGTH, STEPS = 200, 12


def passage(llm) -> Passage:
    return passage_of(TEXT, llm.encode, LENGTH, STEPS)


@pytest.fixture
def config(tiny_llama) -> EngineConfig:
    return EngineConfig(tiny_llama, dtype="float32", kv_memory="64MiB", prefill_chunk=64)


# --- numbers


@torch.inference_mode()
def masked_logits(model, ids, context: int, sinks: int, window: int) -> torch.Tensor:
    """Logits [n, vocab] of transformers, whose rows from ``context`` on read the first and the last keys alone."""
    n = len(ids)
    rows, keys = torch.arange(n)[:, None], torch.arange(n)
    reads = (keys <= rows) & ((rows < context) | (keys < sinks) | (rows - keys < window))
    mask = torch.where(reads, 0.0, torch.finfo(torch.float32).min)[None, None]
    return model(input_ids=torch.tensor([list(ids)]), attention_mask=mask, use_cache=False).logits[0].float()


def test_drift_is_that_of_transformers_under_the_same_mask(llm, tiny_llama):
    """KL, agreement and likelihood of dense and of a policy whose reading is a mask."""
    given, model = passage(llm), oracle(tiny_llama)
    ids, context = given.ids[:-1], given.context
    dense, own = oracle_logits(model, ids)[context:], masked_logits(model, ids, context, 3, 20)[context:]
    logits, ran = run(llm, given, Policy.parse(STREAMING))
    exact, _ = run(llm, given, Policy())
    torch.testing.assert_close(exact, dense, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(logits, own, atol=2e-4, rtol=2e-4)
    found = compared(logits, exact, given)
    p, q = torch.log_softmax(dense.double(), -1), torch.log_softmax(own.double(), -1)
    assert found["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).tolist(), abs=1e-4)
    assert found["agree"] == (dense.argmax(-1) == own.argmax(-1)).double().tolist()
    nll = [-float(q[at, token]) for at, token in enumerate(given.ids[context + 1 :])]
    assert found["nll"] == pytest.approx(nll, abs=1e-3)
    assert max(found["kl"]) > 0.01
    expected = np.mean([23 / (context + at + 1) for at in range(STEPS)])
    assert ran["decode"]["density"] == pytest.approx(expected, rel=0.01)


def test_dense_drifts_by_nothing_and_keeps_all(llm):
    given = passage(llm)
    logits, ran = run(llm, given, Policy())
    assert set(compared(logits, logits, given)["kl"]) == {0.0}
    kept = ran["decode"]["kept"]
    assert (kept["mean"], kept["worst_head"]["mean"], kept["least"]["weight"]) == (1.0, 1.0, 1.0)
    assert (ran["decode"]["density"], ran["decode"]["reads"], ran["coverage"]) == (1.0, 1.0, None)


def test_oracles_drift_less_the_more_they_read(llm):
    given = passage(llm)
    dense, _ = run(llm, given, Policy())
    drifts, weights = [], []
    for text in ("topk(k=4)", "topk(k=32)", "topk(k=150)"):
        logits, ran = run(llm, given, Policy.parse(text))
        drifts.append(float(np.mean(compared(logits, dense, given)["kl"])))
        weights.append(ran["decode"]["kept"]["mean"])
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[0] > drifts[-1]
    assert weights == sorted(weights)
    assert weights[0] < weights[-1] <= 1.0
    _, ran = run(llm, given, Policy.parse("topp(p=0.8)"))
    assert ran["decode"]["kept"]["least"]["weight"] >= 0.8 - 1e-5


def test_a_sparse_prefill_is_part_of_the_drift(llm):
    """Dense decode steps after it keep all, and the logits still move."""
    given = passage(llm)
    dense, _ = run(llm, given, Policy())
    logits, ran = run(llm, given, Policy.parse("prefill=streaming(sinks=2, window=16), decode=dense"))
    assert max(compared(logits, dense, given)["kl"]) > 1e-3
    assert ran["decode"]["kept"]["mean"] == 1.0
    assert ran["prefill"]["kept"]["mean"] < 1.0
    assert ran["prefill"]["density"] < 0.5


def test_logits_of_forced_tokens_are_those_of_a_run_that_nobody_looks_at(llm):
    """The seam changes no token, shows each decode row once and lets go afterwards."""
    seen: list[int] = []
    prompt = llm.encode(TEXT)[:100]
    with observing_logits(llm.engine, lambda request, position, row: seen.append(position)):
        shown = llm.generate(prompt, GREEDY)[0]
    assert seen == list(range(100, 109))
    assert tokens(shown) == tokens(llm.generate(prompt, GREEDY)[0])
    assert len(seen) == 9


def test_every_method_is_measured(llm):
    """What drifts keeps less than all, in prefill or decode, and nothing keeps more."""
    given = passage_of(TEXT, llm.encode, LENGTH, 3)
    dense, _ = run(llm, given, Policy())
    for policy in [*EVERY, Policy.parse("lossless(draft=psa(epsilon=0.3), tokens=4)")]:
        logits, ran = run(llm, given, policy)
        drift = max(compared(logits, dense, given)["kl"])
        kept = [ran[phase]["kept"]["mean"] for phase in ("prefill", "decode") if ran[phase]["kept"] is not None]
        assert all(0 < weight <= 1 for weight in kept), policy.text
        assert drift < 1e-6 or min(kept) < 1, policy.text
        assert 0 < ran["decode"]["density"] <= 1, policy.text


def test_kept_weight_is_that_of_brute_force():
    q, k, v = planted_heads(4, 2, 90, seed=3)
    band = Band(Shape.suffix(4, 2, 90, 90), window=9, sinks=2)
    rows = torch.tensor([5, 40, 89])
    shape = Shape.suffix(4, 2, 90, 90)
    _, lse = brute_force(q, k, v, band.mask()[0].expand(4, 90, 90), 0.25)
    _, whole = brute_force(q, k, v, shape.causal_mask().expand(4, 90, 90), 0.25)
    expected = torch.exp(lse - whole)[:, rows].float()
    torch.testing.assert_close(kept_weight(make_call(q, k, v, band), rows), expected, atol=1e-5, rtol=1e-4)
    assert kept_weight(make_call(q, k, v), rows).eq(1).all()


def test_layers_with_windows_of_their_own_are_left_out():
    q, k, v = planted_heads(4, 2, 90, seed=3)
    kept = KeptWeight(torch.arange(90))
    kept(make_call(q, k, v, Band(Shape.suffix(4, 2, 90, 90), window=9), window=9))
    assert kept.of("prefill") is None
    kept(make_call(q, k, v, layer=2))
    assert kept.of("prefill").as_dict()["layers"] == {"2": 1.0}


@pytest.mark.parametrize(
    ("mean", "least", "says"),
    [
        (0.95, 0.95, False),
        (0.93, 0.90, False),  # as far off as is allowed
        (0.92, 0.92, True),
        (0.99, 0.60, True),  # a single step, far off
    ],
)
def test_weights_that_contradict_a_reported_coverage_are_told(mean, least, says):
    values = torch.full((1, 100), mean + (mean - least) / 99)
    values[0, 7] = least
    said = contradiction({"mean": 0.95, "least": 0.95}, Kept({3: values}))
    assert (said is not None) == says
    if says:
        assert f"{least:.3f} at least (layer 3, head 0)" in said


def test_many_steps_below_the_least_coverage_are_told():
    values = torch.ones(2, 1000)
    values[1, :3] = 0.85
    said = contradiction({"mean": 0.95, "least": 0.95}, Kept({0: values}))
    assert said is not None
    assert "0.15 % of head-steps" in said
    values[1, 1:3] = 1.0
    assert contradiction({"mean": 0.95, "least": 0.95}, Kept({0: values})) is None


# --- intervals


def test_intervals_by_stretches_are_seeded_and_wider_where_neighbours_are_alike():
    rng = np.random.default_rng(3)
    series = np.repeat(rng.normal(size=32), 8).tolist()
    found = stretch_interval(series, 16, seed=5)
    assert found == stretch_interval(series, 16, seed=5) != stretch_interval(series, 16, seed=6)
    single = stretch_interval(series, 1, seed=5)
    assert found.mean == single.mean == pytest.approx(np.mean(series))
    assert found.high - found.low > 1.8 * (single.high - single.low)
    assert stretch_interval([2.0] * 10, 4) == Interval(2.0, 2.0, 2.0, 10)


@pytest.mark.parametrize("size", [7, 16, 20])
def test_every_draw_has_as_many_values_as_the_series(size):
    """Sums of a series of ones are its length, whatever the stretch."""
    for stretch in range(1, size + 1):
        found = stretch_interval([1.0] * size, stretch, resamples=50)
        assert (found.low, found.high) == (1.0, 1.0)


@pytest.mark.parametrize(("values", "stretch"), [([], 1), ([1.0, 2.0], 3), ([1.0], 0)])
def test_stretches_that_do_not_fit_are_refused(values, stretch):
    with pytest.raises(RequestError, match="must be"):
        stretch_interval(values, stretch)


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
    from saccade.eval.setting import load

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
