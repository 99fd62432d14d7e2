"""Models whose layers keep a state beside layers that attend: what is cut, shared, kept and brought back is what a
fresh run of transformers' own model computes."""

from __future__ import annotations

import random

import pytest
import torch
from covering import quick
from engine_helpers import finish, start, tokens
from method_matrix import MATRIX
from model_pairs import ANSWER, GREEDY, Pair
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, one_thread, oracle_logits, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.errors import CapacityError, PolicyError
from saccade.kv.states import StatePool
from saccade.methods.policy import Policy

FAST = ("lfm2", "qwen3_5_text")
OTHERS = ("qwen3_next", "lfm2_moe", "olmo_hybrid", "granitemoehybrid", "falcon_h1", "nemotron_h", "bamba")
FAMILIES = quick((*FAST, *OTHERS), lambda one: one in FAST)
# Of a test that takes longer, or hangs on the engine more than on the family.
costly = pytest.mark.parametrize(
    "pair", quick((*FAST, *OTHERS), lambda one: one == FAST[0]), indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llm(pair):
    return pair.llm()


def test_ragged_prompts_in_chunks_batched(pair, llm):
    prompts = [random_ids(length, seed=length) for length in (61, 1, 24, 200)]
    for ids, output in zip(prompts, llm.generate(prompts, GREEDY)):
        pair.check(ids, output)
    assert llm.pool.states.pinned == 0


def test_packed_rows_of_many_sequences(pair):
    llm = pair.llm(exact=False)
    prompts = [random_ids(length, seed=length) for length in (33, 2, 170, 48)]
    for ids, output in zip(prompts, llm.generate(prompts, GREEDY)):
        pair.check(ids, output)


def test_turns_go_on_where_the_last_one_ended(pair, llm):
    context: list[int] = []
    with llm.session() as session:
        for number, length in enumerate((50, 7, 30)):
            turn = random_ids(length, seed=number)
            stored = max(0, len(context) - 1)
            context += turn
            output = session.generate(turn, GREEDY)
            assert output.report["cached_tokens"] == stored
            assert output.report["recomputed_tokens"] == 0
            context += pair.check(context, output)


def test_an_edit_goes_back_to_a_snapshot_before_it(pair, llm):
    """The prompt of the second turn is changed: what came before stays, but for the tokens since the last snapshot."""
    first, second = random_ids(60, seed=1), random_ids(40, seed=2)
    with llm.session() as session:
        said = first + tokens(session.generate(first, GREEDY))
        end = len(said) - 1  # the last token was never computed
        said += second + tokens(session.generate(second, GREEDY))
        edited = said[: end + 21] + random_ids(15, seed=3)
        output = session.complete(edited, GREEDY)
        pair.check(edited, output)
        # The border that it goes back to is the turn's end, 21 tokens before the edit.
        assert output.report["recomputed_tokens"] == 21
        assert output.report["cached_tokens"] == end
        assert any("computed again" in note for note in output.report["notes"])
        within = first[:30] + random_ids(5, seed=4)
        pair.check(within, session.complete(within, GREEDY))


def test_a_cancelled_turn_leaves_nothing(pair, llm):
    first, second, third = (random_ids(length, seed=length) for length in (40, 55, 9))
    with llm.session() as session:
        said = first + tokens(session.generate(first, GREEDY))
        stream = session.stream(second, GREEDY)
        next(stream)
        stream.close()
        assert session.token_ids == said
        output = session.generate(third, GREEDY)
        pair.check(said + third, output)
        assert output.report["recomputed_tokens"] == 0


@costly
@pytest.mark.parametrize("caching", [False, True])
def test_samples_of_one_prompt(pair, caching):
    llm, ids = pair.llm(enable_prefix_caching=caching), random_ids(50, seed=5)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
    output = llm.generate(ids, params)[0]
    answers = [tuple(pair.check(ids, output, number, greedy=False)) for number in range(3)]
    assert len(set(answers)) > 1


@costly
def test_preempted_requests_compute_again(pair, llm, monkeypatch):
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 6, device))
    blocks = 24 * llm.model.spec.layers
    llm = pair.llm(kv_memory=6 * llm.pool.states.format.nbytes + blocks * llm.pool.format.block_bytes)
    prompts = [random_ids(90, seed=number) for number in range(4)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1))
    assert sum(output.report["preemptions"] for output in outputs) > 0
    for ids, output in zip(prompts, outputs):
        pair.check(ids, output)


def test_prefixes_are_shared_where_a_snapshot_stands(pair):
    llm, document = pair.llm(enable_prefix_caching=True), random_ids(100, seed=6)
    pair.check(document, llm.generate(document, GREEDY)[0])
    for number in range(2):
        ids = document + random_ids(20, seed=10 + number)
        output = llm.generate(ids, GREEDY)[0]
        pair.check(ids, output)
        assert output.report["cached_tokens"] == 96  # whole blocks of 16, before the document's last token
    other = document[:50] + random_ids(30, seed=20)
    output = llm.generate(other, GREEDY)[0]
    pair.check(other, output)
    together = [document + random_ids(5 + number, seed=30 + number) for number in range(3)]
    for ids, output in zip(together, llm.generate(together, GREEDY)):
        pair.check(ids, output)
    llm.reset_prefix_cache()
    assert llm.pool.states.used == 0


def test_prefixes_are_kept_where_several_chunks_or_rows_apart_reach_them(pair):
    """``snapkv`` observes the prompt's last 64 rows, which are those of three chunks; under a gap chunks run apart."""
    document = random_ids(110, seed=60)
    longer = document + random_ids(60, seed=61)
    llm = pair.llm(enable_prefix_caching=True)
    policy = "snapkv(capacity=70)"
    llm.generate(document, GREEDY, policy=policy)
    assert llm.generate(longer, GREEDY, policy=policy)[0].report["cached_tokens"] == 32
    llm = pair.llm(enable_prefix_caching=True, prefill_chunk=40, max_token_gap=0.001)
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    decodes = engine.add(random_ids(9, seed=62), params, llm.policy)
    while not decodes.output_ids:
        engine.step()
    for ids, cached in ((document, 0), (longer, 96)):
        request = engine.add(ids, GREEDY, llm.policy)
        while not request.finished:
            engine.step()
        assert request.error is None
        assert request.report.as_dict()["cached_tokens"] == cached


@pytest.mark.parametrize("family", ["lfm2", "olmo_hybrid", "qwen3_moe"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_modules_in_bfloat16_take_prompts_of_several_chunks(family, quantize, tmp_path):
    """Chunks before the last ask the head for no row."""
    folder, ids = make_checkpoint(family, tmp_path / "made"), random_ids(50, seed=3)
    made = []
    for chunk in (24, 64):
        with LLM(
            folder,
            dtype="bfloat16",
            kv_memory="8MiB",
            prefill_chunk=chunk,
            quantize=quantize,
            enable_prefix_caching=False,
        ) as llm:
            (output,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            assert output.error is None
            made.append(len(output.outputs[0].token_ids))
    assert made == [4, 4]


def test_a_saved_session_has_its_state(pair, llm, tmp_path):
    first, second = random_ids(45, seed=7), random_ids(12, seed=8)
    with llm.session() as session:
        said = first + tokens(session.generate(first, GREEDY))
        session.save(tmp_path / "talk")
    other = pair.llm()
    with other.restore(tmp_path / "talk") as session:
        output = session.generate(second, GREEDY)
        pair.check(said + second, output)
        assert output.report["recomputed_tokens"] == 0
        assert output.report["cached_tokens"] == len(said) - 1


@costly
def test_a_named_session_has_its_state(pair, tmp_path):
    first, second = random_ids(45, seed=7), random_ids(12, seed=8)
    options = {"session_dir": tmp_path / "sessions"}
    with pair.llm(**options) as llm, llm.session(name="talk") as session:
        said = first + tokens(session.generate(first, GREEDY))
    with pair.llm(**options) as llm, llm.session(name="talk") as session:
        output = session.generate(second, GREEDY)
        pair.check(said + second, output)
        assert output.report["recomputed_tokens"] == 0


@costly
def test_few_states_serve_many_sessions(pair, monkeypatch):
    """Three states in all: sessions take them from each other, and say that they computed again."""
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 3, device))
    llm = pair.llm()
    talks = [(llm.session(), []) for _ in range(5)]
    recomputed = 0
    for turn in range(2):
        for number, (session, context) in enumerate(talks):
            said = random_ids(20 + 3 * number, seed=100 * turn + number)
            context += said
            output = session.generate(said, GREEDY)
            context += pair.check(context, output)
            recomputed += output.report["recomputed_tokens"]
            assert bool(output.report["recomputed_tokens"]) == any("again" in one for one in output.report["notes"])
    assert recomputed > 0
    assert llm.pool.states.given_up > 0
    for session, _ in talks:
        session.close()
    assert llm.pool.states.used == 0


@costly
def test_a_crowd_in_little_room_answers_as_alone(pair, llm, monkeypatch):
    """Documents, questions about them, cancellations, preemptions, and four states for all of it."""
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 4, device))
    room = 4 * llm.pool.states.format.nbytes + 26 * llm.model.spec.layers * llm.pool.format.block_bytes
    few, rng = (
        pair.llm(kv_memory=max(room, 33 * llm.pool.states.format.nbytes), enable_prefix_caching=True),
        random.Random(1),
    )
    documents = [random_ids(length, seed=length) for length in (70, 100, 133)]
    asked = []
    for number in range(24):
        document = rng.choice(documents)
        ids = document[: rng.choice((len(document), 60))] + random_ids(rng.randrange(1, 30), seed=number)
        asked.append(start(few, ids, GREEDY))
        for _ in range(rng.randrange(4)):
            few.engine.step()
        if rng.random() < 0.2:
            few.engine.cancel(rng.choice(asked))
    finish(few.engine)
    answered = [one for one in asked if one.finish_reason == "length"]
    assert len(answered) > 12
    for one in answered:
        logits = oracle_logits(pair.theirs, one.prompt + one.final_ids)[len(one.prompt) - 1 : -1]
        assert len(one.final_ids) == ANSWER
        assert (logits.gather(1, torch.tensor(one.final_ids)[:, None])[:, 0] >= logits.amax(-1) - 2e-4).all()
    assert sum(one.report.cached_tokens for one in answered) > 0
    few.reset_prefix_cache()
    assert (few.pool.states.used, few.pool.used_blocks) == (0, 0)


SHOWN = ("psa", "cis", "infinigen", "flexprefill", "lossless")  # methods of the quick suite
SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
TALKS = [  # dense prefills; states that begin with a prefill, follow it, or evict; chunks that choose
    "topk(k=12)",
    "h2o(budget=24)",
    *(
        pytest.param(one, marks=pytest.mark.thorough)
        for one in (
            "psa(epsilon=0.4, block_size=16, microbatch=1)",
            "snapkv(capacity=70)",
            "cis(k=8, sinks=2, local=4)",
            "lfps(k=8, blocks=2, least=8, history=keep)",
            f"{SPARSE}+quest(budget=32, dense_layers=0)",
            f"{SPARSE}+lfps(k=8, blocks=2, least=8, history=keep)",
        )
    ),
]


@costly
@pytest.mark.parametrize("policy", TALKS)
def test_sparse_talks_are_what_they_are_with_room(pair, llm, monkeypatch, policy):
    """Sessions that take states from each other, and an edit in the midst of a prompt, answer as where all is kept and
    nothing was edited."""
    monkeypatch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, 3, device))
    few, recomputed = pair.llm(), 0
    talks = [(few.session(policy=policy), llm.session(policy=policy)) for _ in range(3)]
    for turn in range(3):
        for number, (own, other) in enumerate(talks):
            said = random_ids(40 + 9 * number, seed=100 * turn + number)
            if turn == 2 and "history=keep" not in policy:  # said otherwise first, which it would remember
                first = own.generate(said[:29] + random_ids(12, seed=1), GREEDY)
                assert first.error is None, first.error
                output = own.complete(other.token_ids + said, GREEDY)
            else:
                output = own.generate(said, GREEDY)
            assert output.error is None, output.error
            assert tokens(output) == tokens(other.generate(said, GREEDY))
            recomputed += output.report["recomputed_tokens"]
    assert recomputed > 0


@costly
@pytest.mark.parametrize("at", [0, 1])
def test_a_step_that_breaks_is_computed_again(pair, llm, monkeypatch, at):
    """Layers before the one that broke have moved their states on: those are thrown away."""
    from saccade.models.modules import ModuleLayers

    run, calls = ModuleLayers.run, []

    def breaks(self, index, *given):
        calls.append(index)
        if calls.count(2) == 2 + at and index == 2:
            raise RuntimeError("broken on purpose")
        return run(self, index, *given)

    monkeypatch.setattr(ModuleLayers, "run", breaks)
    prompts = [random_ids(60, seed=1), random_ids(31, seed=2)]
    requests = [start(llm, ids, GREEDY) for ids in prompts]
    finish(llm.engine)
    monkeypatch.undo()
    survivors = [one for one in requests if one.error is None]
    for one in survivors:
        ids = one.prompt
        answer = one.final_ids
        logits = oracle_logits(pair.theirs, ids + answer)[len(ids) - 1 : -1]
        assert (logits.gather(1, torch.tensor(answer)[:, None])[:, 0] >= logits.amax(-1) - 2e-4).all()
    assert survivors
    assert llm.pool.states.pinned == 0


@costly
def test_audits_leave_states_as_they_were(pair):
    llm, ids = pair.llm(), random_ids(80, seed=9)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, audit_steps=1.0)
    output = llm.generate(ids, params, policy="topk(k=10000)")[0]
    pair.check(ids, output)
    assert output.report["audit"]["agreement"]["mean"] == 1


@costly
def test_suspended_prefills_keep_their_states(pair):
    llm = pair.llm(max_token_gap=0.001)
    prompts = [random_ids(length, seed=length) for length in (150, 20, 130)]
    for ids, output in zip(prompts, llm.generate(prompts, GREEDY)):
        pair.check(ids, output)


@costly
@pytest.mark.parametrize(
    "policy",
    quick([Policy.parse(case.methods()[0]).text for case in MATRIX], lambda one: one.split("(")[0] in SHOWN),
)
def test_sparse_methods_read_the_layers_that_attend(pair, llm, policy):
    """Under each method turns go on from kept states as a fresh run of the whole does."""
    ids = random_ids(120, seed=11)
    parsed = Policy.parse(policy)
    if parsed.freeze is not None:
        with pytest.raises(PolicyError, match="layers that keep a state"):
            llm.generate(ids, GREEDY, policy=policy)
        return
    output = llm.generate(ids, GREEDY, policy=policy)[0]
    assert output.error is None, output.error
    assert output.report["attention_layers"] == list(llm.model.spec.places)
    with llm.session(policy=policy) as session:
        session.generate(ids[:70], GREEDY)
        assert tokens(session.complete(ids, GREEDY, keep=0)) == tokens(output)


@pytest.mark.parametrize(
    ("family", "limits"),
    [("nemotron_h", {"time_step_min": 0.3}), ("granitemoehybrid", {"time_step_limit": (0.2, 0.6)})],
)
def test_a_token_by_itself_keeps_the_limits_of_time_steps(family, limits, tmp_path):
    """transformers has them in prompts alone: a token would be another one by how rows were dealt out."""
    pair = Pair(make_checkpoint(family, tmp_path / "model", **limits))
    ids = random_ids(40, seed=2)
    with pair.llm(prefill_chunk=13) as llm:
        pair.check(ids, llm.generate(ids, GREEDY)[0])


def test_layers_that_draft_ahead_are_left_out(tmp_path):
    """Qwen's checkpoints have some, beside the model."""
    folder = make_checkpoint("qwen3_5_text", tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(3, 5)}, file, metadata={"format": "pt"})
    pair = Pair(folder)
    with pair.llm() as llm:
        ids = random_ids(20, seed=1)
        pair.check(ids, llm.generate(ids, GREEDY)[0])
    with pair.llm(quantize="int8") as llm:
        assert llm.generate(ids, GREEDY)[0].error is None


@pytest.mark.thorough
def test_heads_of_256_twelve_to_a_kv_head(tmp_path):
    """Qwen3.5's attention: what kernels read under each kind of method is what torch reads."""
    sizes = {"head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 2, "num_hidden_layers": 2}
    kinds = ["linear_attention", "full_attention"]
    pair = Pair(make_checkpoint("qwen3_5_text", tmp_path / "model", **sizes, layer_types=kinds))
    ids = random_ids(150, seed=1)
    with pair.llm() as llm, pair.llm(backend="reference") as torchs:
        pair.check(ids, llm.generate(ids, GREEDY)[0])
        for policy in ("topk(k=24)", "psa(epsilon=0.4, block_size=16, microbatch=1)", "cis(k=16, sinks=2, local=8)"):
            ours, theirs = (one.generate(ids, GREEDY, policy=policy)[0] for one in (llm, torchs))
            assert ours.error is None, ours.error
            assert tokens(ours) == tokens(theirs)
            assert all(name.startswith("cpu") for name in ours.report["decode"]["backends"])


@costly
def test_what_is_refused_says_why(pair, llm):
    for policy in ("etf", "cpe", "psaw+etf(reuse=kv)"):
        with pytest.raises(PolicyError, match="layers that keep a state"):
            llm.generate(random_ids(5, seed=1), GREEDY, policy=policy)
    with pytest.raises(CapacityError, match="a quarter of it holds"):
        pair.llm(kv_memory=4 * pair.llm().model.spec.states.nbytes)
