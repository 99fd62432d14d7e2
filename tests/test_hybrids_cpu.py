"""Layers that keep a state on a CPU: every family's reach the C++ kernels, many sequences in one call, over states
where they lie; nothing of torch's runs in their place."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_hybrids import FAMILIES, GREEDY, Pair
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401
from torch.nn import functional

from saccade.models import runner
from saccade.ops import cpu, cpu_keeping, slotted

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernels are not built")
_SPACES = ("granitemoehybrid", "falcon_h1", "nemotron_h", "bamba")
RULES = {"lfm2": None, "lfm2_moe": None, **dict.fromkeys(_SPACES, "state_space")}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    pair = Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))
    pair.rule = RULES.get(request.param, "delta_rule")
    return pair


@pytest.fixture
def calls(monkeypatch):
    """Of kernels, by their names, sequences and rows of each."""
    made: Counter[tuple[str, int, int]] = Counter()

    def count(name, kernel, shape):
        def call(*given, **named):
            out = kernel(*given, **named)
            made[name, *shape(out)] += 1
            return out

        monkeypatch.setattr(cpu_keeping, name, call)

    count("convolve", cpu_keeping.convolve, lambda out: (out.shape[0], out.shape[2]))
    for name in ("delta_rule", "state_space"):
        count(name, getattr(cpu_keeping, name), lambda out: out.shape[:2])
    return made


def test_prompts_and_steps_reach_the_kernels(pair, calls, monkeypatch):
    llm = pair.llm(exact=False)
    layers = llm.pool.states.format.layers
    prompts = [random_ids(length, seed=length) for length in (33, 2, 20)]
    monkeypatch.setattr(runner, "kept_step", lambda *given: None)  # which asks modules once, and then calls no more
    monkeypatch.setattr(functional, "conv1d", None)  # what torch's would call
    outputs = llm.generate(prompts, GREEDY)
    monkeypatch.undo()
    for ids, output in zip(prompts, outputs):
        pair.check(ids, output)
    names = {"convolve", pair.rule} - {None}
    assert {name for name, *_ in calls} == names
    for name in names:
        assert calls[name, 3, 1] >= 4 * layers  # a row of each of three sequences
        assert calls[name, 1, 2] == layers  # a prompt


def test_a_step_moves_no_state(pair):
    """The pool's tensors are what kernels are given, slots of any order among them."""
    llm = pair.llm(exact=False)
    seen = []
    found = {part.untyped_storage().data_ptr() for part in llm.pool.states.tensors.values()}
    kept = slotted._hosted

    def look(slots):
        seen.append(slots.pool.untyped_storage().data_ptr() in found)
        return kept(slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slotted, "_hosted", look)
        patch.setattr(runner, "kept_step", lambda *given: None)  # whose judge has states of its own
        llm.generate([random_ids(9, seed=1), random_ids(30, seed=2)], GREEDY)
    assert seen
    assert all(seen)


def test_bfloat16(pair, tmp_path):
    """As near to float32 as transformers' own bfloat16 is, within half as much again, at the median of the tokens:
    rounding may send one of them to other experts."""
    ids = random_ids(200, seed=4)
    own = pair.llm(exact=False)
    assert own.model.runner.keeping.in_slots(torch.device("cpu"))
    whole = logits_of(own, ids)
    from saccade import LLM

    half = LLM(pair.folder, dtype="bfloat16", kv_memory="8MiB", block_size=16, exact=False)
    ours = logits_of(half, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slotted, "on_host", lambda device: False)
        theirs = logits_of(LLM(pair.folder, dtype="bfloat16", kv_memory="8MiB", block_size=16, exact=False), ids)
    assert (ours - whole).abs().median() <= 1.5 * (theirs - whole).abs().median()


def logits_of(llm, ids):
    from saccade import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate(ids, params)[0]
    assert output.error is None, output.error
    return torch.tensor([next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]])
