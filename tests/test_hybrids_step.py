"""Decode steps of models with layers that keep a state in one C++ call: what layer after layer would make of them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from covering import quick
from engine_helpers import tokens
from test_hybrids import GREEDY, Pair
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.models import runner
from saccade.models.keeping_step import kept_step
from saccade.ops import cpu
from saccade.ops.cpu_structs import native
from saccade.ops.step_ops import ADD, TIMES_SIGMOID, OpList

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernels are not built")
WIDE = {  # heads whose rotated part is whole vectors
    "qwen3_5_text": {"head_dim": 64, "hidden_size": 72, "linear_value_head_dim": 24, "num_hidden_layers": 3},
    "lfm2": {"hidden_size": 128},
}


@pytest.fixture(scope="module", params=quick(tuple(WIDE), lambda one: one == "qwen3_5_text"))
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), **WIDE[request.param]))


@contextmanager
def by_layer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "kept_step", lambda *given: None)
        yield


def paths_of(output):
    return {one["path"] for one in output.report["decode"]["paths"]}


def test_a_crowd_that_comes_and_goes(pair):
    llm = pair.llm(exact=False)
    prompts = [random_ids(length, seed=length) for length in (61, 1, 24, 40)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=1) for n in (9, 3, 14, 6)]
    outputs = llm.generate(prompts, params)
    for ids, output in zip(prompts, outputs):
        pair.check(ids, output)
    assert "step" in paths_of(outputs[2])  # the others were steps beside prompts
    assert llm.pool.states.pinned == 0


@pytest.mark.parametrize("width", [36, 100])
def test_an_mlp_whose_width_is_no_whole_vectors_stays_with_modules(width, tmp_path):
    """In the one call its kernel would write behind the buffer of a row."""
    sizes = WIDE["qwen3_5_text"] | {"intermediate_size": width}
    one = Pair(make_checkpoint("qwen3_5_text", tmp_path / "model", **sizes))
    llm, ids = one.llm(exact=False), random_ids(40, seed=1)
    output = llm.generate(ids, GREEDY)[0]
    one.check(ids, output)
    with llm.session() as session:
        one.check(ids, session.generate(ids, GREEDY))


def test_turns_edits_and_samples(pair):
    llm = pair.llm(exact=False, enable_prefix_caching=True)
    first, second = random_ids(50, seed=1), random_ids(20, seed=2)
    with llm.session() as session:
        said = first + tokens(session.generate(first, GREEDY))
        output = session.generate(second, GREEDY)
        said += second + pair.check(said + second, output)
        assert paths_of(output) == {"step"}
        edited = said[:60] + random_ids(9, seed=3)
        pair.check(edited, session.complete(edited, GREEDY))
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6, ignore_eos=True, logprobs=1)
    output = llm.generate(first, params)[0]
    assert len({tuple(pair.check(first, output, number, greedy=False)) for number in range(3)}) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["dense", "psa(epsilon=0.4, block_size=16, microbatch=1)", "quest(budget=32)"])
def test_it_is_what_layer_by_layer_is(pair, policy, dtype):
    def run():
        options = {"kv_memory": "8MiB", "block_size": 16, "exact": False, "enable_prefix_caching": False}
        with LLM(pair.folder, dtype=dtype, **options) as llm:
            prompts = [random_ids(length, seed=length) for length in (120, 33)]
            return llm.generate(prompts, GREEDY, policy=policy)

    whole = run()
    with by_layer():
        apart = run()
    for left, right in zip(whole, apart):
        assert left.error is None, left.error
        assert tokens(left) == tokens(right)
        assert (paths_of(left), paths_of(right)) == ({"step"}, {"layer"})
        for mine, theirs in zip(left.outputs[0].logprobs, right.outputs[0].logprobs):
            (token,) = mine.keys()
            close = 1e-5 if dtype == "float32" else 2e-2
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=close)


@pytest.mark.parametrize("family", WIDE)
def test_exact_engines_give_the_same_bits(family, tmp_path):
    """Whichever way a token goes: beside others' prompts, or verified as a draft."""
    pair = Pair(make_checkpoint(family, tmp_path / "model", **WIDE[family]))
    ids = random_ids(61, seed=1)
    with pair.llm(exact=True) as llm, pair.llm(exact=True) as other:
        output = llm.generate(ids, GREEDY)[0]
        assert paths_of(output) == {"step" if family == "lfm2" else "layer"}
        with by_layer():
            apart = other.generate(ids, GREEDY)[0]
        drafted = llm.generate(ids, GREEDY, policy="lossless(draft=quest(budget=32, block_size=16), tokens=3)")[0]
        assert drafted.report["speculation"]["drafted"] > 0
        for one in (apart, drafted):
            assert one.error is None, one.error
            assert one.outputs[0].logprobs == output.outputs[0].logprobs


def test_drafts_beside_steps_in_one_call(pair):
    llm = pair.llm(exact=False)
    prompts = [random_ids(length, seed=length) for length in (61, 40)]
    policies = ["lossless(draft=quest(budget=32, block_size=16), tokens=3)", "dense"]
    for ids, output in zip(prompts, llm.generate(prompts, GREEDY, policy=policies)):
        pair.check(ids, output)
    assert llm.pool.states.pinned == 0


@pytest.mark.parametrize("isa", cpu.supported_isas() if cpu.available() else [])
def test_every_instruction_set(pair, isa):
    cpu.set_isa(isa)
    try:
        ids = random_ids(40, seed=4)
        output = pair.llm(exact=False).generate(ids, GREEDY)[0]
        pair.check(ids, output)
        assert "step" in paths_of(output)
    finally:
        cpu.set_isa(None)


def test_a_layer_that_computes_something_else_goes_by_itself(pair):
    llm = pair.llm()
    made = llm.engine.worker.runner
    given = made.model.get_decoder().layers, made.family, made.config, made.keeping, made.modules
    assert kept_step(*given) is not None
    mlp = getattr(given[0][0], "mlp", None) or given[0][0].feed_forward
    plain = mlp.forward
    mlp.forward = lambda x: 0.9 * plain(x)
    assert kept_step(*given) is None
    mlp.forward = plain
    assert kept_step(*given) is not None


def test_other_families_and_rounded_weights_go_layer_by_layer(tmp_path):
    with Pair(make_checkpoint("olmo_hybrid", tmp_path / "other", hidden_size=128)).llm() as llm:
        assert paths_of(llm.generate(random_ids(9, seed=1), GREEDY)[0]) == {"layer"}
    with Pair(make_checkpoint("lfm2", tmp_path / "rounded", hidden_size=128)).llm(quantize="int8") as llm:
        assert paths_of(llm.generate(random_ids(9, seed=1), GREEDY)[0]) == {"layer"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_rounds_as_torch_does(dtype):
    rows = torch.Generator().manual_seed(1)
    x, y = (torch.randn(5, 70, generator=rows).to(dtype) for _ in range(2))
    ops, wide = OpList(5, dtype), torch.zeros(5, 100, dtype=dtype)
    added = ops.mix(ADD, x, y, torch.empty_like(x))
    gated = ops.mix(TIMES_SIGMOID, x[:, 3:50], y[:, 20:67], wide[:, :47])
    ops.run()
    assert torch.equal(added, x + y)
    close = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    torch.testing.assert_close(gated, x[:, 3:50] * y[:, 20:67].sigmoid(), **close)
    assert not wide[:, 47:].any()


def test_what_does_not_fit_is_an_error():
    x = torch.zeros(2, 16)
    given = {"kind": ADD, "storage": 0, "threads": 1, "rows": 2, "width": 16, "x": x.data_ptr(), "x_stride": 16}
    with pytest.raises(ValueError, match="has what it takes"):
        native.MixCall(**given, out=x.data_ptr(), out_stride=16)
    ops, slots = OpList(2, torch.float32), torch.zeros(2, dtype=torch.int64)
    ops.convolve(torch.zeros(2, 8), torch.zeros(8, 3), None, False, torch.zeros(4, 8, 2), slots)
    attends = OpList(2, torch.float32)
    attends.attend(0, *(torch.zeros(2, 2, 16) for _ in range(3)), 1.0)
    with pytest.raises(ValueError, match="attention needs a step"):
        attends.run()
    pool = native.Pool(k=1, v=1, slots=1, kv_heads=2, block_size=16, head_dim=32, storage=0, format=0)
    step = native.DecodeStep(1, 2, 16)
    with pytest.raises(ValueError, match="layers' shape"):
        cpu.kernels().run_ops(step, attends.native, pool, 1, False)
    slots.fill_(4)
    with pytest.raises(ValueError, match="slot 4 is none of the 4"):
        cpu.kernels().run_ops(step, ops.native, pool, 1, False)
