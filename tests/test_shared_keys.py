"""Layers that read the keys and values of an earlier one: what is stored is there once, whoever reads it. Answers are
held against transformers' own model, and every method against an engine of the same model whose reading layers each
store a copy of what they read."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from covering import quick
from dense_store import DenseStore, run_packed
from device_helpers import put_on_device
from engine_helpers import EVERY, tokens
from model_pairs import GREEDY, Pair
from safetensors.torch import load_file, save_file
from test_hybrids import SPARSE
from tiny_models import PAD, edit_config, make_checkpoint, one_thread, oracle_logits, random_ids  # noqa: F401
from transformers import AutoModelForCausalLM, GenerationConfig

from saccade import LLM, SamplingParams
from saccade.cli.info import rows
from saccade.engine.rows.freezing import READ_ROWS
from saccade.errors import ModelError, SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.row_formats import INT8
from saccade.kv.sequence import SequenceKV
from saccade.methods.policy import Policy
from saccade.models import load_model
from saccade.models.facts import described
from saccade.ops import cpu
from saccade.transformers import configure, report

CPU = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
LAYERS, STORED = 6, 3
FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK = 16 * 2 * 16 * 4 * 2  # bytes of a layer's block: 16 tokens, 2 heads of 16 channels, keys and values
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LONG = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(make_checkpoint("gemma3n_text", tmp_path_factory.mktemp("gemma3n"), max_position_embeddings=512))


@pytest.fixture(scope="module")
def llm(pair):
    return pair.llm()


@contextmanager
def copying():
    """In place of the seam: models that are loaded here store, in each layer that reads others' keys, a copy of them.
    What modules leave for later layers is what they made of the pass's rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.models.probe.read_layers", lambda family, config: ())
        patch.setattr("saccade.models.modules._STORED", {})
        patch.setattr("saccade.engine.rows.freezing._leaves_unread", lambda rows: False)  # they would leave no copies
        yield


def test_what_is_stored_is_counted_once(pair, llm):
    spec, pool = llm.model.spec, llm.pool
    assert (spec.layers, spec.stored, spec.reads) == (LAYERS, STORED, (0, 1, 2, 1, 2, 1))
    assert (pool.layers, len(pool.reads), pool.format.block_bytes) == (STORED, LAYERS, BLOCK)
    assert pool.num_blocks == (8 << 20) // BLOCK
    assert llm.engine.checks.most_tokens == pool.num_blocks // STORED * 16
    with llm.session() as session:
        session.generate(random_ids(90, seed=1), GREEDY)
        assert pool.used_blocks == STORED * 6  # 95 tokens
    facts = described(pair.folder)
    assert (facts.token_bytes, facts.stored_layers) == (STORED * 2 * 2 * 16 * 4, STORED)
    said = rows(facts, 1 << 30, 100)["keys and values"]
    assert said == "768 B a token, stored by 3 layers and read by 3 more"
    assert facts.kv_bytes(1000) == 2 * 2 * 16 * 4 * (3 * 7 + 3 * 1000)  # which six layers read
    with pytest.raises(SaccadeError, match="layer 4 reads the keys of layer 2 and stores none"):
        SequenceKV(pool).append(4, *torch.zeros(2, 2, 1, 16))
    with pytest.raises(SaccadeError, match="the first 2 layers read their own keys"):
        BlockManager(KVStorage(KVFormat(torch.float32, 2, 16, 16), 8), 2, reads=(0, 0, 1))


def test_layers_that_read_compute_what_is_read_of_a_prompt_alone(pair):
    """Rows that nobody looks at stop where keys are no longer stored; the report says so."""
    ids = random_ids(READ_ROWS + 60, seed=2)
    with pair.llm(prefill_chunk=50) as llm:
        output = llm.generate(ids, GREEDY)[0]
    pair.check(ids, output)
    assert output.report["prefill"]["rows_unread"] == 60 * (LAYERS - STORED)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "reference"},
        {},
        {"exact": False},
        {"kv_memory": 22 * STORED * BLOCK},
        {"kv_memory": 40 * BLOCK, "kv_host": "1MiB"},
        {"kv_memory": 40 * BLOCK, "kv_host": "1MiB", "kv_unit": "head"},
        {"kv_memory": 40 * BLOCK, "kv_host": "1MiB", "kv_compute": "host"},
        {"kv_memory": 34 * BLOCK, "kv_host": "1MiB", "kv_pool": "per_layer"},
        {"kv_memory": 40 * BLOCK, "kv_disk": "1MiB"},
    ],
    ids=["reference", "kernels", "packed", "preempted", "host", "heads", "hosted", "per_layer", "disk"],
)
def test_batches_of_ragged_prompts_in_every_memory(pair, options, tmp_path):
    if "kv_disk" in options:
        options = {**options, "kv_disk": f"{tmp_path}:1MiB"}
    prompts = [random_ids(length, seed=length) for length in (61, 1, 24, 200)]
    with pair.llm(**options) as llm:
        for policy in ("dense", "topk(k=400)", "quest(budget=400, block_size=16, dense_layers=0)"):
            for ids, output in zip(prompts, llm.generate(prompts, GREEDY, policy=policy)):
                pair.check(ids, output)
        if llm.pool.tiers is not None:
            assert llm.pool.tiers.counts.bytes_read > 0
        assert llm.pool.used_blocks == 0


FORMS = (
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=cuboid)",
    "lfps(k=32, blocks=4, unit=kv_head)",
    "quest(budget=32, block_size=16, dense_layers=0)",
    "arkvale(budget=48)",
    "cis(k=30, sinks=4, local=8, tau=0.0)+psaw(start_layer=1, block_size=16)",
    f"{SPARSE}+quest(budget=32, dense_layers=0)",
)
POLICIES = list(dict.fromkeys([*(one.text for one in EVERY), *(Policy.parse(one).text for one in FORMS)]))
SOME = ("dense", "topk", "h2o", "psa", "lfps", "infllm", "cis", "loopserve")
# Dense attention in layers 1 and 5 is what methods have to do with: windows are the others' own.
KINDS = [FULL, FULL, SLIDING, FULL, SLIDING, FULL]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """By kernels and by the reference, and with copies by the reference."""
    folder = make_checkpoint(
        "gemma3n_text", tmp_path_factory.mktemp("both"), layer_types=KINDS, max_position_embeddings=512
    )
    own = Pair(folder)
    found = own.llm(prefill_chunk=64), own.llm(prefill_chunk=64, backend="reference")
    with copying():
        other = own.llm(prefill_chunk=64, backend="reference")
    assert (other.pool.layers, other.model.spec.reads) == (LAYERS, ())
    return *found, other


@pytest.mark.parametrize("policy", quick(POLICIES, lambda one: one.startswith(SOME)))
def test_every_method_reads_as_of_copies(engines, policy, monkeypatch):
    """The same keys of the same layers: a layer that reads others' keys chooses of them by its own queries."""
    ids = random_ids(150, seed=5)
    monkeypatch.setattr("saccade.engine.rows.freezing._leaves_unread", lambda rows: False)
    kernels, reference = (llm.generate(ids, LONG, policy=policy)[0] for llm in engines[:2])
    with copying():
        copies = engines[2].generate(ids, LONG, policy=policy)[0]
    for output in (kernels, reference, copies):
        assert output.error is None, output.error
    assert tokens(reference) == tokens(copies) == tokens(kernels)
    one, other = (output.outputs[0].cumulative_logprob for output in (reference, copies))
    assert one == pytest.approx(other, abs=1e-5)
    for phase in ("prefill", "decode"):
        for name in ("keys_attended", "keys_scored", "density"):
            assert reference.report[phase][name] == copies.report[phase][name], (phase, name)
            assert kernels.report[phase][name] == pytest.approx(copies.report[phase][name], rel=0.02), (phase, name)


@pytest.mark.parametrize("chunk", [24, 200])
def test_frozen_rows_are_what_transformers_makes_of_rows_that_skip_layers(pair, chunk):
    """Deep layers, those that read others' keys among them, pass early rows by: held against hooks on transformers'."""
    policy, ids = Policy.parse("etf(psi=0.3, start_layer=1, sinks=3)"), random_ids(110, seed=3)
    first = policy.freeze.first_frozen(torch.arange(len(ids)), len(ids), LAYERS)
    assert {*first.tolist()} >= {1, 3, 4, 5, LAYERS}
    with pair.llm(prefill_chunk=chunk) as llm:
        output = llm.generate(ids, LONG, policy=policy)[0]
        with pytest.raises(SaccadeError, match="do not rotate keys all alike"):
            llm.generate(ids, LONG, policy="etf(reuse=kv)")
    assert output.error is None, output.error
    frozen = (first[:, None] <= torch.arange(LAYERS)).sum()
    assert output.report["prefill"]["rows_frozen"] == frozen
    answer = output.outputs[0].token_ids

    def skipping(layer):
        def hook(module, given, made):
            kept = torch.zeros(made.shape[2], dtype=torch.bool)
            kept[: len(ids)] = first <= layer
            return torch.where(kept[:, None], given[0], made)

        return hook

    hooks = [one.register_forward_hook(skipping(at)) for at, one in enumerate(pair.theirs.model.layers)]
    try:
        right = oracle_logits(pair.theirs, ids + answer).log_softmax(-1)[len(ids) - 1 : -1]
    finally:
        for hook in hooks:
            hook.remove()
    said = [one[token].logprob for one, token in zip(output.outputs[0].logprobs, answer)]
    torch.testing.assert_close(torch.tensor(said), right.gather(1, torch.tensor(answer)[:, None])[:, 0], **CLOSE)


@CPU
@pytest.mark.parametrize("turned", [False, True])
def test_int8_keys_are_turned_for_queries_of_all_that_read_them(pair, turned):
    ids = random_ids(150, seed=5)
    both = [pair.llm(kv_dtype="int8", kv_rotate=turned, **given) for given in ({}, {"backend": "reference"})]
    layout = both[0].pool.format
    assert (layout.turned, layout.k) == (turned, INT8)
    plain = pair.llm().generate(ids, LONG)[0]
    for policy in ("dense", "quest(budget=48, block_size=16, dense_layers=0)", "topk(k=24)", SPARSE):
        one, other = (llm.generate(ids, LONG, policy=policy)[0] for llm in both)
        assert one.error is None, one.error
        assert tokens(one) == tokens(other)
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=5e-3)
        if policy == "dense":
            told = [made.outputs[0].logprobs[0][tokens(plain)[0]].logprob for made in (one, plain)]
            assert 0 < abs(told[0] - told[1]) < 0.1


def test_audits_compare_with_the_keys_that_are_read(pair):
    ids = random_ids(120, seed=9)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, audit_steps=1.0)
    with pair.llm() as llm:
        whole = llm.generate(ids, params, policy="topk(k=10000)")[0]
        pair.check(ids, whole)
        part = llm.generate(ids, params, policy="topk(k=8)")[0]
    assert whole.report["audit"]["agreement"]["mean"] == 1
    assert part.report["audit"]["agreement"]["mean"] <= 1


def test_saved_and_named_sessions_hold_what_is_stored(pair, llm, tmp_path):
    first, second = random_ids(45, seed=7), random_ids(12, seed=8)
    for policy in ("dense", "quest(budget=400, block_size=16, dense_layers=0)", "h2o(budget=400)"):
        file = tmp_path / policy[:4]
        with llm.session(policy=policy) as session:
            said = first + tokens(session.generate(first, GREEDY))
            session.save(file)
        if policy == "dense":
            stored = STORED * (len(said) - 1) * 2 * 2 * 16 * 4
            size = sum(one.stat().st_size for one in file.rglob("*")) if file.is_dir() else file.stat().st_size
            assert stored < size < 1.5 * stored
        with pair.llm().restore(file) as session:
            output = session.generate(second, GREEDY)
            pair.check(said + second, output)
            assert output.report["recomputed_tokens"] == 0


def test_tokens_without_an_embedding_for_layers(tmp_path):
    """From vocab_size_per_layer_input on they have the one of token 0, as transformers gives them."""
    pair = Pair(make_checkpoint("gemma3n_text", tmp_path / "few", vocab_size_per_layer_input=259))
    ids = [*random_ids(9, seed=1), 259, 260, 40, 287]
    logits = run_packed(load_model(pair.folder).runner, DenseStore(), {"a": ids})["a"]
    try:
        right = oracle_logits(pair.theirs, ids)
    except IndexError:
        right = oracle_logits(pair.theirs, ids[:9])  # transformers 5.17 knows no such tokens
    torch.testing.assert_close(logits[: len(right)], right, rtol=2e-5, atol=2e-5)


def test_real_checkpoints_have_weights_that_nothing_reads(pair, tmp_path):
    """Keys and values of layers that make none: they stand in files, and change nothing."""
    folder = shutil.copytree(pair.folder, tmp_path / "more")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(STORED, LAYERS):
        for name in ("k_proj", "v_proj", "k_norm"):
            like = tensors[f"model.layers.0.self_attn.{name}.weight"]
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.full_like(like, torch.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    ids = random_ids(40, seed=1)
    with pair.llm() as one, LLM(folder, dtype="float32", kv_memory="8MiB") as other:
        assert tokens(one.generate(ids, LONG)[0]) == tokens(other.generate(ids, LONG)[0])
        assert one.model.identity == other.model.identity


def test_what_is_refused_of_them(pair, tmp_path):
    with pytest.raises(ModelError, match="layers=2: layers of gemma3n_text share keys"):
        load_model(pair.folder, layers=2)
    folder = shutil.copytree(pair.folder, tmp_path / "all")
    edit_config(folder, num_kv_shared_layers=LAYERS)
    with pytest.raises(ModelError, match=r"no model can be made of config\.json"):
        load_model(folder)


RECORDED = ("dense", "quest(budget=48, block_size=16, dense_layers=0)", "topk(k=24)", "streaming(sinks=2, window=40)")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A model without windows, which recorded steps of sparse methods do not know, on a device and by the reference."""
    folder = make_checkpoint("gemma3n_text", tmp_path_factory.mktemp("full"), layer_types=[FULL] * LAYERS)
    own = Pair(folder)
    llm = own.llm(prefill_chunk=128, exact=False)
    put_on_device(llm)
    return llm, own.llm(prefill_chunk=128, backend="reference")


@pytest.mark.parametrize("policy", RECORDED)
def test_recorded_steps_read_what_was_stored(recorded, policy):
    """On CPU tensors, by Triton's interpreter: the keys that the rows' path reads, and blocks that fill on the way."""
    llm, reference = recorded
    prompts = [random_ids(length, seed=length) for length in (61, 14, 96)]
    for ids, output in zip(prompts, llm.generate(prompts, LONG, policy=policy)):
        right = reference.generate(ids, LONG, policy=policy)[0]
        assert output.error is None, output.error
        assert {one["path"] for one in output.report["decode"]["paths"]} == {"recorded"}, output.report["decode"]
        assert tokens(output) == tokens(right)
        assert output.outputs[0].cumulative_logprob == pytest.approx(right.outputs[0].cumulative_logprob, abs=1e-3)
        assert output.report["decode"]["keys_attended"] == right.report["decode"]["keys_attended"]


def test_recorded_steps_of_windows_audits_and_drafts(pair):
    ids, longer = random_ids(60, seed=2), random_ids(70, seed=3)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, audit_steps=1.0)
    with pair.llm(prefill_chunk=128, exact=False) as llm:
        put_on_device(llm)
        output = llm.generate(ids, params)[0]
        pair.check(ids, output)
        assert {one["path"] for one in output.report["decode"]["paths"]} == {"recorded"}
        output = llm.generate(longer, params, policy="lossless(draft=streaming(window=20), tokens=2)")[0]
        pair.check(longer, output)
    with pair.llm(kv_memory=40 * BLOCK, kv_host="1MiB", exact=False) as llm:
        put_on_device(llm)
        prompts = [random_ids(200, seed=1), random_ids(120, seed=2)]
        for one, output in zip(prompts, llm.generate(prompts, LONG)):
            pair.check(one, output)
            assert "recorded" not in {path["path"] for path in output.report["decode"]["paths"]}


@pytest.mark.parametrize("policy", ["dense", FORMS[2], f"{SPARSE}+h2o(budget=24)"])
def test_in_transformers_own_loop_they_read_the_same(engines, policy):
    """Its ``generate``, whose modules hand each other keys and values."""
    folder, ids = engines[0].model.path, random_ids(150, seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="saccade").eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    configure(model, policy, kv_memory="8MiB", block_size=16, prefill_chunk=64, kv_dtype="int8", kv_rotate=True)
    made = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    with Pair(folder).llm(prefill_chunk=64, kv_dtype="int8", kv_rotate=True) as llm:
        right = llm.generate(ids, LONG, policy=policy)[0]
    assert made == tokens(right)
    (told,) = report(model)
    assert told["decode"]["keys_attended"] == right.report["decode"]["keys_attended"]
