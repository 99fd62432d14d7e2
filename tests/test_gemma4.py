"""Layers of one model with heads of several sizes, some of which read an earlier one's keys (Gemma 4): each group of
layers has slots of its own size. Answers are held against transformers' own model; every method by kernels against the
reference, and over two groups of layers of one size against one pool of the same."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from covering import quick
from engine_helpers import EVERY, tokens
from model_pairs import GREEDY, Pair
from test_cli import run
from test_hybrids import SPARSE
from tiny_models import CONFIGS, make_checkpoint, one_thread, random_ids  # noqa: F401
from transformers import Gemma4TextConfig

from saccade import SamplingParams
from saccade.cli.calibrate import run as calibrate
from saccade.errors import CapacityError, ModelError, SaccadeError
from saccade.kv import KVFormat, KVStorage
from saccade.kv.grouped_sequence import GroupedKV
from saccade.kv.groups import GroupedPool, Groups
from saccade.kv.saved import save_kv
from saccade.kv.sequence import SequenceKV
from saccade.methods.policy import Policy
from saccade.models import matrix_modules
from saccade.models.facts import described
from saccade.ops import cpu

CPU = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
KINDS = CONFIGS["gemma4_text"]["layer_types"]
READS = (0, 1, 2, 3, 2, 2, 3)
# Bytes of a layer's block of 16 tokens: 2 KV heads of 16 channels where layers have a window, else one of 32.
NARROW, WIDE = 16 * 2 * 16 * 2 * 4, 16 * 1 * 32 * 2 * 4
STEP = 2 * NARROW + 2 * WIDE  # of a block of one sequence, in the layers that store
LARGE = 16 * 2 * 64 * 2 * 4  # in place of WIDE, where heads are twice as wide and two
LONG = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(make_checkpoint("gemma4_text", tmp_path_factory.mktemp("gemma4"), max_position_embeddings=512))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """With global layers whose blocks are larger than the others', as in the models for phones."""
    sizes = {"global_head_dim": 64, "attention_k_eq_v": False, "enable_moe_block": False}
    folder = make_checkpoint("gemma4_text", tmp_path_factory.mktemp("wide"), max_position_embeddings=512, **sizes)
    return Pair(folder)


@pytest.fixture(scope="module")
def llm(pair):
    return pair.llm()


def test_each_size_lies_once_in_slots_of_its_own(wide):
    """The tensors of the pool hold what is counted, and nothing of layers that read others' keys."""
    step = 2 * NARROW + 2 * LARGE
    llm = wide.llm(kv_memory=10 * step + 100)
    spec, pool = llm.model.spec, llm.pool
    assert spec.reads == READS
    assert spec.shapes == tuple((2, 16) if one == "sliding_attention" else (2, 64) for one in KINDS)
    assert isinstance(pool, GroupedPool)
    assert [one.format.block_bytes for one in pool.groups] == [NARROW, LARGE]
    assert [one.layers for one in pool.groups] == [2, 2]
    assert [one.reads for one in pool.groups] == [(0, 1, 1, 1), (0, 1, 1)]
    assert [one.storage.num_blocks for one in pool.groups] == [20, 20]
    assert sum(part.nbytes for one in pool.groups for part in one.storage.parts) == 10 * step
    assert llm.engine.checks.most_tokens == 160
    assert pool.token_bytes == step // 16 == described(wide.folder).token_bytes
    with llm.session() as session:
        session.generate(random_ids(90, seed=1), GREEDY)
        assert [one.used_blocks for one in pool.groups] == [12, 12]
        assert llm.loop.statistics().bytes_by_tier == {"host": [6 * step, 10 * step]}
    assert [one.used_blocks for one in pool.groups] == [0, 0]
    facts = described(wide.folder)
    assert facts.kv_bytes(1000) == 2 * 2 * 4 * (4 * 7 * 16 + 3 * 1000 * 64)  # which seven layers read
    with pytest.raises(CapacityError, match=f"give at least {step} bytes"):
        wide.llm(kv_memory=step - 1)


MEMORIES = {  # blocks of a sequence that there is room for
    "reference": {"backend": "reference"},
    "kernels": {},
    "packed": {},
    "preempted": {"kv_memory": 22},
    "host": {"kv_memory": 14, "kv_host": 64},
    "per_layer": {"kv_memory": 14, "kv_host": 64, "kv_pool": "per_layer"},
    "disk": {"kv_memory": 14, "kv_disk": 80},
    "both": {"kv_memory": 14, "kv_host": 12, "kv_disk": 80},
}


@pytest.mark.parametrize(
    ("which", "memory"),
    quick(
        [(which, memory) for which in ("pair", "wide") for memory in MEMORIES],
        lambda *one: one in (("pair", "kernels"), ("wide", "preempted"), ("wide", "host"), ("pair", "disk")),
    ),
)
def test_batches_of_ragged_prompts_in_every_memory(which, memory, request, tmp_path):
    own, prompts = request.getfixturevalue(which), [random_ids(length, seed=length) for length in (61, 1, 24, 200)]
    step = STEP if which == "pair" else 2 * NARROW + 2 * LARGE
    options = {name: one * step if isinstance(one, int) else one for name, one in MEMORIES[memory].items()}
    options |= {"exact": False} if memory == "packed" else {}
    if "kv_disk" in options:
        options["kv_disk"] = f"{tmp_path}:{options['kv_disk']}"
    with own.llm(**options) as llm:
        for policy in ("dense", "topk(k=400)", "quest(budget=400, block_size=16, dense_layers=0)"):
            for ids, output in zip(prompts, llm.generate(prompts, GREEDY, policy=policy)):
                own.check(ids, output)
        for one in llm.pool.groups:
            assert one.used_blocks == 0
            if one.tiers is not None:
                assert one.tiers.counts.evicted > 0
                assert one.tiers.counts.bytes_read % one.tiers.tier.cell_bytes == 0
        if llm.pool.tiers is not None:
            numbers = llm.pool.tier_numbers()
            assert numbers["bytes_read"] == sum(one.tiers.counts.bytes_read for one in llm.pool.groups) > 0


@CPU
@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp8"])
def test_rows_of_8_and_16_bits(pair, dtype):
    """Nearly what float32 says, each group in its own rows: by kernels as by the reference."""
    prompts = [random_ids(length, seed=length) for length in (61, 1, 24, 200)]
    given = [pair.llm(kv_dtype=dtype, backend=backend) for backend in ("auto", "reference")]
    widths = [one.format.k.width(one.format.head_dim) for one in given[0].pool.groups]
    assert widths == [part.shape[-1] for part in (one.storage.k for one in given[0].pool.groups)]
    one, other = (llm.generate(prompts, LONG) for llm in given)
    assert [tokens(output) for output in one] == [tokens(output) for output in other]
    for ids, output in zip(prompts, one):
        near = Pair.__new__(Pair)
        near.theirs, near.close = pair.theirs, 0.25
        near.check(ids, output, greedy=False)


def test_saved_and_named_sessions(pair, llm, tmp_path):
    first, second = random_ids(45, seed=7), random_ids(12, seed=8)
    policy = "quest(budget=400, block_size=16, dense_layers=0)"  # which keeps summaries of each group's blocks
    with llm.session(policy=policy) as session:
        said = first + tokens(session.generate(first, GREEDY))
        session.save(tmp_path / "talk")
    stored, file = len(said) - 1, tmp_path / "talk"
    size = sum(one.stat().st_size for one in file.rglob("*")) if file.is_dir() else file.stat().st_size
    rows = stored * STEP // 16
    assert rows < size < 1.6 * rows
    with pair.llm(block_size=32).restore(file) as session:
        output = session.generate(second, GREEDY)
        pair.check(said + second, output)
        assert output.report["cached_tokens"] == stored
    options = {"session_dir": tmp_path / "sessions"}
    with pair.llm(**options) as own, own.session(name="talk", policy=policy) as session:
        said = first + tokens(session.generate(first, GREEDY))
    with pair.llm(**options) as own, own.session(name="talk") as session:
        output = session.generate(second, GREEDY)
        pair.check(said + second, output)
        assert output.report["recomputed_tokens"] == 0


def test_a_session_of_other_sizes_is_computed_again(pair, wide, tmp_path):
    with pair.llm() as llm, llm.session() as session:
        session.generate(random_ids(20, seed=1), GREEDY)
        session.save(tmp_path / "talk")
        kept = llm.engine.worker.memories
        saved = next(iter(kept.values())).kv
        assert isinstance(saved, GroupedKV)
        with wide.llm() as other, other.session() as theirs:
            theirs.generate(random_ids(5, seed=1), GREEDY)
            memories = other.engine.worker.memories
            number = next(iter(memories))
            with pytest.raises(SaccadeError, match="saved KV has others="):
                memories.check_kv(number, save_kv(saved))


def test_what_takes_one_size_of_heads_says_so(pair, tmp_path):
    for options, words in (
        ({"kv_unit": "head", "kv_host": "1MiB"}, "kv_unit='head': layers of gemma4_text have heads of more than one"),
        ({"kv_compute": "host", "kv_host": "1MiB"}, "kv_compute='host': layers of gemma4_text have heads of more than"),
    ):
        with pytest.raises(SaccadeError, match=words):
            pair.llm(**options)
    with pytest.raises(ModelError, match="tensor_parallel_size=2"):
        pair.llm(tensor_parallel_size=2)


def test_calibrations_have_each_layers_size(tmp_path):
    """Made once, read by a method whose labels are channels of keys, and by kernels as by the reference."""
    own = Pair(make_checkpoint("gemma4_text", tmp_path / "model", max_position_embeddings=512))
    with own.llm() as llm:
        calibrate(llm, "channels", random_ids(120, seed=2))
    policy, ids = "double_sparsity(k=24, dense_layers=0, dense_upto=0)", random_ids(150, seed=3)
    outputs = [own.llm(backend=backend).generate(ids, LONG, policy=policy)[0] for backend in ("auto", "reference")]
    assert [one.error for one in outputs] == [None, None]
    assert tokens(outputs[0]) == tokens(outputs[1])
    assert outputs[0].report["decode"]["density_per_layer"][1] < 0.3


FORMS = (
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=cuboid)",
    "lfps(k=32, blocks=4, unit=kv_head)",
    "quest(budget=32, block_size=16, dense_layers=0)",
    "arkvale(budget=48)",
    "cis(k=30, sinks=4, local=8, tau=0.0)+psaw(start_layer=1, block_size=16)",
    "topk(k=48)+etf(start_layer=1)",
    "lossless(draft=quest(budget=32, block_size=16, dense_layers=0), tokens=3, lookup=2)",
    f"{SPARSE}+quest(budget=32, dense_layers=0)",
)
SHORT = ("topk", "quest", "hshare", "flexprefill")
POLICIES = list(dict.fromkeys([*(one.text for one in EVERY), *(Policy.parse(one).text for one in FORMS)]))


@contextmanager
def splitting():
    """Models that are loaded here have a pool for layers with a window and one for the others, though all are alike."""
    kinds = [one == "full_attention" for one in KINDS]

    def of(layout, reads, shapes=()):
        counted = Groups.of(layout, reads, [(2 if one else 1, 16) for one in kinds])
        return Groups((layout, layout), counted.layers, counted.reads, counted.places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.pools.Groups", type("Split", (), {"of": staticmethod(of)}))
        yield


@pytest.fixture(scope="module")
def engines(pair, tmp_path_factory):
    """Heads of two sizes by kernels and by the reference; heads of one size in two groups, and in one pool."""
    found = [pair.llm(prefill_chunk=64), pair.llm(prefill_chunk=64, backend="reference")]
    sizes = {"global_head_dim": 16, "num_global_key_value_heads": 2, "max_position_embeddings": 512}
    alike = Pair(make_checkpoint("gemma4_text", tmp_path_factory.mktemp("alike"), **sizes))
    with splitting():
        found.append(alike.llm(prefill_chunk=64))
    found.append(alike.llm(prefill_chunk=64))
    assert [len(llm.pool.groups) for llm in found] == [2, 2, 2, 1]
    return found


@CPU
@pytest.mark.parametrize("policy", quick(POLICIES, lambda one: one.startswith(SHORT)))
def test_every_method_over_groups_of_layers(engines, policy):
    ids = random_ids(150, seed=5)
    outputs = [llm.generate(ids, LONG, policy=policy)[0] for llm in engines]
    assert [one.error for one in outputs] == [None] * 4
    for one, other in (outputs[:2], outputs[2:]):
        assert tokens(one) == tokens(other)
        said = one.outputs[0].cumulative_logprob, other.outputs[0].cumulative_logprob
        assert said[0] == pytest.approx(said[1], abs=1e-3)
        for phase in ("prefill", "decode"):
            for name in ("keys_attended", "keys_scored"):
                assert one.report[phase][name] == pytest.approx(other.report[phase][name], rel=0.02), (phase, name)


@CPU
@pytest.mark.parametrize("policy", quick(POLICIES, lambda one: one.startswith(SHORT)))
def test_methods_where_windows_hide_nothing_and_sessions_with_what_they_know(unwindowed, policy, tmp_path):
    """Every layer's heads, of both sizes, are the method's; a restored session goes on with what it knew."""
    ids = random_ids(110, seed=5)
    one, other = (llm.generate(ids, GREEDY, policy=policy)[0] for llm in unwindowed)
    assert (one.error, other.error) == (None, None)
    assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    llm = unwindowed[0]
    with llm.session(policy=policy) as session:
        session.generate(ids[:60], GREEDY)
        session.save(tmp_path / "talk")
        answer = session.generate(ids[60:80], GREEDY)
    with llm.restore(tmp_path / "talk") as session:
        output = session.generate(ids[60:80], GREEDY)
    assert (session.note, output.error, output.report["recomputed_tokens"]) == (None, None, 0)
    assert tokens(output) == tokens(answer)


@pytest.fixture(scope="module")
def unwindowed(tmp_path_factory):
    sizes = {"sliding_window": 200, "max_position_embeddings": 512}
    own = Pair(make_checkpoint("gemma4_text", tmp_path_factory.mktemp("unwindowed"), **sizes))
    return own.llm(prefill_chunk=64), own.llm(prefill_chunk=64, backend="reference")


def test_turns_edits_forks_and_preemption_give_every_block_back(pair):
    with pair.llm(kv_memory=20 * STEP, enable_prefix_caching=True) as llm:
        context: list[int] = []
        with llm.session() as session:
            for number, length in enumerate((50, 7, 30)):
                turn = random_ids(length, seed=number)
                context += turn
                context += pair.check(context, session.generate(turn, GREEDY))
            edited = context[:37] + random_ids(15, seed=3)
            pair.check(edited, session.complete(edited, GREEDY))
        samples = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6, ignore_eos=True, logprobs=1)
        output = llm.generate(edited, samples)[0]
        for number in range(3):
            pair.check(edited, output, number, greedy=False)
        prompts = [random_ids(90, seed=number) for number in range(4)]
        longer = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
        outputs = llm.generate(prompts, longer)
        assert sum(output.report["preemptions"] for output in outputs) > 0
        for ids, output in zip(prompts, outputs):
            pair.check(ids, output)
        llm.reset_prefix_cache()
        for one in llm.pool.groups:
            assert (one.used_blocks, one.free_slots) == (0, one.storage.num_blocks)


def test_decode_rows_of_many_requests_share_a_call_a_layer(llm):
    outputs = llm.generate([random_ids(30 + 7 * number, seed=number) for number in range(3)], GREEDY)
    for output in outputs:
        assert {one["path"] for one in output.report["decode"]["paths"]} == {"layer"}


def test_a_model_for_phones_at_128k_holds_what_info_says(tmp_path, capsys):
    """Of 35 layers 15 store: 12 with a window, of heads of 256, and 3 of 512. A pool with room for 128K holds no byte
    more; with a byte less there is room for a block less."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    sizes = {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "layer_types": kinds, "hidden_size": 1536}
    sizes |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "use_double_wide_mlp": True,
        "torch_dtype": "bfloat16",
    }
    Gemma4TextConfig(**sizes, architectures=["Gemma4ForCausalLM"]).save_pretrained(tmp_path)
    facts, length = described(tmp_path), 131_072
    assert (facts.token_bytes, facts.stored_layers) == ((12 * 256 + 3 * 512) * 2 * 2, 15)
    assert sum(facts.layer_bytes) == (28 * 256 + 7 * 512) * 2 * 2  # 2.3 times as much, were nothing shared
    # A step reads the last 512 tokens of 28 layers and all of 7, whoever stored them.
    assert facts.kv_bytes(length) == (28 * 512 * 256 + 7 * length * 512) * 2 * 2
    assert "18.0 KiB a token, stored by 15 layers and read by 20 more" in run(capsys, "info", str(tmp_path))[1]
    stored = {kind: at for at, kind in enumerate(kinds[:15])}
    reads = (*range(15), *(stored[kind] for kind in kinds[15:]))
    groups = Groups.of(KVFormat(torch.bfloat16, *facts.shapes[0]), reads, facts.shapes)
    for memory, fits in ((length * facts.token_bytes, True), (length * facts.token_bytes - 1, False)):
        storages = [KVStorage(one, slots) for one, slots in zip(groups.layouts, groups.slots(memory))]
        pool = groups.pool(storages, [None, None])
        assert pool.fits(length) == fits
        assert sum(part.nbytes for one in storages for part in one.parts) == memory - (0 if fits else 32 * 18432 - 1)
        assert GroupedKV(pool).token_bytes == facts.token_bytes


def test_profiled_memory_is_shared_out_by_bytes(pair):
    with pair.llm(kv_memory="profile", max_model_len=128, max_requests=2) as llm:
        assert [one.storage.num_blocks for one in llm.pool.groups] == [2 * 8 * one.layers for one in llm.pool.groups]
        ids = random_ids(40, seed=1)
        pair.check(ids, llm.generate(ids, GREEDY)[0])


def test_nothing_that_a_sequence_says_is_of_one_group_alone():
    """A GroupedKV has no lengths and tables of its own, which SequenceKV's methods would ask."""
    assert {name for name in vars(SequenceKV) if name[0] != "_"} - {"parts"} <= vars(GroupedKV).keys()


@CPU
@pytest.mark.parametrize("quantize", ["int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_rounded_weights_take_what_info_says(quantize, tmp_path):
    """Tables of embeddings by layer are rounded too, to 8 bits at least; routers are not."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
    sizes |= {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "max_position_embeddings": 512}
    own = Pair(make_checkpoint("gemma4_text", tmp_path / "model", **sizes), close=0.3)
    with pytest.warns(UserWarning, match=r"leaves 7 matrices in float32: model\.layers\.0\.router\.proj"):
        llm = own.llm(quantize=quantize)
    model = llm.model.runner.model
    decoder = model.get_decoder()
    assert decoder.embed_tokens_per_layer.matrix.format == "INT8_32"
    held = sum(one.nbytes for one in (*model.parameters(), *matrix_modules.matrices(model)))
    scalars = 4 * len(decoder.layers)
    assert held + scalars == described(own.folder, quantize).weight_bytes
    with llm:
        ids = random_ids(40, seed=1)
        own.check(ids, llm.generate(ids, GREEDY)[0], greedy=False)


@CPU
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"exact": False}, marks=pytest.mark.thorough), {"kv_dtype": "int8"}], ids=str
)
def test_heads_of_256_and_512_channels(real, options):
    """As the models have them, by the kernels for prompts, single rows and drafted ones."""
    prompts = [random_ids(length, seed=length) for length in (70, 3)]
    near = Pair.__new__(Pair)
    near.theirs, near.close = real.theirs, 0.3 if "kv_dtype" in options else 1e-4
    with real.llm(kv_memory="16MiB", **options) as llm:
        assert [one.format.head_dim for one in llm.pool.groups] == [256, 512]
        for policy in (
            "dense",
            "topk(k=400)",
            "lossless(draft=quest(budget=32, block_size=16, dense_layers=0), tokens=3)",
        ):
            for ids, output in zip(prompts, llm.generate(prompts, GREEDY, policy=policy)):
                near.check(ids, output, greedy="kv_dtype" not in options)
                assert all(name.startswith("cpu/") for name in output.report["decode"]["backends"])


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    sizes = {"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": False, "num_key_value_heads": 1}
    return Pair(make_checkpoint("gemma4_text", tmp_path_factory.mktemp("real"), **sizes))
