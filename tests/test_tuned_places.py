"""auto takes the preset where saccade tune found a policy for other threads, another machine or other formats: it says
so, once, and what to do."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from engine_helpers import make
from tiny_models import random_ids
from typer.testing import CliRunner

from saccade import SamplingParams
from saccade.cli.main import app
from saccade.methods.auto import LEAST, SAFE
from saccade.models import tuned as files
from saccade.models.tuned import Times, Tuned, keep_tuned, place_of
from saccade.models.tuned_places import policy_files, tuned_elsewhere

FOUND = "saccade tune found a policy for this model"


def times(policy: str) -> Times:
    return Times(policy, (1000, 4000), (1.0, 9.0), (1.0, 2.0), (0.2, 0.8), (0.1, 0.1))


@pytest.fixture
def llm(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the other home of such files
    made = make(tiny_llama)
    yield made
    made.close()


def place(llm, **other):
    return {**place_of(llm.model, llm.config.threads, llm.config.kv_dtype), **other}


def keep(llm, **other):
    found = Tuned("topk(k=64)", "a text", 4000, 0.001, 0.99, None, times("topk(k=64)"), "2026-11-29")
    return keep_tuned(llm.model, place(llm, **other), found)


def timed(llm):
    """The preset has been timed here, so that nothing has to run."""
    files.keep_times(place(llm), times(SAFE))


def test_other_threads_are_named_with_the_way_out(llm, caplog):
    timed(llm)
    here = place(llm)["threads"]
    keep(llm, threads=here + 3)
    caplog.set_level(logging.WARNING)
    said = f"{FOUND} with threads={here + 3}, not with threads={here}; run it again with threads={here}, or this with "
    for _ in range(2):
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": random_ids(LEAST + 100, 1)}, params, policy="auto")
        assert said + f"threads={here + 3}" in str(output.report)
    lines = [one.getMessage() for one in caplog.records if FOUND in one.getMessage()]
    assert lines == [f"auto is a safe preset here: {said}threads={here + 3}"]


def test_what_was_tuned_here_is_used_whatever_lies_beside_it(llm, caplog):
    keep(llm, threads=place(llm)["threads"] + 3)
    keep(llm)
    caplog.set_level(logging.WARNING)
    offer = llm.engine.automatic.offer()
    assert (offer.policy.text, FOUND in offer.said) == ("topk(k=64)", False)
    assert not [one for one in caplog.records if FOUND in one.getMessage()]


def test_a_policy_found_over_keys_that_lie_otherwise_is_named(llm):
    timed(llm)
    keep(llm, turned=False)
    said = llm.engine.automatic.offer().said
    assert f"{FOUND} with kv_rotate=False, not with kv_rotate as it is by default; run it again" in said


def test_a_broken_file_is_what_is_told_of_its_own_place(llm):
    timed(llm)
    keep(llm).write_text("{")
    keep(llm, threads=place(llm)["threads"] + 3)
    said = llm.engine.automatic.offer().said
    assert "cannot be used" in said
    assert FOUND not in said


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([{"machine": "Abacus", "cores": 3}], "on another machine (Abacus, 3 cores); run it again on this one"),
        ([{"machine": "Abacus", "threads": 9}], "on another machine (Abacus, threads=9); run it again on this one"),
        ([{"machine": "Abacus"}, {"kv_dtype": "int8"}], "with kv_dtype=int8, not with kv_dtype=auto; run it again"),
        ([{"kv_dtype": "int8", "threads": 9}, {"threads": 8}], "with threads=8, not with"),
        ([{"kv_dtype": "int8", "threads": 9}], "with kv_dtype=int8 and threads=9, not with kv_dtype=auto and threads="),
    ],
)
def test_the_nearest_place_is_named(llm, others, told):
    for one in others:
        keep(llm, **one)
    assert tuned_elsewhere(llm.model, place(llm)).startswith(f"{FOUND} {told}")


def test_files_of_other_models_and_broken_ones_say_nothing(llm):
    keep(llm, layers=99)
    file = keep(llm, threads=77)
    file.rename(file.with_name(file.name.replace(llm.model.identity.digest[:4], "ffff", 1)))
    for name, text in (("policy-a.json", "{"), ("policy-b.json", "[]"), ("policy-c.json", '{"version": 0}')):
        file.with_name(name).write_text(text)
    assert tuned_elsewhere(llm.model, place(llm)) is None
    assert len(policy_files()) == 2


def test_no_weights_are_read_where_no_model_of_this_shape_was_tuned(llm):
    keep(llm, layers=99)
    assert tuned_elsewhere(SimpleNamespace(), place(llm)) is None  # which has no identity


def test_doctor_names_the_files_and_which_are_passed_by(llm):
    def told():
        return json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["tuned policies"]

    assert told() == {"found": "none: saccade tune MODEL writes one, by which auto goes"}
    here, other = keep(llm), keep(llm, threads=77)
    said = told()
    assert set(said) == {here.name, other.name}
    assert said[here.name].endswith("of 2026-11-29: used here")
    assert "'topk(k=64)', llama" in said[here.name]
    assert "not used here by default" in said[other.name]
    assert "or this with threads=77" in said[other.name]
