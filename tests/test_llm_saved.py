"""Sessions that are saved and restored go on as if they had stayed; what is torn or foreign is never used."""

from __future__ import annotations

import errno
import os
import pickle
import random
import stat
from pathlib import Path

import fork_server
import pytest
import safetensors.torch
import torch
from engine_helpers import finish, make, start, tokens
from method_matrix import MATRIX
from safetensors import SafetensorError
from tiny_models import make_checkpoint, random_ids

from saccade import SamplingParams
from saccade.engine.memory import saved as saved_module
from saccade.errors import RequestError
from saccade.methods.policy import Policy
from saccade.records import Record, read_record, write_record

SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
POLICIES = (
    *(Policy.parse(case.methods()[0]).text for case in MATRIX),
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+lfps(k=16, blocks=2, least=16, history=keep)",
    # States of other widths, and states within states.
    "cis(k=16, sinks=2, local=8, unit=kv_head, by=key)",
    "cis(k=16, sinks=2, local=8, by=hidden)",
    "cis(k=16, sinks=2, local=8, tau=0.3, anchors=any)",
    "auto(least=1, method=lfps)",
    "lossless(draft=h2o(budget=32), tokens=2)",
    "psa(epsilon=0.4, block_size=16, microbatch=1, rank=keys, rest=estimate)",
)
FIRST, SECOND, THIRD = random_ids(201, seed=1), random_ids(33, seed=2), random_ids(70, seed=3)


@pytest.fixture(scope="module")
def other(tiny_llama):
    """An engine that never saw what it restores."""
    return make(tiny_llama)


def same(ours, theirs) -> None:
    assert ours.error is None, ours.error
    assert tokens(ours) == tokens(theirs)
    assert ours.outputs[0].cumulative_logprob == theirs.outputs[0].cumulative_logprob


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_session_goes_on_bit_for_bit(llm, other, tmp_path, policy):
    with llm.session(policy=policy) as session:
        session.generate(FIRST, SCORED)
        session.generate(SECOND, SCORED)
        session.save(tmp_path / "talk")
        assert stat.S_IMODE((tmp_path / "talk").stat().st_mode) == 0o600
        said = session.token_ids
        expected = session.generate(THIRD, SCORED)
    restored = other.restore(tmp_path / "talk")
    assert restored.note is None
    assert restored.policy == Policy.parse(policy)
    assert restored.token_ids == said
    again = restored.generate(THIRD, SCORED)
    same(again, expected)
    assert again.report["cached_tokens"] == expected.report["cached_tokens"]
    restored.close()
    assert other.pool.used_blocks == 0


def test_a_conversation_survives_its_process(tmp_path):
    """Saved by a process that is then killed, restored by another one."""
    code = """
import os, signal, sys
from saccade import LLM, SamplingParams
llm = LLM("retriever", kv_memory="64MiB")
session = llm.session(policy="lfps")
session.chat("The code of the red house is 4172. Remember it.", SamplingParams(max_tokens=8))
session.save(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "talk"
    ended = fork_server.run(["-c", code, str(path)], timeout=240)
    assert ended.returncode == -9, ended.stderr
    from saccade import LLM

    llm = LLM("retriever", kv_memory="64MiB", enable_prefix_caching=False)
    restored = llm.restore(path)
    assert [one["role"] for one in restored.messages] == ["user", "assistant"]
    asked = "What is the code of the red house?"
    answer = restored.chat(asked, SamplingParams(max_tokens=8))
    with llm.session(policy="lfps") as session:
        session.chat("The code of the red house is 4172. Remember it.", SamplingParams(max_tokens=8))
        assert session.chat(asked, SamplingParams(max_tokens=8)).outputs[0].text == answer.outputs[0].text
    assert answer.report["cached_tokens"] > 0


def test_an_evicted_session_saves_what_was_said(llm, tiny_llama, tmp_path):
    with llm.session() as session:
        first = session.generate(FIRST, SCORED)
        session.sequence.drop_kv()
        session.save(tmp_path / "talk")
        expected = session.generate(SECOND, SCORED)
    other = make(tiny_llama)
    restored = other.restore(tmp_path / "talk")
    assert restored.token_ids == FIRST + tokens(first)
    same(restored.generate(SECOND, SCORED), expected)


@pytest.mark.parametrize(
    "policy", ["dense", "h2o(budget=48)", "flexprefill(gamma=0.5, block_size=64, min_budget=0)+lfps"]
)
def test_what_is_torn_is_computed_again_or_refused(llm, other, tmp_path, policy):
    """Flipped bits, cut ends, garbage: the next turn is that of the session that stayed, or an error names the file."""
    path = tmp_path / "talk"
    with llm.session(policy=policy) as session:
        session.generate(FIRST, SCORED)
        session.save(path)
        expected = session.generate(SECOND, SCORED)
    whole, rng = path.read_bytes(), random.Random(7)
    recomputed, refusals = 0, []
    for number in range(24):
        torn = bytearray(whole)
        if number % 3 == 0:
            del torn[rng.randrange(len(torn)) :]
        else:
            place = rng.randrange(len(torn)) if number % 2 else rng.randrange(3000)
            torn[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(torn))
        try:
            restored = other.restore(path)
        except RequestError as error:
            refusals.append(str(error))
            continue
        recomputed += restored.note is not None
        if restored.note is None:  # a flipped bit of what was said last, say, changes no answer
            assert bytes(torn) != whole
        same(restored.generate(SECOND, SCORED), expected)
        restored.close()
    assert recomputed
    assert refusals
    assert all(str(path) in text or "its tokens are not" in text for text in refusals)
    assert other.pool.used_blocks == 0


def test_records_of_others_are_refused_with_the_way_out(llm, tiny_llama, tmp_path):
    path = tmp_path / "talk"
    with llm.session(policy="flexprefill(gamma=0.5, block_size=64, min_budget=0)+topk(k=24)") as session:
        session.generate(FIRST, SCORED)
        session.save(path)
        said = session.token_ids
    twin = make(make_checkpoint("llama", tmp_path / "twin", max_position_embeddings=2048, seed=9))
    with pytest.raises(RequestError, match=r"another model.*recompute=True"):
        twin.restore(path)
    restored = twin.restore(path, policy="dense", recompute=True)
    assert restored.token_ids == said
    assert "computed again" in restored.note
    same(restored.generate(SECOND, SCORED), twin.generate(said + SECOND, SCORED)[0])
    with pytest.raises(RequestError, match=r"prefill_chunk=64.*recompute=True"):
        make(tiny_llama, chunk=32).restore(path)
    for content, match in ((b"no record", "is no saccade session"), (b"", "is no saccade session")):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(RequestError, match=match):
            llm.restore(tmp_path / "other")
    with pytest.raises(RequestError, match="does not exist"):
        llm.restore(tmp_path / "nowhere")
    with pytest.raises(RequestError, match=r"cannot be read|is no"):
        llm.restore(tmp_path)
    write_record(tmp_path / "other", Record("something else", {}, {"x": torch.zeros(3)}))
    with pytest.raises(RequestError, match="is a something else, not a saccade session"):
        llm.restore(tmp_path / "other")


def test_a_context_without_room_is_computed_when_there_is(llm, tiny_llama, tmp_path):
    with llm.session() as session:
        session.generate(FIRST, SCORED)
        session.save(tmp_path / "talk")
        expected = session.generate(SECOND, SCORED)
    small = make(tiny_llama, blocks=3 * 8)
    running = start(small, random_ids(60, seed=4), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        small.engine.step()
    saved = read_record(tmp_path / "talk", "saccade session")
    number, note = small.engine.sessions.restore(
        saved_module.SavedSession(saved.data["engine"], saved.tensors), saved.damaged, False
    )
    assert "no room" in note
    finish(small.engine)
    assert running.error is None
    request = small.engine.add(SECOND, SCORED, Policy(), small.engine.sessions[number])
    finish(small.engine)
    assert request.final_ids == tokens(expected)


def test_a_session_that_answers_is_not_saved(llm, tmp_path):
    with llm.session() as session:
        stream = session.stream(FIRST, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
        next(stream)
        with pytest.raises(RequestError, match="still answering"):
            session.save(tmp_path / "talk")
        stream.close()
        session.save(tmp_path / "talk")
    with pytest.raises(RequestError, match="closed"):
        session.save(tmp_path / "talk")
    assert [one.name for one in tmp_path.iterdir()] == ["talk"]


def test_what_is_saved_pickles(llm):
    with llm.session(policy="cis(k=16, sinks=2, local=8)") as session:
        session.generate(FIRST, SCORED)
        saved = llm.loop.save(session.id)
    again = pickle.loads(pickle.dumps(saved))
    assert again.data == saved.data
    assert again.token_ids == saved.token_ids


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
POINTS = ("touch", "save_file", "fsync", "replace", "mkdir")


@pytest.mark.parametrize("point", POINTS)
def test_a_disk_that_is_full_leaves_what_was_there(llm, tmp_path, monkeypatch, point):
    """Wherever the system says so; the error says of which file, how much is to be written, and how much is free."""
    path = tmp_path / "talk"

    def full(*args, **kwargs):
        if point == "save_file":  # as safetensors tells it, of a file that is half written
            Path(args[1]).write_bytes(bytes(1000))
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise FULL

    with llm.session() as session:
        session.generate(FIRST, SCORED)
        session.save(path)
        before = path.read_bytes()
        session.generate(SECOND, SCORED)
        owner = {"save_file": safetensors.torch, "fsync": os}.get(point, Path)
        monkeypatch.setattr(owner, point, full)
        said = rf"{path} cannot be written: No space left.*KiB are to be written and .* free"
        with pytest.raises(RequestError, match=said):
            session.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [Path(one).name for one in tmp_path.iterdir()] == ["talk"]


def test_a_file_that_may_not_grow_leaves_what_was_there(llm, tmp_path):
    """By the system's own limit, at many lengths."""
    resource = pytest.importorskip("resource")
    path, (soft, hard) = tmp_path / "talk", resource.getrlimit(resource.RLIMIT_FSIZE)
    with llm.session() as session:
        session.generate(FIRST, SCORED)
        session.save(path)
        before = path.read_bytes()
        for most in (0, 1, 4096, len(before) // 2, len(before) - 1):
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
                with pytest.raises(RequestError, match=r"File too large.*are to be written"):
                    session.save(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert path.read_bytes() == before
            assert [Path(one).name for one in tmp_path.iterdir()] == ["talk"]
