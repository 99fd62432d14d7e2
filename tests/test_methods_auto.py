"""auto: settled when a request comes, by what was timed; the report says what it became and why."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_helpers import GREEDY, make, tokens
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.cli.main import main
from saccade.engine.attention import Watch
from saccade.engine.settings import automatic, pays
from saccade.engine.settings.pays import FURTHER, GAIN, Untimed, pays_from
from saccade.errors import PolicyError
from saccade.methods.auto import FEWEST, LEAST, SAFE, Asked, Auto, Offer, ends, settled
from saccade.methods.policy import Policy
from saccade.models.tuned import Times

AUTO = Policy.parse("auto")
OFFER = Offer(Policy.parse("sampled_rows+psa"), 2000, 3000, "said so")


def became(length, new=None, answer=None, shared=0, policy=AUTO, offer=OFFER):
    chosen, said = settled(policy, Asked(length, length if new is None else new, answer, shared), lambda: offer)
    assert said is not None
    assert f"auto became '{chosen.text}' at {length:,} tokens" in said
    return chosen.text


@pytest.mark.parametrize(
    ("length", "chosen"),
    [(1, "dense"), (1999, "dense"), (2000, "sampled_rows"), (2999, "sampled_rows"), (3000, "sampled_rows+psa")],
)
def test_each_phase_by_the_length_from_which_it_pays(length, chosen):
    assert became(length) == chosen


def test_what_never_pays_is_dense():
    assert became(10**6, offer=Offer(OFFER.policy, None, 5, "")) == "psa"
    assert became(10**6, offer=Offer(OFFER.policy, 5, None, "")) == "sampled_rows"
    assert became(10**6, offer=Offer(OFFER.policy, None, None, "")) == "dense"


def test_short_answers_few_new_tokens_and_shared_prefixes():
    assert became(5000, answer=4) == "sampled_rows"
    assert became(5000, new=100) == "psa"
    assert became(5000, shared=16384) == "psa"
    assert became(20000, shared=16384) == "sampled_rows+psa"


def test_other_parts_stay():
    assert became(5000, policy=Policy.parse("flexprefill+auto")) == "flexprefill+psa"
    assert became(5000, policy=Policy.parse("auto+psaw")) == "sampled_rows+psa+psaw"
    assert became(100, policy=Policy.parse("flexprefill+auto")) == "flexprefill"


def test_short_contexts_ask_for_nothing():
    assert settled(AUTO, Asked(LEAST - 1, 5), lambda: 1 / 0)[0] == Policy()
    assert settled(Policy.parse("psa"), Asked(9, 9), lambda: 1 / 0) == (Policy.parse("psa"), None)


def test_given_length_and_method_ask_for_nothing_either():
    policy = Policy.parse('auto(least=100, method="sampled_rows+lfps")')
    assert settled(policy, Asked(100, 1, 1), lambda: 1 / 0)[0] == Policy.parse("sampled_rows+lfps")
    assert settled(policy, Asked(99, 99), lambda: 1 / 0)[0] == Policy()
    assert became(400, policy=Policy.parse("auto(least=400)")) == "sampled_rows+psa"


@pytest.mark.parametrize("text", ["auto", "auto(least=3)", 'auto(method="sampled_rows+psa(epsilon=0.9)")', "auto+psaw"])
def test_its_text_is_read_again(text):
    policy = Policy.parse(text)
    assert policy.deferred
    assert Policy.parse(policy.text) == policy


@pytest.mark.parametrize(
    "text", ["auto(least=0)", "auto(method=auto)", "auto(method=nothing)", 'auto(method="psa+psaw")', "auto(gain=2)"]
)
def test_bad_options(text):
    with pytest.raises(PolicyError, match=r"least=0|method|gain"):
        Policy.parse(text)


def test_a_draft_cannot_be_settled_later():
    with pytest.raises(PolicyError, match="draft"):
        Policy.parse("lossless(draft=auto)")


def times(dense_prefill, prefill, dense_decode, decode, lengths=(1000, 4000)):
    return Times("psa", lengths, dense_prefill, prefill, dense_decode, decode)


ALIKE = (1.0, 4.0)


def test_decode_pays_from_where_the_lines_cross():
    """Dense 1 ms + 1 us a token; sparse 3 ms + 0.1 us: dense takes GAIN times as long from 2,584 tokens on."""
    dense, sparse = [[start + slope * n for n in (1000, 4000)] for start, slope in ((1e-3, 1e-6), (3e-3, 1e-7))]
    wanted = (GAIN * 3e-3 - 1e-3) / (1e-6 - GAIN * 1e-7)
    found = pays_from(times(ALIKE, ALIKE, dense, sparse), "decode")
    assert found is not None
    assert wanted <= found <= 1.1 * wanted  # lengths are looked at in steps
    assert pays_from(times(ALIKE, ALIKE, dense, dense), "decode") is None


def test_prefill_pays_by_its_square():
    """Dense n + n^2 / 1000, sparse 1.5 n + n^2 / 4000, in microseconds."""
    dense = [n * (1 + n / 1000) * 1e-6 for n in (1000, 4000)]
    sparse = [n * (1.5 + n / 4000) * 1e-6 for n in (1000, 4000)]
    found = pays_from(times(dense, sparse, ALIKE, ALIKE), "prefill")
    wanted = (GAIN * 1.5 - 1) / (1 / 1000 - GAIN / 4000)
    assert found is not None
    assert max(1000, wanted) <= found <= 1.1 * max(1000, wanted)


def test_nothing_pays_below_what_was_measured_nor_far_above():
    faster = (0.5, 2.0)
    assert pays_from(times(ALIKE, faster, ALIKE, faster), "prefill") == 1000
    # It is as fast as dense at 4,000 tokens, and GAIN times as fast at 50,000, further than times tell.
    dense = [2.0 + GAIN * 1e-5 * (n - 4000) for n in (1000, 4000)]
    assert pays_from(times(ALIKE, ALIKE, dense, (2.0, 2.0)), "decode") is None
    assert FURTHER * 4000 < 4000 + 0.2 / (GAIN * 1e-5)
    # Slower at the longest length measured: what lines say of longer ones is noise.
    assert pays_from(times(ALIKE, ALIKE, (1.0, 4.0), (4.2, 4.2)), "decode") is None


@pytest.fixture
def timed(llm, monkeypatch):
    """What the engine finds: prefill pays from 1,000 tokens on, decode from 1,000 too."""
    asked = []

    def time(engine, policy, seconds):
        asked.append(policy.text)
        return Times(policy.text, (1000, 2000), (1.0, 2.0), (0.5, 1.0), (1.0, 2.0), (0.5, 1.0))

    monkeypatch.setattr(automatic, "timed", time)
    monkeypatch.setattr(automatic, "find_times", lambda place, policy: None)
    monkeypatch.setattr(automatic, "keep_times", lambda place, times: None)
    monkeypatch.setattr(llm.engine.automatic, "_offer", None)
    yield asked
    llm.engine.automatic._offer = None


class Machine:
    """An engine that only says how long runs take: a prefill of n tokens ``each`` n + ``pairs`` n^2 seconds, of which a
    sparse one pays ``choosing`` n and a tenth of the pairs; its clock is the wall's."""

    busy, prefixes, max_model_len = False, None, 1 << 20

    def __init__(self, device, each, pairs, choosing, monkeypatch):
        self.model = SimpleNamespace(device=SimpleNamespace(type=device))
        self.checks = SimpleNamespace(most_tokens=1 << 20)
        self.watch = Watch()
        self.ran, self.numbers = [], (each, pairs, choosing)
        monkeypatch.setattr(pays, "_run", self._run)
        monkeypatch.setattr(pays, "_text", lambda engine, count: list(range(count)))

    def _run(self, engine, ids, policy):
        n, (each, pairs, choosing) = len(ids), self.numbers
        self.ran.append(n)
        prefill = each * n + (pairs * n * n if policy == Policy() else choosing * n + pairs * n * n / 10)
        step = 1e-3 + 1e-8 * n
        return prefill, step, prefill, step


@pytest.mark.parametrize(
    ("device", "each", "lengths"),
    [
        ("cpu", 2e-3, (512, 2048)),
        ("cpu", 6e-4, (2048, 8192)),
        ("cpu", 4e-4, (4096, 16384)),
        ("cpu", 4e-5, (8192, 32768)),
        ("cuda", 3e-5, (16384, 65536)),
        ("cuda", 2e-4, (4096, 16384)),
    ],
)
def test_it_is_timed_at_the_greatest_lengths_that_the_machine_allows(device, each, lengths, monkeypatch):
    machine = Machine(device, each, 0.0, 0.0, monkeypatch)
    found = pays.timed(machine, Policy.parse("sampled_rows"), 30.0)
    assert found.lengths == lengths
    assert sum(machine.ran) * each < 2 * 30


def test_a_prefill_that_pays_at_long_contexts_alone_is_found(monkeypatch):
    """What pays on a GPU from some 40,000 tokens on: at 16,384 nothing is gained yet."""
    each, pairs = 1e-5, 1e-9
    machine = Machine("cuda", each, pairs, 2.7e-5, monkeypatch)
    found = pays.timed(machine, Policy.parse("sampled_rows"), 60.0)
    first = pays_from(found, "prefill")
    # 1.1 (each + choosing + pairs n / 10) = each + pairs n
    assert first == pytest.approx((1.1 * (each + 2.7e-5) - each) / (0.89 * pairs), rel=0.1)
    assert 30_000 < first < 50_000
    assert found.dense_prefill[0] < found.prefill[0]


def test_what_takes_too_long_is_left_to_tune(monkeypatch):
    for device in ("cpu", "cuda"):
        found = pays.timed(Machine(device, 0.1, 0.0, 0.0, monkeypatch), Policy.parse("psa"), 30.0)
        assert isinstance(found, Untimed)
        assert "saccade tune takes the time" in found.why
        assert pays.timed(Machine(device, 0.1, 0.0, 0.0, monkeypatch), Policy.parse("psa"), 30.0, always=True)


def test_a_request_is_what_it_became(llm, timed):
    ids = random_ids(1200, seed=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ours, alone, short = llm.generate([ids, ids, ids[:300]], params, policy=["auto", automatic.SAFE, "auto"])
    assert timed == [automatic.SAFE]
    assert tokens(ours) == tokens(alone)
    assert ours.report["policy"] == automatic.SAFE
    assert ours.report["policy_asked"] == "auto"
    assert alone.report["policy_asked"] == automatic.SAFE
    assert ours.report["decode"]["keys_attended"] == alone.report["decode"]["keys_attended"]
    assert ours.report["decode"]["density"] < 1
    assert short.report["policy"] == "dense"
    assert short.report["decode"]["density"] == 1
    assert any("auto became" in note and "timed here" in note for note in ours.report["notes"])
    assert any("shorter than 1,024" in note for note in short.report["notes"])
    llm.generate([ids], params, policy="auto")
    assert timed == [automatic.SAFE]  # once an engine


def test_samples_share_what_the_first_became(llm, timed):
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate([random_ids(1200, seed=2)], params, policy="auto")
    assert output.error is None
    assert output.report["policy"] == automatic.SAFE


def test_every_turn_of_a_session_is_settled_anew(llm, timed):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with llm.session("auto") as session:
        ran = [session.generate(random_ids(length, seed=length), params).report["policy"] for length in (60, 1100, 80)]
        assert session.policy == AUTO
    assert ran == ["dense", automatic.SAFE, "psa"]


def test_what_cannot_be_timed_is_dense_and_says_why(llm, timed, monkeypatch):
    why = iter([Untimed("others run", later=True), Untimed("too short")])
    monkeypatch.setattr(automatic, "timed", lambda *asked: next(why))
    for said in ("others run", "too short", "too short"):  # the last is not asked for again
        report = llm.generate([random_ids(1100, seed=3)], GREEDY, policy="auto")[0].report
        assert report["policy"] == "dense"
        assert any(said in note for note in report["notes"])


def test_it_is_timed_on_this_machine_and_kept(tiny_llama, monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with make(tiny_llama, blocks=4000) as one:
        assert not one.engine.automatic.is_timed
        one.generate([random_ids(1100, seed=1)], GREEDY, policy="auto")
        offer = one.engine.automatic.offer()
    assert "timed here" in offer.said
    (file,) = (tmp_path / "saccade" / "tuned").glob("times-*.json")
    monkeypatch.setattr(automatic, "timed", lambda *asked: 1 / 0)
    with make(tiny_llama, blocks=4000) as other:
        assert other.engine.automatic.is_timed
        other.generate([random_ids(1100, seed=1)], GREEDY, policy="auto")
        assert other.engine.automatic.offer() == offer
    file.write_text('{"version": 1, "times": {"policy": 3}}')
    monkeypatch.setattr(automatic, "timed", lambda *asked: Untimed("timed anew"))
    with make(tiny_llama, blocks=4000) as third:
        assert third.engine.automatic.offer().said.endswith("timed anew")


def test_it_is_no_method_to_run_by_itself():
    with pytest.raises(PolicyError, match="settled where an engine takes a request"):
        Auto().select_decode(None, None)


def test_what_fails_while_it_is_timed_leaves_dense_and_says_so(tiny_llama, monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(automatic, "SAFE", "double_sparsity")  # which wants a calibration
    with make(tiny_llama, blocks=4000) as one:
        report = one.generate([random_ids(1100, seed=1)], GREEDY, policy="auto")[0].report
    assert report["policy"] == "dense"
    assert any("timing it failed" in note and "calibration" in note for note in report["notes"])
    assert not (tmp_path / "saccade" / "tuned").exists()


def test_timing_leaves_no_prefixes_and_no_counts(tiny_llama, monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with make(tiny_llama, blocks=4000, enable_prefix_caching=True) as one:
        used = one.pool.used_blocks
        assert "timed here" in one.engine.automatic.offer().said
        assert one.cache_report()["prefixes"] == {"tokens": 0, "tokens_found": 0, "hit_rate": None, "kept_bytes": 0}
        assert one.pool.used_blocks == used


def test_what_it_may_become_is_known_before_there_is_a_model():
    assert ends(Policy.parse("psa")) == [Policy.parse("psa")]
    assert ends(AUTO) == [Policy(), Policy.parse(SAFE)]
    assert ends(Policy.parse("auto(method=lfps)")) == [Policy(), Policy.parse("lfps")]
    assert ends(Policy.parse("flexprefill+auto")) == [Policy.parse("flexprefill"), Policy.parse("flexprefill+psa")]


def test_prefixes_are_no_matter_to_a_session(tiny_llama, timed, llm, monkeypatch):
    monkeypatch.setattr(type(llm.engine.automatic), "_shared_from", 16384)
    ids = random_ids(1100, seed=1)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert llm.generate([ids], params, policy="auto")[0].report["policy"] == "psa"
    with llm.session("auto") as session:
        assert session.generate(ids, params).report["policy"] == SAFE


def test_pages_and_the_list_of_methods_name_the_same_preset(capsys):
    docs = Path(__file__).parent.parent / "docs"
    for page in ("choosing", "methods"):
        assert f"`{SAFE}`" in (docs / f"{page}.md").read_text(encoding="utf-8"), page
    with pytest.raises(SystemExit):
        main(["methods"])
    assert SAFE in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("place", ["README.md", "docs/quickstart.md", "docs/choosing.md", "saccade methods"])
def test_every_place_that_recommends_says_the_same(place, capsys):
    if place == "saccade methods":
        with pytest.raises(SystemExit):
            main(["methods"])
        said = " ".join(capsys.readouterr().out.split())
        assert f"{SAFE} to answer as dense attention does, {FEWEST} to read the fewest keys" in said
    else:
        said = (Path(__file__).parent.parent / place).read_text(encoding="utf-8")
        assert f"`{SAFE}`" in said
        assert re.search(
            rf"that policy to answer as dense attention does, `{re.escape(FEWEST)}` to read the fewest keys", said
        )
        assert "when not to" in said or "Do not use" in said
    assert "results/board-h200.md" in said, "what was measured of it"
    assert Policy.parse(FEWEST).text == FEWEST
