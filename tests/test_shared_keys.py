"""Layers that read the keys and values of an earlier one: what is stored is there once, whoever reads it. Answers are
held against transformers' own model, and every method against an engine of the same model whose reading layers each
store a copy of what they read."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from engine_helpers import EVERY, tokens
from model_pairs import GREEDY, Pair
from test_hybrids import SPARSE
from tiny_models import edit_config, make_checkpoint, one_thread, oracle_logits, random_ids  # noqa: F401

from saccade import SamplingParams
from saccade.engine.rows.freezing import READ_ROWS
from saccade.errors import SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.sequence import SequenceKV
from saccade.methods.policy import Policy
from saccade.models.facts import described
from saccade.ops import cpu

CPU = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
LAYERS, STORED = 6, 3
BLOCK = 16 * 2 * 16 * 4 * 2  # bytes of a layer's block: 16 tokens, 2 heads of 16 channels, keys and values
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
        {"kv_memory": 60 * BLOCK, "kv_host": "1MiB", "kv_pool": "per_layer"},
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
    "infinigen",
    f"{SPARSE}+quest(budget=32, dense_layers=0)",
)
POLICIES = list(dict.fromkeys([*(one.text for one in EVERY), *(Policy.parse(one).text for one in FORMS)]))
# Dense attention in layers 1 and 5 is what methods have to do with: windows are the others' own.
KINDS = [
    "full_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
]


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


@pytest.mark.parametrize("policy", POLICIES)
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
