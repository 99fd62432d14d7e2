"""Two processes that share out the KV heads of one model answer as one process does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import fork_server
import pytest
import torch
from engine_helpers import EVERY, finish
from rank_helpers import BLOCKS, CLOSE, LAYERS, PROMPTS, greedy, make, same
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams, ranks
from saccade.cli.options import ENGINE, takes_engine
from saccade.engine.observing import observing
from saccade.engine.pieces import BeginRestore, CaptureSession, CopyRows, FinishRestore, LoadRows, act
from saccade.engine.ranks import counts, worker
from saccade.engine.settings.config import EngineConfig
from saccade.engine.settings.rank_limits import why_not
from saccade.errors import PolicyError, RequestError, SaccadeError
from saccade.methods import prehoc
from saccade.methods.offline import KINDS
from saccade.methods.policy import Policy
from saccade.models.calibration import Calibrations, save_calibration
from saccade.models.loader import load_model
from saccade.selection.head_part import HeadPart
from saccade_contrib.channels import CALIBRATION


@pytest.fixture(scope="module")
def engines(tiny_llama, quickly_started):
    """Those that ``pair`` has made: lists of an engine of one process and one of two."""
    made: list[tuple[LLM, LLM]] = []
    yield made
    for llm in (llm for both in made for llm in both):
        llm.reset_prefix_cache()
        assert llm.pool.used_blocks == 0
        link = llm.engine.link
        lost = link is not None and link.lost is not None
        llm.close()
        assert link is None or [process.poll() for process in link.processes] == [-9 if lost else 0]


@pytest.fixture
def pair(engines, tiny_llama):
    """An engine of one process and one of two; whatever they ran, no block is held in the end."""
    if not engines or engines[-1][1].engine.link.lost is not None:
        options = {"exact": False, "enable_prefix_caching": True}
        engines.append((make(tiny_llama, 1, **options), make(tiny_llama, 2, **options)))
    for llm in engines[-1]:  # what an earlier test left with one of them alone, a method would learn from less of
        llm.engine.prefixes.clear()
    return engines[-1]


@pytest.fixture(scope="module")
def quickly_started():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
        yield


def test_each_rank_stores_its_own_heads(pair):
    one, two = pair
    assert two.pool.num_blocks == one.pool.num_blocks == LAYERS * BLOCKS
    assert (one.pool.format.kv_heads, two.pool.format.kv_heads) == (2, 1)
    assert 2 * two.pool.format.block_bytes == one.pool.format.block_bytes


def test_many_requests_in_chunks(pair):
    """More than the pool holds at once, so some wait, and others give their blocks up and begin again."""
    one, two = pair
    same(one.generate(PROMPTS, greedy(41)), two.generate(PROMPTS, greedy(41)))


def test_a_sparse_prefill_exchanges_counts_once(pair, monkeypatch):
    """For its report: in each step that it were asked, ranks on devices would wait for these."""
    exchanged, real = [], counts.exchange
    for module in (worker, counts):
        monkeypatch.setattr(module, "exchange", lambda *given: exchanged.append(1) or real(*given))
    policy = "flexprefill(min_budget=32, block_size=64, gamma=0.3)"
    answers = [llm.generate(PROMPTS[2], greedy(1), policy=policy) for llm in pair]  # five chunks
    same(*answers)
    mine, theirs = (answer[0].report["prefill"] for answer in answers)
    for name in (
        "density",
        "keys_attended",
        "keys_scored",
        "density_per_head",
        "backends",
    ):
        assert mine[name] == theirs[name], name
    assert mine["density"] < 1
    assert len(exchanged) <= 2


def test_prompts_that_are_scored(pair):
    one, two = pair
    params = greedy(2, prompt_logprobs=1)
    theirs, ours = (llm.generate(PROMPTS[0], params)[0].prompt_logprobs for llm in pair)
    same(one.generate(PROMPTS[0], params), two.generate(PROMPTS[0], params))
    for left, right in zip(theirs[1:], ours[1:], strict=True):
        assert {token: at.logprob for token, at in left.items()} == pytest.approx(
            {token: at.logprob for token, at in right.items()}, abs=CLOSE
        )


def test_samples_fork(pair):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    theirs, ours = (llm.generate(PROMPTS[1], params) for llm in pair)
    same(theirs, ours)
    assert [report["cached_tokens"] for report in ours[0].reports] == [
        report["cached_tokens"] for report in theirs[0].reports
    ]
    assert ours[0].reports[1]["prefill"]["tokens"] == 0


def test_prefixes_are_shared_and_given_up(pair):
    """Again and again, each time behind another prefix: what is kept fills the pool, and makes room."""
    one, two = pair
    for seed in range(4):
        asked = [[*random_ids(200, seed=50 + seed), *random_ids(count, seed=count)] for count in (30, 40)]
        for ids in asked:
            same(one.generate(ids, greedy(3)), two.generate(ids, greedy(3)))
    assert two.engine.prefixes.hits == one.engine.prefixes.hits > 0


def test_a_session_whose_turn_is_cancelled(pair):
    answers = []
    for llm in pair:
        engine = llm.engine
        session = engine.sessions.open()
        sequence, said = engine.sessions[session], []
        for turn, keep in ((PROMPTS[0], None), (PROMPTS[3], 100), (PROMPTS[1], None)):
            request = engine.add(turn, greedy(6), Policy(), sequence, keep)
            for _ in range(3):
                engine.step()
            engine.cancel(request)
            request = engine.add(turn, greedy(6), Policy(), sequence, keep)
            finish(engine)
            said.append(request.final_ids)
            assert sequence.kv.length == sequence.computed
        engine.sessions.forget(session)
        answers.append(said)
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == 3


@pytest.mark.parametrize("way", ["whole", "in segments"])
def test_a_saved_session_goes_on_with_any_number_of_ranks(pair, way):
    answers, saved = [], []
    for llm in pair:
        llm.engine.prefixes.clear()  # what is brought back takes nobody's room
        sessions = llm.engine.sessions
        number = sessions.open()
        llm.engine.add(PROMPTS[0], greedy(4), Policy(), sessions[number])
        finish(llm.engine)
        saved.append(kept(llm, number, way))
        sessions.forget(number)
    for llm, (whole, rows) in product(pair, saved):
        assert whole.data["kv"]["kv_heads"] == 2
        number, note = brought_back(llm, whole, rows, way)
        assert note is None
        request = llm.engine.add(PROMPTS[3], greedy(4), Policy(), llm.engine.sessions[number])
        finish(llm.engine)
        assert request.report.cached_tokens == 233
        answers.append(request.final_ids)
        llm.engine.sessions.forget(number)
        llm.engine.prefixes.clear()
    assert answers == answers[:1] * 4


def kept(llm, session: int, way: str):
    """A session as it is saved whole, or in segments of 64 tokens with the rows of those."""
    sessions = llm.engine.sessions
    if way == "whole":
        return sessions.save(session), []
    captured = act(sessions, CaptureSession(session, 64))
    rows = [act(sessions, CopyRows(session, captured.mark, start, start + 64)) for start in range(0, 192, 64)]
    return replace(captured.saved, data={**captured.saved.data, "model": sessions.identity.data}), rows


def brought_back(llm, saved, rows, way: str):
    if way == "whole":
        return llm.engine.sessions.restore(saved, [], False)
    session = act(llm.engine.sessions, BeginRestore(saved))
    for number, tensors in enumerate(rows):
        assert act(llm.engine.sessions, LoadRows(session, 64 * number, tensors)) is None
    return session, act(llm.engine.sessions, FinishRestore(session, saved))[1]


def test_a_session_whose_method_knows_something_stays_with_one_process(pair):
    one, two = pair
    session = one.session("psa(unit=layer)")
    session.generate("abc", greedy(2))
    saved = one.engine.sessions.save(session.id)
    session.close()
    with pytest.raises(PolicyError, match="tensor_parallel_size=1"):
        two.engine.sessions.restore(saved, [], False)
    session = two.session("lfps")
    session.generate(PROMPTS[0], greedy(2))
    with pytest.raises(PolicyError, match="keeps a state cannot be saved with tensor_parallel_size=2; use"):
        two.engine.sessions.save(session.id)
    session.close()


APART = [policy for policy in EVERY if why_not(policy) is None]


def test_every_registered_method_runs():
    assert [policy.text for policy in EVERY if why_not(policy)] == []


def test_auto_is_dense_unless_it_is_told_more(pair):
    prompt = PROMPTS[0]
    own = [llm.generate(prompt, greedy(16), policy="auto(least=1, method=lfps)")[0] for llm in pair]
    assert [one.report["policy"] for one in own] == ["lfps", "lfps"]
    assert own[0].outputs[0].token_ids == own[1].outputs[0].token_ids
    offer = pair[1].engine.automatic.offer()
    assert (offer.prefill_from, offer.decode_from) == (None, None)
    assert "tensor_parallel_size=2" in offer.said


@pytest.mark.parametrize("policy", APART, ids=lambda policy: policy.text)
def test_every_method_that_chooses_by_head(pair, policy):
    """Tokens, and reports of all heads, as of one process: prompts in chunks, batches, a second turn."""
    for llm in pair:
        llm.reset_prefix_cache()
    own = [llm.generate(PROMPTS[:2], greedy(12), policy=policy) for llm in pair]
    same(*own)
    for mine, theirs in zip(*own, strict=True):
        alike(mine.reports[0], theirs.reports[0])
    turns = []
    for llm in pair:
        session = llm.session(policy)
        turns.append([session.generate(ids, greedy(5)) for ids in PROMPTS[2:4]])
        session.close()
    for mine, theirs in zip(*turns, strict=True):
        same([mine], [theirs])
        alike(mine.reports[0], theirs.reports[0])


def alike(mine, theirs) -> None:
    """Two reports of the same work; counts that are means over heads may differ by their rounding."""
    for phase in ("prefill", "decode"):
        own, other = mine[phase], theirs[phase]
        for name in ("keys_attended", "keys_causal", "tokens", "searches", "search_ratio", "selections"):
            assert own[name] == other[name], name
        for name in ("keys_scored", "keys_estimated"):
            assert own[name] == pytest.approx(other[name], abs=8 + own[name] / 500), name


@pytest.mark.parametrize(
    "policy", ["quest(budget=64)+psaw", "flexprefill(min_budget=0)+lfps+etf", "arkvale(unit=kv_head)"]
)
def test_windows_freezes_and_units(pair, policy):
    same(*(llm.generate(PROMPTS[:2], greedy(), policy=policy) for llm in pair))


@pytest.mark.parametrize("policy", ["lfps", "cis(k=30)", "h2o(budget=60)", "psa(epsilon=0.5, microbatch=1)"])
def test_sparse_turns_that_are_cancelled(pair, policy):
    answers = []
    for llm in pair:
        engine, chosen = llm.engine, Policy.parse(policy)
        session = engine.sessions.open()
        sequence, said = engine.sessions[session], []
        for turn, keep in ((PROMPTS[0], None), (PROMPTS[3], 100), (PROMPTS[1], None)):
            request = engine.add(turn, greedy(6), chosen, sequence, keep)
            for _ in range(6):
                engine.step()
            engine.cancel(request)
            request = engine.add(turn, greedy(6), chosen, sequence, keep)
            finish(engine)
            said.append(request.final_ids)
        engine.sessions.forget(session)
        answers.append(said)
    assert answers[0] == answers[1]


def test_calibrations_are_shared_out(tmp_path):
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=2)
    spec = load_model(folder).spec
    half = replace(spec, heads=spec.heads // 2, kv_heads=spec.kv_heads // 2)
    rng = torch.Generator().manual_seed(3)
    for kind in (CALIBRATION, prehoc.LOCALITY):
        shapes = KINDS[kind].shapes(spec.heads, spec.kv_heads, spec.head_dim)
        layers = [
            {name: torch.rand(shape, generator=rng) for name, shape in shapes.items()} for _ in range(spec.layers)
        ]
        save_calibration(folder, kind, layers)
        parts = [Calibrations(half, folder, HeadPart.of(2, rank, 2)).layer([kind], 1) for rank in (0, 1)]
        for name, whole in layers[1].items():
            if kind == prehoc.LOCALITY:
                assert all(torch.equal(part[name], whole) for part in parts)
            else:
                assert torch.equal(torch.cat([part[name] for part in parts]), whole)


def test_a_stream_that_is_left(pair):
    for llm in pair:
        for _ in llm.stream(PROMPTS[2], greedy(40)):
            break
    one, two = pair
    same(one.generate(PROMPTS[2], greedy()), two.generate(PROMPTS[2], greedy()))


def test_what_several_ranks_do_not_serve_is_refused(pair):
    _, two = pair
    with pytest.raises(PolicyError, match=r"tensor_parallel_size=2: of psa, its rule asks all heads.*unit=kv_head"):
        two.generate(PROMPTS[0], greedy(), policy="psa(unit=layer)")
    with pytest.raises(RequestError, match=r"bounds=0\.1 of 'etf' are fitted to .* all heads.*tensor_parallel_size=1"):
        two.engine.add(PROMPTS[0], greedy(bounds=0.1), Policy.parse("quest+etf"))
    with pytest.raises(RequestError, match="observe with tensor_parallel_size=1"), observing(two.engine, print):
        pass


def test_a_server_leaves_out_what_its_ranks_do_not_have():
    """Its own max_token_gap; one that is asked for is refused."""
    made: list[EngineConfig] = []

    def command(config: EngineConfig) -> None:
        made.append(config)

    serve = takes_engine(max_token_gap="0.5")(command)
    given = {name: default for name, (_, default) in ENGINE.items()} | {"device": "cpu", "max_token_gap": "0.5"}
    serve(**given)
    serve(**given | {"tensor_parallel_size": 2})
    assert [one.token_gap for one in made] == [0.5, None]
    with pytest.raises(SaccadeError, match="leave max_token_gap out"):
        serve(**given | {"tensor_parallel_size": 2, "max_token_gap": "0.3"})


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"policy": "psa(unit=layer)"}, PolicyError, "of psa, its rule asks all heads of a layer"),
        ({"policy": "arkvale", "kv_host": "1MiB"}, PolicyError, "heads choose together, and over kv_host or kv_disk"),
        ({"max_token_gap": 0.1}, SaccadeError, "leave max_token_gap out"),
        ({"kv_memory": "profile"}, SaccadeError, "kv_memory='profile' does not go with"),
        ({"tensor_parallel_size": 0}, SaccadeError, "tensor_parallel_size=0 must be an integer >= 1"),
        ({"tensor_parallel_size": True}, SaccadeError, "must be an integer >= 1"),
    ],
)
def test_settings_that_do_not_go_together(options, error, said):
    with pytest.raises(error, match=said):
        EngineConfig(**{"model": "retriever", "device": "cpu", "tensor_parallel_size": 2, **options})
