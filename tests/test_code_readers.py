"""What else reads int8 rows on a GPU, in Triton's interpreter: a few rows where they lie, windows, means, candidates,
one-piece copies; audits, tiers, sessions and prefixes of engines. Test_kv_codes.py has the others."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import tokens
from helpers import KINDS, generator, random_selection
from test_kv_codes import OPTIONS, check_recorded, views
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.kv import KVFormat
from saccade.kv.row_formats import INT8
from saccade.ops import Call, run
from saccade.ops.mean_tail import mean_tail
from saccade.ops.triton import dispatch, few_rows
from saccade.ops.triton.few_rows import attend_groups
from saccade.ops.triton.means import attend_means
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Corrected, Dense, Shape, Windowed
from saccade.selection.window import Cone


def check(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def parts(call: Call, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    ran = run(call, backend)
    assert ran.backend == backend
    return ran.out, ran.lse


def test_a_few_rows_read_codes_where_they_lie():
    """Each kind of selection; the reference reads the values."""
    q, coded, plain = views(torch.float32, 75, 80, heads=4, rows=INT8)
    shape, q = Shape.suffix(4, 2, 5, 75), q[:, -5:]
    for kind in KINDS[:6]:
        selection = random_selection(kind, shape, 2, generator(0))
        check(parts(Call.of(q, coded, selection), "triton"), parts(Call.of(q, plain, selection), "reference"))
    dense = parts(Call.of(q, plain, Dense(shape), scale=0.1), "reference")
    check(attend_groups(q, coded, 70, scale=0.1), dense)
    check(attend_prefill(q, coded, Dense(shape), scale=0.1, config=Config(64, 32, 4, 2, copy=True)), dense)


@pytest.mark.parametrize("rows", [9, 20, 67])
def test_few_rows_over_many_codes_are_not_copied_first(monkeypatch, rows):
    """In one group of 64 lines, and in groups of 128, the last of which is not full."""
    monkeypatch.setattr(few_rows, "FEWEST_KEYS", 128)
    monkeypatch.setattr(dispatch, "plain_copy", lambda *a: pytest.fail("the keys were copied"))
    q, coded, plain = views(torch.float32, 230, 32, heads=8, rows=INT8)
    shape, q = Shape.suffix(8, 2, rows, 230), q[:, -rows:]
    ours = parts(Call.of(q, coded, Dense(shape), scale=0.2), "triton")
    check(ours, parts(Call.of(q, plain, Dense(shape), scale=0.2), "reference"))


@pytest.mark.parametrize("rows", [5, pytest.param(60, marks=pytest.mark.thorough)])
def test_windows_and_means_are_of_the_values(rows):
    q, coded, plain = views(torch.float32, 130, 32, heads=4, rows=INT8)
    shape, q = Shape.suffix(4, 2, rows, 130), q[:, -rows:]
    inner = random_selection("blocks", shape, 2, generator(0))
    for selection in (
        Windowed(Dense(shape), Cone(0.4, 16)),
        Windowed(random_selection("lines", shape, 2, generator(1)), Cone(0.4, 16, 8)),
        Corrected(inner, 32),
    ):
        check(parts(Call.of(q, coded, selection), "triton"), parts(Call.of(q, plain, selection), "reference"))


def test_means_stand_for_what_one_row_does_not_read():
    q, coded, plain = views(torch.float32, 130, 32, heads=4, rows=INT8)
    shape, q = Shape.suffix(4, 2, 1, 130), q[:, -1:]
    used = random_selection("blocks", shape, 2, generator(0))
    corrected = Corrected(used, 32)
    out, lse = mean_tail(q, plain, corrected, used, scale=0.2)
    check(attend_means(q, coded, used, 0.2, None), (out, lse))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("read"), max_position_embeddings=1024, head_dim=32, num_hidden_layers=2
    )


SLOT = KVFormat(torch.float32, 2, 32, 16, INT8, INT8).block_bytes
QUEST = "quest(budget=64, block_size=16, dense_layers=0)"
ASKED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def engine(model, **options) -> LLM:
    llm = LLM(model, **OPTIONS | {"kv_dtype": "int8"} | options)
    if "backend" not in options:
        put_on_device(llm)
    return llm


def same(done, want) -> None:
    assert done.error is None, done.error
    assert tokens(done) == tokens(want)
    assert done.outputs[0].cumulative_logprob == pytest.approx(want.outputs[0].cumulative_logprob, abs=1e-4)


@pytest.mark.thorough
def test_pages_of_low_rank_are_made_of_the_values(model, monkeypatch):
    check_recorded(model, ["locks(budget=64, block_size=16)"], INT8, monkeypatch)


AUDITED = [QUEST, "psa(epsilon=0.4, block_size=16, microbatch=1)", "cis(k=24, sinks=2, local=8)"]


@pytest.mark.thorough
@pytest.mark.parametrize("policy", AUDITED)
def test_audits_of_recorded_steps_read_the_values(model, policy):
    """As the reference does."""
    prompt = random_ids(190, seed=5)
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=7, audit=0.8, audit_steps=0.5)
    with engine(model) as ours, engine(model, backend="reference") as theirs:
        done, want = (llm.generate([prompt], asked, policy=policy)[0] for llm in (ours, theirs))
    assert tokens(done) == tokens(want)
    assert list(done.report["decode"]["backends"]) == ["triton"]
    for name in ("retained_mass", "output_error", "agreement", "divergence"):
        mine, other = (one.report["audit"][name] for one in (done, want))
        assert mine["samples"] == other["samples"] > 0
        assert mine["mean"] == pytest.approx(other["mean"], abs=1e-4), name


@pytest.mark.thorough
@pytest.mark.parametrize("options", [
    {"kv_host": "8MiB"}, {"kv_host": "8MiB", "kv_unit": "head"}, {"kv_host": "8MiB", "kv_compute": "host"},
    {"kv_host": 30 * SLOT, "kv_disk": "disk:64MiB"},
])  # fmt: skip
def test_tiers_behind_a_small_device(model, options, tmp_path):
    prompt = random_ids(190, seed=7)
    if "kv_disk" in options:
        options = options | {"kv_disk": f"{tmp_path}:64MiB"}
    with engine(model, backend="reference") as whole:
        (want,) = whole.generate([prompt], ASKED, policy=QUEST)
    with engine(model, kv_memory=24 * SLOT, **options) as llm:
        llm.pool.slots = llm.pool.slots.clone()  # as a GPU has it
        (done,) = llm.generate([prompt], ASKED, policy=QUEST)
        same(done, want)
        counts = llm.pool.tiers.counts
        assert counts.misses + counts.attended_on_host > 0


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["dense", QUEST])
def test_a_prompt_goes_on_from_codes_that_another_stored(model, policy):
    prompt, more = random_ids(150, seed=8), random_ids(23, seed=9)
    with engine(model, backend="reference") as whole:
        (want,) = whole.generate([prompt + more], ASKED, policy=policy)
    with engine(model, enable_prefix_caching=True) as llm:
        llm.generate([prompt], ASKED, policy=policy)
        (done,) = llm.generate([prompt + more], ASKED, policy=policy)
        same(done, want)
        assert done.num_cached_tokens >= 128
