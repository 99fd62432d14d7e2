"""saccade tune: what is tried, what holds the bounds, and that auto finds what was kept."""

from __future__ import annotations

import json

import pytest
from drift_texts import passage
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401
from tune_helpers import FAR, NEAR, TRIED, config, found_of, own_cache, quick_times  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.cli.main import main
from saccade.engine.settings import automatic
from saccade.errors import RequestError, SaccadeError
from saccade.eval.drift.measure import compared, run
from saccade.eval.tune import study
from saccade.eval.tune.ladders import LADDERS, Ladder
from saccade.eval.tune.page import table
from saccade.eval.tune.study import tune
from saccade.eval.tune.trial import BELOW_ROUNDING, Limits, Trial, Tried
from saccade.methods.auto import SAFE
from saccade.methods.policy import Policy
from saccade.models import tuned as files
from saccade.models.head_order import gains, orders_of
from saccade.models.loader import load_model
from saccade.models.shards import Share
from saccade.models.tuned import Times
from saccade.models.tuned_heads import find_heads
from saccade.passage import made_passage


def test_ladders_are_climbed_until_one_rung_drifts_too_far(tiny_llama, timed, cache):
    found = found_of(tiny_llama, bound=0.02)
    by_name = {one.policy: one for one in found.tried}
    assert [one.policy for one in found.tried] == [NEAR, "streaming(sinks=1, window=2)", FAR]
    with LLM(config=config(tiny_llama)) as llm:
        given = passage(llm)
        dense, _ = run(llm, given, Policy(), weights=False)
        for text, one in by_name.items():
            drift = compared(run(llm, given, Policy.parse(text), weights=False)[0], dense, given)
            assert one.kl == pytest.approx(sum(drift["kl"]) / len(drift["kl"]), rel=1e-4, abs=1e-7)
            assert one.agree == pytest.approx(sum(drift["agree"]) / len(drift["agree"]))
    assert by_name[NEAR].why is None
    assert by_name[FAR].why is not None
    assert found.tuned.policy == NEAR
    assert timed == [NEAR]
    assert "kept" in table(found)
    assert f"decode by '{NEAR}' pays from 100 tokens on" in found.said


def test_auto_finds_what_was_kept(tiny_llama, cache):
    found = found_of(tiny_llama)
    assert found.file is not None
    assert found.file.parent == cache
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(config=config(tiny_llama)) as llm:
        report = llm.generate([random_ids(1100, seed=1)], params, policy="auto")[0].report
    assert report["policy"] == NEAR
    assert any("tuned on a text (KL " in note for note in report["notes"])


def test_what_each_kv_head_reads(tmp_path, cache, monkeypatch):
    """As reports say it, of the policy that is kept; processes share heads out by it."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    folder = make_checkpoint("llama", tmp_path / "model", **sizes)
    monkeypatch.setattr(Limits, "why_not", lambda *drift: None)
    prefill, decode = "flexprefill(gamma=0.5, min_budget=0)", "psa(epsilon=0.6)"
    ladders = Ladder("prefill", (prefill,)), Ladder("decode", (decode,))

    def text(llm):
        return made_passage(llm.encode, 700, 12, 0)

    found = tune(config(folder), lambda llm: ("a text", text(llm)), ladders=ladders, rounding=False)
    assert found.tuned.policy == f"{prefill}+{decode}"
    assert found.heads is not None
    assert found.heads.parent == cache
    kept = find_heads(folder, None)
    assert kept is not None
    with LLM(config=config(folder)) as llm:
        _, ran = run(llm, text(llm), Policy.parse(found.tuned.policy), weights=False)
    for phase in ("prefill", "decode"):
        pairs = [[(row[at] + row[at + 1]) / 2 for at in range(0, 8, 2)] for row in ran["heads"][phase]]
        assert [list(row) for row in getattr(kept, phase)] == [pytest.approx(row) for row in pairs]
        assert len({one for row in pairs for one in row}) > 3
    plain, best = gains(kept)[2]
    assert best < plain
    assert f"the busiest reads {plain:.2f} of their mean in a layer, from now on {best:.2f}" in found.said
    share = Share(0, 2, lambda: None, kept)
    assert load_model(folder, share=share).part.orders == orders_of(kept, 3, 4, 2) != ()


def test_a_phase_each_and_both_together(tiny_llama):
    prefill = "flashprefill(alpha=0.0001, block_size=32)"
    found = found_of(tiny_llama, ladders=(Ladder("decode", (NEAR,)), Ladder("prefill", (prefill,))))
    sparse = [one.policy for one in found.tried if one.density < 1 and one.why is None]
    assert [one.policy for one in found.tried[:2]] == [NEAR, prefill]
    if prefill in sparse:
        assert found.tried[2].policy == f"{prefill}+{NEAR}"
    else:
        assert found.tuned.policy == NEAR


def test_what_is_too_far_together_is_kept_apart(tiny_llama, monkeypatch):
    """The one of the two that saves more."""

    def of(trial, text, phase):
        both = "+" in text
        return Tried(text, phase, 0.1, 0.1, 1.0, 0.5, 1.0 if phase == "decode" else 3.0, 4.0, "far" if both else None)

    monkeypatch.setattr(Trial, "of", of)
    found = found_of(tiny_llama, ladders=(Ladder("decode", ("psa",)), Ladder("prefill", ("sampled_rows",))))
    assert [one.policy for one in found.tried] == ["psa", "sampled_rows", "sampled_rows+psa"]
    assert found.tuned.policy == "psa"


def test_the_preset_is_tried_where_faster_ones_are_too_far_together(tiny_llama, monkeypatch):
    """It may drift twice as far."""
    safe = Policy.parse(SAFE)

    def of(trial, text, phase):
        seconds = 2.0 if text in (safe.text, Policy(prefill=safe.prefill).text) else 1.0
        return Tried(
            text, phase, 0.1, 0.1, 1.0, 0.5, seconds, 4.0, "far" if "+" in text and text != safe.text else None
        )

    monkeypatch.setattr(Trial, "of", of)
    rungs = (Policy(prefill=safe.prefill).text, "sampled_rows")
    found = found_of(tiny_llama, ladders=(Ladder("decode", ("psa",)), Ladder("prefill", rungs)))
    assert [one.policy for one in found.tried] == ["psa", *rungs, "sampled_rows+psa", safe.text]
    assert found.tuned.policy == safe.text


def test_auto_stays_dense_where_all_drifts_too_far(tiny_llama, timed, cache, monkeypatch):
    """Not the safe preset, which was just found to drift too far on this model, nor what was tuned before."""
    assert found_of(tiny_llama).tuned.policy == NEAR
    timed.clear()
    found = found_of(tiny_llama, ladders=(Ladder("decode", (FAR,)),), bound=1e-9)
    assert (found.tuned.policy, found.tuned.times) == ("dense", None)
    assert found.said.startswith("Stay with dense: no policy that was tried")
    assert not timed
    assert [one.name for one in cache.glob("policy-*")] == [found.file.name]
    assert "kept" not in table(found)
    monkeypatch.setattr(automatic, "timed", lambda *args: pytest.fail("dense needs no times"))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(config=config(tiny_llama)) as llm:
        for policy in ("auto", "auto(least=1)"):
            report = llm.generate([random_ids(1100, seed=1)], params, policy=policy)[0].report
            assert report["policy"] == "dense"
            assert any(
                "saccade tune found none that reads less within its bounds on a text" in one for one in report["notes"]
            )


def test_what_cannot_be_written_is_told_all_the_same(tiny_llama, monkeypatch, capsys):
    """As on a full disk: the table is what minutes went into."""

    def refused(*args):
        raise RequestError("tuned policy x cannot be written: No space left on device")

    monkeypatch.setattr(study, "keep_tuned", refused)
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(tiny_llama), "--length", "1000", "--kv-memory", "64MiB", "--seconds", "1", "--no-rounding"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert "| `psa` |" in out
    assert "auto is " in out or "Stay with dense" in out
    assert err.splitlines()[-1] == "saccade: error: tuned policy x cannot be written: No space left on device"


def test_time_that_is_over_ends_it(tiny_llama):
    said: list[str] = []
    assert len(found_of(tiny_llama, seconds=1e-3, note=said.append).tried) == 1
    left = f"streaming(sinks=1, window=2), {NEAR}, {FAR}, topk(k=1)"
    assert f"the time is over; not tried: {left}; more --seconds give it more" in said


def test_the_preset_is_tried_however_little_time_there_is(tiny_llama):
    """A model that was tuned has no less than one that was not."""
    found = found_of(tiny_llama, ladders=LADDERS, seconds=1e-3, bound=1e9)
    safe = Policy.parse(SAFE)
    alone = [safe.decode.text, Policy(prefill=safe.prefill).text]
    assert [one.policy for one in found.tried[:2]] == alone
    assert all("lfps" not in one.policy for one in found.tried)


def test_a_context_too_short_to_be_timed_is_refused_before_anything_is_tried(tmp_path, timed):
    folder = make_checkpoint("llama", tmp_path / "short", max_position_embeddings=700)
    with pytest.raises(RequestError, match=r"nothing to tune: timing takes 1,042 tokens, and a context holds 700 here"):
        tune(config(folder), lambda llm: pytest.fail("a text is asked for"))
    assert not timed


def test_rounding_is_measured_beside(tiny_llama):
    found = found_of(tiny_llama, rounding=True)
    assert list(found.roundings) == ["a text"]
    assert 0.5 < found.roundings["a text"] <= 1
    assert f"| {100 * found.roundings['a text']:.1f} % | - | - | rounding (a text) |" in table(found)


def test_limits():
    limits, safe, half = Limits(0.02, 0.97), Policy.parse(SAFE), Policy.parse("psa")
    for policy in (safe, half, Policy.parse("sampled_rows(threshold=0.0005)")):  # the preset and its phases
        assert limits.why_not(policy, 0.01, 0.02, 0.97 - BELOW_ROUNDING) is None
        assert "0.021" in (limits.why_not(policy, 0.01, 0.021, 1.0) or "")
        assert "93.90 % agree" in (limits.why_not(policy, 0.0, 0.0, 0.939) or "")


@pytest.mark.parametrize("text", ["psa(epsilon=0.9)", "sampled_rows+psa", "lfps", "flashprefill+psa"])
def test_others_than_the_preset_may_drift_half_as_far(text):
    limits, policy = Limits(0.02, 0.97), Policy.parse(text)
    assert limits.why_not(policy, 0.005, 0.01, 0.956) is None
    assert limits.why_not(policy, 0.005, 0.011, 1.0) == "KL 0.005, up to 0.011, above 0.01"
    assert limits.why_not(policy, 0.0, 0.0, 0.954) == "95.40 % agree, fewer than 95.50 %"


def test_every_rung_is_a_policy_of_its_phase():
    for ladder in LADDERS:
        for text in ladder.rungs:
            policy = Policy.parse(text)
            assert not getattr(policy, ladder.phase).is_dense
            assert sum(not getattr(policy, phase).is_dense for phase in ("prefill", "decode")) == 1


@pytest.mark.parametrize(
    "change", [{"times": None}, {"policy": "dense"}, {"policy": "auto(least=0)"}, {"times": [1]}, {"more": 1}]
)
def test_a_file_that_does_not_hang_together_is_broken(tiny_llama, change):
    found = found_of(tiny_llama)
    data = json.loads(found.file.read_text())
    found.file.write_text(json.dumps(data | change))
    with (
        LLM(config=config(tiny_llama)) as llm,
        pytest.raises(SaccadeError, match=r"cannot be used .*saccade tune again"),
    ):
        files.find_tuned(llm.model, files.place_of(llm.model, None, "auto"))


@pytest.mark.parametrize("harm", ["no json", '{"version": 1, "policy": "nix"}', "[]", ""])
def test_a_broken_file_is_named_and_the_safe_preset_stands_in(tiny_llama, harm, monkeypatch):
    found = found_of(tiny_llama)
    assert found.file is not None
    found.file.write_text(harm)
    monkeypatch.setattr(automatic, "timed", lambda engine, policy, seconds: Times("x", (100, 200), *4 * [(1.0, 2.0)]))
    with LLM(config=config(tiny_llama)) as llm:
        offer = llm.engine.automatic.offer()
    assert offer.policy == Policy.parse(automatic.SAFE)
    assert str(found.file) in offer.said
    assert "saccade tune again" in offer.said


def test_another_model_another_machine(tiny_llama, odd_llama, monkeypatch):
    found = found_of(tiny_llama)
    assert found.file is not None
    data = json.loads(found.file.read_text())
    with LLM(config=config(tiny_llama)) as llm:
        place = files.place_of(llm.model, None, "auto")
        assert data["place"] == place
        assert files.find_tuned(llm.model, place) is not None
        assert files.find_tuned(llm.model, {**place, "machine": "another"}) is None
    with LLM(odd_llama, dtype="float32") as other:
        assert files.find_tuned(other.model, files.place_of(other.model, None, "auto")) is None


def test_ladders_begin_with_what_is_safe_for_any_model():
    """So that a tuned model never gets less than an untuned one for want of a rung."""
    safe = Policy.parse(SAFE)
    for phase in ("prefill", "decode"):
        first = [ladder.rungs[0] for ladder in LADDERS if ladder.phase == phase]
        assert getattr(safe, phase).text in first
