"""A planned step's layers in one call of the C++ kernels: to the last bit what project, attention and finish make of
the rows layer by layer."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from engine_helpers import tokens
from helpers import UNTIMED, generator
from kv_helpers import poisoned_pool
from test_cpu_plans import LISTED
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.observing import timing
from saccade.engine.rows.attention import RowAttention
from saccade.engine.rows.decode_rows import JoinedRows
from saccade.engine.steps.carried import REGION
from saccade.engine.watch.clock import Clock
from saccade.errors import SaccadeError
from saccade.kv.sequence import SequenceKV
from saccade.methods.dense import DenseMethod
from saccade.methods.policy import Policy
from saccade.methods.psa import PSA
from saccade.methods.quest import Quest
from saccade.methods.streaming import Streaming
from saccade.models.runner import HFRunner
from saccade.ops import cpu
from saccade.ops.cpu_plans import PlannedRow, PlannedRows
from saccade.ops.cpu_readings import Readings
from saccade.ops.layer_rows import RowLayer, RowLayers
from saccade.ops.layer_weights import HeadNorms, LayerWeights, Norm
from saccade.ops.matrices import DenseMatrix

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
LAYERS, HEADS, KV_HEADS, DIM = 3, 6, 2, 32
CHANNELS, INNER = 72, 104
METHODS = [
    DenseMethod(),
    Streaming(sinks=3, window=40),
    Quest(budget=64, dense_layers=1),
    PSA(epsilon=0.7, block_size=8, microbatch=2, rank="cuboid"),
    Quest(budget=32, block_size=8, dense_layers=0, unit="q_head"),
]
LENGTHS = [1, 333, 640, 257, 8300]
TOGETHER = 4  # rows of a verification, behind those


class Spec:
    layers, heads, kv_heads, head_dim, windows = LAYERS, HEADS, KV_HEADS, DIM, (None,) * LAYERS


@pytest.fixture(autouse=True)
def _default_isa():
    yield
    cpu.set_isa(None)


def weights(layer: int, dtype: torch.dtype) -> RowLayer:
    """Layers that differ: biases, norms of heads, and one that does not rotate."""
    rng = generator(layer)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) / shape[-1] ** 0.5 * 1.5).to(dtype)

    def matrix(rows: int, columns: int) -> DenseMatrix:
        return DenseMatrix(draw(rows, columns), draw(rows) if layer % 2 else None)

    return RowLayer(
        LayerWeights(
            Norm(1 + draw(CHANNELS), 1e-5),
            matrix(HEADS * DIM, CHANNELS),
            matrix(KV_HEADS * DIM, CHANNELS),
            matrix(KV_HEADS * DIM, CHANNELS),
            matrix(CHANNELS, HEADS * DIM),
            Norm(1 + draw(CHANNELS), 1e-6),
            matrix(INNER, CHANNELS),
            matrix(INNER, CHANNELS),
            matrix(CHANNELS, INNER),
            DIM,
            rotated=layer != 1,
            head_norms=HeadNorms(1 + draw(DIM), 1 + draw(DIM), 1e-6) if layer else None,
        )
    )


def step(dtype: torch.dtype) -> tuple[PlannedRows, SequenceKV, list[torch.Tensor]]:
    """The rows of several sequences of one pool, drawn the same each time; one of the sequences, and where rows write
    what they saw."""
    rng = generator(5)
    lengths = [*LENGTHS, 500 + TOGETHER]
    pool = poisoned_pool(
        LAYERS * sum(-(-one // 32) for one in lengths) + 8, KV_HEADS, DIM, layers=LAYERS, dtype=dtype, heads_apart=True
    )
    rows = []
    peaks = torch.zeros(LAYERS, TOGETHER, KV_HEADS, -(-lengths[-1] // REGION))
    for i, length in enumerate(lengths):
        kv = SequenceKV(pool)
        kv.reserve(length)
        count = TOGETHER if i == len(LENGTHS) else 1
        for layer in range(LAYERS):
            kv.append(layer, *torch.randn(2, KV_HEADS, length - count, DIM, generator=rng).to(dtype))
        plan = (METHODS[i] if i < len(LENGTHS) else METHODS[0]).device_plan(Spec)
        sparse = plan.blocks is not None and length > plan.choice.dense_upto
        given = Readings(plan.layers), kv.summaries(plan.blocks.summary, plan.blocks.size) if sparse else ()
        more = {"length": count, "peaks": peaks, "region": REGION} if count > 1 else {}
        rows.append(PlannedRow(i, length - count, kv.tables, *given, **more))
    planned = PlannedRows(rows, pool.storage.k, pool.storage.v, own_products=True)
    return planned, kv, [pool.storage.k, pool.storage.v, peaks, planned._used, planned._coverage]


def inputs(dtype: torch.dtype):
    """Hidden states, what each layer rotates by, and its scale and cap."""
    rng = generator(6)
    rows = len(LENGTHS) + TOGETHER
    hidden = (torch.randn(rows, CHANNELS, generator=rng) * 2).to(dtype)
    wide = torch.rand(LAYERS, 2, rows, 2 * DIM, generator=rng).to(dtype)[..., ::2]  # no layer's is contiguous
    rotary = [(wide[0, 0], wide[0, 1]), (wide[1, 0], wide[1, 1]), (wide[2, 0], wide[2, 1])]
    return hidden, rotary, [(0.2, None), (0.3, 9.0), (0.25, 4.0)]


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_is_three_calls_a_layer(dtype, threads, isa):
    cpu.set_isa(isa)
    layers = [weights(layer, dtype) for layer in range(LAYERS)]
    hidden, rotary, asked = inputs(dtype)
    apart, _, left = step(dtype)
    one = hidden.clone()
    for layer, pair, (scale, softcap) in zip(range(LAYERS), rotary, asked):
        q, k, v = layers[layer].project(one, *pair)
        out = torch.empty(len(hidden), HEADS, DIM, dtype=dtype)
        apart.run(layer, q, k, v, out, scale, softcap, threads)
        layers[layer].finish(one, out.transpose(0, 1))
    together, _, right = step(dtype)
    other, whole = hidden.clone(), RowLayers(layers, asked)
    q = whole.queries(len(hidden))
    assert together.run_layers(whole, other, q, rotary, threads) == (0, 0)
    assert not torch.equal(other, hidden)
    assert torch.equal(one, other)
    assert torch.equal(apart.lse, together.lse)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(left, right))
    shares = step(dtype)[0].run_layers(whole, hidden.clone(), q, rotary, threads, watched=True)
    assert min(shares) > 0
    assert sum(shares) < 1


def test_an_error_in_the_middle_is_the_layers_own():
    """A block of the second layer has left its slot: the first has run, nothing else has."""
    layers = [weights(layer, torch.float32) for layer in range(LAYERS)]
    hidden, rotary, asked = inputs(torch.float32)
    apart, kv, left = step(torch.float32)
    kv.tables[1].fill_(-1)
    one = hidden.clone()
    layers[0].finish(one, _attended(apart, layers[0], one, rotary[0], asked[0]).transpose(0, 1))
    with pytest.raises(ValueError, match="the block of position 500 is in no slot") as ours:
        _attended(apart, layers[1], one, rotary[1], asked[1], layer=1)
    together, kv, right = step(torch.float32)
    kv.tables[1].fill_(-1)
    other, whole = hidden.clone(), RowLayers(layers, asked)
    q = whole.queries(len(hidden))
    with pytest.raises(ValueError) as theirs:
        together.run_layers(whole, other, q, rotary, 2)
    assert str(theirs.value) == str(ours.value)
    assert torch.equal(one, other)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(left, right))


def _attended(planned, own, hidden, pair, asked, layer=0):
    q, k, v = own.project(hidden, *pair)
    out = torch.empty(len(hidden), HEADS, DIM)
    planned.run(layer, q, k, v, out, *asked, 2)
    return out


def test_layers_and_rows_must_fit():
    layers = [weights(layer, torch.float32) for layer in range(LAYERS)]
    hidden, rotary, asked = inputs(torch.float32)
    planned = step(torch.float32)[0]
    few = RowLayers(layers[:2], asked[:2])
    with pytest.raises(ValueError, match="as many layers"):
        planned.run_layers(few, hidden, few.queries(len(hidden)), rotary[:2], 1)
    with pytest.raises(ValueError, match="shape and storage type"):
        RowLayers([layers[0], weights(1, torch.bfloat16)], asked[:2])
    whole = RowLayers(layers, asked)
    with pytest.raises(SaccadeError, match="hidden"):
        planned.run_layers(whole, hidden.bfloat16(), whole.queries(len(hidden)), rotary, 1)
    with pytest.raises(ValueError, match="is not among"):
        planned.run_layers(whole, hidden[:3], whole.queries(3), [(c[:3], s[:3]) for c, s in rotary], 1)


FIXED = [
    "dense",
    "streaming(sinks=3, window=40)",
    "quest(budget=64, dense_layers=1)",
    "quest(budget=32, block_size=8, dense_layers=0, unit=q_head)",
    "arkvale(budget=96, block_size=8)",
    "psa(epsilon=0.5, block_size=16, microbatch=1, rank=cuboid)",
    "psa(epsilon=0.9, block_size=8, microbatch=3, rest=min, stop=mean, rank=cuboid)",
    "streaming(sinks=3, window=40)+psaw(start_layer=1)",
]
LOSSLESS = [
    "lossless(draft=quest(budget=96), tokens=4)",
    "lossless(draft=psa(epsilon=0.6, block_size=16, microbatch=1, rank=cuboid), tokens=4)",
    "lossless(draft=streaming, tokens=3)",
    "dense",
]
BATCHES = {"fixed": FIXED, "listed": LISTED, "lossless": LOSSLESS}
FEW = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def served(folder, monkeypatch, policies, **options):
    """Outputs, the logits of all steps, and how many of them ran in one call."""
    seen, whole = [], []
    with monkeypatch.context() as patch:
        logits, run = HFRunner.logits, JoinedRows.run_layers
        patch.setattr(HFRunner, "logits", lambda self, hidden: seen.append(logits(self, hidden)) or seen[-1])
        patch.setattr(JoinedRows, "run_layers", lambda *rest: whole.append(run(*rest)) or whole[-1])
        llm = LLM(
            folder, kv_memory="16MiB", prefill_chunk=128, exact=False, **{"enable_prefix_caching": False, **options}
        )
        ids = [random_ids(110 + 9 * i, seed=i) for i in range(len(policies))]
        outputs = llm.generate(ids, FEW, policy=policies)
        with llm.session(policies[0]) as session:
            outputs += [session.generate(random_ids(n, seed=n), FEW) for n in (150, 40)]
        assert llm.engine.pool.used_blocks == 0
    return outputs, seen, sum(whole)


def equal(one, other):
    for left, right in zip(one[0], other[0], strict=True):
        assert tokens(left) == tokens(right)
        for phase in ("prefill", "decode"):
            ours, theirs = ({**answer.report[phase], **UNTIMED} for answer in (left, right))
            assert ours == theirs
        assert left.report["notes"] == right.report["notes"]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512, head_dim=32)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("float32", 5), ("bfloat16", 2)])
def test_steps_in_one_call_have_the_bits_of_layers_by_themselves(folder, monkeypatch, batch, dtype, threads):
    policies, options = BATCHES[batch], {"dtype": dtype, "threads": threads}
    if batch == "listed":  # two of them choose layer by layer
        policies = [one for one in policies if "slash_shift_on_read=false" not in one and "+etf" not in one]
    whole = served(folder, monkeypatch, policies, **options)
    assert whole[2] >= 15  # of the batch, and of the session's turns
    monkeypatch.setattr(RowAttention, "whole", lambda self: None)
    apart = served(folder, monkeypatch, policies, **options)
    assert apart[2] == 0
    equal(whole, apart)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_every_family_of_the_shape_takes_one_call(family, monkeypatch, tmp_path):
    """Biases, norms of heads, windows of layers, layers that do not rotate."""
    made = make_checkpoint(family, tmp_path, max_position_embeddings=512, head_dim=32)
    policies = ["dense", "dense"] if family in ("mistral", "qwen2", "qwen3") else ["dense", "quest(budget=64)"]
    whole = served(made, monkeypatch, policies)
    assert whole[2] >= 3 * (FEW.max_tokens - 1)
    monkeypatch.setattr(RowAttention, "whole", lambda self: None)
    equal(whole, served(made, monkeypatch, policies))


class Calls:
    """A kernel set whose calls are counted."""

    def __init__(self, kernels) -> None:
        self.kernels, self.counts = kernels, Counter()

    def __getattr__(self, name: str):
        self.counts[name] += 1
        return getattr(self.kernels, name)


@pytest.mark.parametrize("policy", [*FIXED[:-1], "topk(k=24)", "lfps(k=20, unit=kv_head, blocks=0)", "cis(k=20)"])
def test_a_planned_step_is_one_kernel_call_and_the_heads(folder, monkeypatch, policy):
    llm = LLM(folder, kv_memory="16MiB", exact=False, enable_prefix_caching=False)
    for number in range(3):
        llm.engine.add(random_ids(200 + number, seed=number), FEW, Policy.parse(policy))
    for _ in range(5):
        llm.engine.step()
    calls = Calls(cpu.kernels())
    monkeypatch.setattr(cpu, "_chosen", calls)
    llm.engine.step()
    assert {name: calls.counts[name] for name in ("run_layers", "head_rows", "project_rows", "run_step")} == {
        "run_layers": 1, "head_rows": 1, "project_rows": 0, "run_step": 0
    }  # fmt: skip


@pytest.mark.parametrize(("policies", "options"), [
    (["topp(dense_upto=0, p=0.5)", "dense"], {}),  # which chooses by itself
    (["dense", "psa(epsilon=0.5, rank=cuboid)"], {"audit": 1.0}),
    (["lfps(k=20, slash_shift_on_read=false)"], {}),
])  # fmt: skip
def test_rows_that_need_somebody_between_layers_have_him(folder, monkeypatch, policies, options):
    outputs, _, whole = served(folder, monkeypatch, policies, **options)
    assert whole <= 1  # where the other one's tokens have come sooner
    assert all(one.error is None for one in outputs)


def test_a_clock_times_the_parts_of_a_call(folder, monkeypatch):
    policies = ["dense", "psa(epsilon=0.7, block_size=8, rank=cuboid)", LISTED[0], LISTED[4], LISTED[-3]]
    plain, _, _ = served(folder, monkeypatch, policies)
    llm, clock = LLM(folder, kv_memory="16MiB", prefill_chunk=128, exact=False, enable_prefix_caching=False), Clock()
    ids = [random_ids(110 + 9 * i, seed=i) for i in range(len(policies))]
    requests = [llm.engine.add(one, FEW, Policy.parse(policy)) for one, policy in zip(ids, policies)]
    calls = Calls(cpu.kernels())
    while any(not one.output_ids for one in requests):
        llm.engine.step()
    monkeypatch.setattr(cpu, "_chosen", calls)
    began = time.perf_counter()
    with timing(llm.engine, clock):
        while llm.engine.busy:
            llm.engine.step()
    assert calls.counts["run_layers"] > 5
    assert calls.counts["run_step"] == 0
    assert {"attention", "selection", "linear"} == clock.seconds.keys()
    assert min(clock.seconds.values()) > 0
    assert sum(clock.seconds.values()) < time.perf_counter() - began
    assert [one.output_ids for one in requests] == [tokens(one) for one in plain[: len(policies)]]


def test_somebody_who_looks_on_sees_every_layer(folder):
    llm, calls = LLM(folder, kv_memory="16MiB", exact=False, enable_prefix_caching=False), []
    llm.engine.watch.observer = lambda call: calls.append((call.phase, call.layer))
    llm.generate(random_ids(60, seed=1), FEW)
    assert Counter(calls)["decode", 1] == FEW.max_tokens - 1
