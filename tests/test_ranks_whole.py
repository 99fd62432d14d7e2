"""What several processes say of a whole model: audits, drafts, certificates, sessions under other numbers of them."""

from __future__ import annotations

import fork_server
import pytest
from rank_helpers import PROMPTS, greedy, make, same

from saccade import SamplingParams, ranks


@pytest.fixture(scope="module", autouse=True)
def quickly_started():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
        yield


@pytest.fixture(scope="module")
def pair(tiny_llama, quickly_started):
    """An engine of one process and one of two."""
    made = [make(tiny_llama, count, exact=False, kv_memory="8MiB") for count in (1, 2)]
    yield made
    for llm in made:
        assert llm.pool.used_blocks == 0
        llm.close()


@pytest.mark.parametrize(
    "policy",
    [
        "lossless(draft=psa(epsilon=0.3, rank=cuboid), tokens=3)",
        "lossless(draft=lfps, tokens=2)",
        "lossless(draft=snapkv(capacity=70), tokens=4, lookup=0)",
        "flexprefill(min_budget=0)+lossless(draft=arkvale(budget=64), tokens=3)",
        "lossless(draft=vattention(sinks=16, local=16), tokens=3)",
    ],
)
def test_drafts(pair, policy):
    """Tokens and counts of what was verified, as of one process; look-ups among them."""
    prompts = [PROMPTS[0], PROMPTS[1][:40] * 4]
    own = [llm.generate(prompts, greedy(24), policy=policy) for llm in pair]
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        left, right = mine.report["speculation"], theirs.report["speculation"]
        assert right["drafted"] == left["drafted"] > 0
        assert right["accepted"] == left["accepted"]
        for phase in ("prefill", "decode"):
            assert mine.report[phase]["keys_attended"] == theirs.report[phase]["keys_attended"]


def test_drafts_of_samples(pair):
    params = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    policy = "lossless(draft=quest(budget=64), tokens=3)"
    same(*(llm.generate(PROMPTS[2], params, policy=policy) for llm in pair))


@pytest.mark.parametrize(
    "policy", ["quest(budget=64)", "topk(k=24)", "arkvale(budget=64)", "vattention(sinks=16, local=16)"]
)
def test_audits(pair, policy):
    """Of all heads: the same places are drawn, and what is found there is the same."""
    params = greedy(12, seed=7, audit=0.5, audit_steps=0.5)
    audits = []
    for llm in pair:
        out = llm.generate(PROMPTS[:2], params, policy=policy)
        audits.append([one.report["audit"] for one in out])
        assert [one.error for one in out] == [None, None]
    for mine, theirs in zip(*audits, strict=True):
        for name in ("places", "left_out", "steps", "rate"):
            assert mine[name] == theirs[name], name
        assert mine["places"] == 11 * 3 * 2
        for name in ("retained_mass", "output_error", "output_error_scaled", "agreement", "divergence"):
            assert _numbers(mine[name]) == pytest.approx(_numbers(theirs[name]), abs=2e-5), name
    assert audits[1][0]["output_error"]["samples"] > 10


def _numbers(found: dict | None) -> dict:
    return {name: value for name, value in (found or {}).items() if isinstance(value, (int, float))}
