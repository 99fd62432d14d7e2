"""Models that store latents: however they are run, tokens have the log-probabilities that transformers' own model gives
them, by rows that meet latents and by rows that meet each head's keys and values."""

from __future__ import annotations

import random

import pytest
import torch
from covering import quick
from engine_helpers import EVERY, tokens
from model_pairs import GREEDY, Pair
from test_hybrids import SPARSE
from tiny_models import edit_config, make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import SamplingParams
from saccade.engine.observing import observing
from saccade.engine.rows import expanded
from saccade.errors import ModelError, SaccadeError
from saccade.kv import KVFormat, KVStorage, KVView
from saccade.kv.paged import Paged
from saccade.kv.row_formats import INT8
from saccade.methods.policy import Policy
from saccade.models import load_model
from saccade.models.facts import described
from saccade.models.latent import LatentAttention
from saccade.ops import Call, cpu, run
from saccade.selection import Band, Blocks, Dense, Shape

FAMILIES = quick(("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "youtu"), lambda one: one == "deepseek_v3")
CPU = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), max_position_embeddings=512))


@pytest.fixture(scope="module")
def llm(pair):
    return pair.llm()


def taken(monkeypatch) -> list[int]:
    """Rows that are attended by each head's keys and values, from here on."""
    found, take = [], expanded.LatentRows.take

    def noted(self, rows, out):
        found.append(rows.stop - rows.start)
        take(self, rows, out)

    monkeypatch.setattr(expanded.LatentRows, "take", noted)
    return found


@pytest.mark.parametrize("options", [{"backend": "reference"}, {}, {"exact": False}])
def test_ragged_prompts_in_chunks_batched(pair, options, monkeypatch):
    rows, llm = taken(monkeypatch), pair.llm(**options)
    prompts = [random_ids(length, seed=length) for length in (61, 1, 24, 200)]
    for ids, output in zip(prompts, llm.generate(prompts, GREEDY)):
        pair.check(ids, output)
    layers = llm.model.spec.layers
    pays = llm.model.runner.modules.layers[0].self_attn.forward._pays_from
    assert 1 < pays <= 24  # so chunks of 24 rows are attended so, those of 1 to 13 by the latents
    assert set(rows) == {24}
    assert sum(rows) >= (layers - 1) * 24 * (2 + 1 + 8)  # nobody reads the last layer's rows but a prompt's last


def test_values_are_channels_of_keys_and_lie_there_once(llm):
    storage, spec = llm.pool.storage, llm.model.spec
    assert storage.v is storage.k
    assert (spec.kv_heads, spec.head_dim, spec.value_dim) == (1, 48, 32)
    assert llm.pool.format.block_bytes == 16 * 48 * 4
    assert storage.num_blocks == (8 << 20) // (16 * 48 * 4)


def test_turns_edits_and_cancelled_turns(pair, llm):
    context: list[int] = []
    with llm.session() as session:
        for number, length in enumerate((50, 7, 30)):
            turn = random_ids(length, seed=number)
            context += turn
            output = session.generate(turn, GREEDY)
            assert output.report["recomputed_tokens"] == 0
            context += pair.check(context, output)
        edited = context[:37] + random_ids(15, seed=3)
        pair.check(edited, session.complete(edited, GREEDY))
        stream = session.stream(random_ids(40, seed=5), GREEDY)
        next(stream)
        stream.close()
        said = session.token_ids + random_ids(9, seed=6)
        pair.check(said, session.generate(said[-9:], GREEDY))


def test_samples_prefixes_drafts_and_preemption(pair):
    llm, ids = pair.llm(enable_prefix_caching=True), random_ids(50, seed=5)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6, ignore_eos=True, logprobs=1)
    output = llm.generate(ids, params)[0]
    assert len({tuple(pair.check(ids, output, number, greedy=False)) for number in range(3)}) > 1
    longer = ids + random_ids(20, seed=6)
    shared = llm.generate(longer, GREEDY)[0]
    pair.check(longer, shared)
    assert shared.report["cached_tokens"] == 48
    drafted = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    for policy in ("lossless(draft=topk(k=16), tokens=3)", "lossless(draft=streaming(window=20), tokens=2)"):
        pair.check(longer, llm.generate(longer, drafted, policy=policy)[0])
    blocks = 26 * llm.model.spec.layers
    llm = pair.llm(kv_memory=blocks * llm.pool.format.block_bytes)
    prompts = [random_ids(90, seed=number) for number in range(4)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1))
    assert sum(output.report["preemptions"] for output in outputs) > 0
    for ids, output in zip(prompts, outputs):
        pair.check(ids, output)


@pytest.mark.parametrize("tier", ["host", "disk", "both"])
def test_tiers_move_a_latent_once(pair, tier, tmp_path):
    """Memory for 13 of the 20 blocks that a layer has."""
    block = 16 * 48 * 4
    given = {"kv_host": "1MiB"} if tier != "disk" else {}
    given |= {"kv_disk": f"{tmp_path}:1MiB"} if tier != "host" else {}
    given |= {"kv_host": f"{30 * block}"} if tier == "both" else {}
    with pair.llm(kv_memory=40 * block, **given) as llm:
        tiers = llm.pool.tiers
        assert tiers.tier.cell_bytes - block in (0, 64)  # a frame on a disk
        for policy in ("dense", "quest(budget=64, dense_layers=0)", "topk(k=400)"):
            ids = random_ids(310, seed=4)
            output = llm.generate(ids, GREEDY, policy=policy)[0]
            if "quest" not in policy:
                pair.check(ids, output)
            assert output.error is None
            assert output.report["tiers"]["bytes_read"] % tiers.tier.cell_bytes == 0
        assert tiers.counts.bytes_read > 0


def test_saved_and_named_sessions_have_one_row_a_token(pair, llm, tmp_path):
    first, second = random_ids(45, seed=7), random_ids(12, seed=8)
    with llm.session() as session:
        said = first + tokens(session.generate(first, GREEDY))
        session.save(tmp_path / "talk")
    stored = len(said) - 1
    file = tmp_path / "talk"
    size = sum(one.stat().st_size for one in file.rglob("*")) if file.is_dir() else file.stat().st_size
    rows = llm.model.spec.layers * stored * 48 * 4
    assert rows < size < 1.5 * rows
    with pair.llm().restore(tmp_path / "talk") as session:
        output = session.generate(second, GREEDY)
        pair.check(said + second, output)
        assert output.report["cached_tokens"] == stored
    options = {"session_dir": tmp_path / "sessions"}
    with pair.llm(**options) as own, own.session(name="talk") as session:
        said = first + tokens(session.generate(first, GREEDY))
    with pair.llm(**options) as own, own.session(name="talk") as session:
        pair.check(said + second, session.generate(second, GREEDY))


FORMS = (
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=cuboid)",
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=moments, rest=estimate)",
    "lfps(k=32, blocks=4, unit=kv_head)",
    "cis(k=30, sinks=4, local=8, tau=0.0)+psaw(start_layer=1, block_size=16)+etf(start_layer=1)",
    "topk(k=48)+etf(start_layer=1)",
    f"{SPARSE}+quest(budget=32, dense_layers=0)",
    "xattention(threshold=0.5, block_size=32, stride=4)+arkvale(budget=48)",
)
POLICIES = list(dict.fromkeys([*(one.text for one in EVERY), *(Policy.parse(one).text for one in FORMS)]))


@CPU
@pytest.mark.parametrize("policy", POLICIES)
def test_every_method_by_kernels_as_by_the_reference(engines, policy):
    ids = random_ids(150, seed=5)
    asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    one, other = (llm.generate(ids, asked, policy=policy)[0] for llm in engines)
    assert one.error is None, one.error
    assert other.error is None, other.error
    assert tokens(one) == tokens(other)
    assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    for phase in ("prefill", "decode"):
        assert one.report[phase]["keys_attended"] == pytest.approx(other.report[phase]["keys_attended"], rel=0.02)


@pytest.mark.parametrize(
    "policy",
    [
        f"{SPARSE}+snapkv(capacity=70, unit=q_head)",
        f"{SPARSE}+lfps(k=8, blocks=2, least=8, history=keep)",
        "loopserve(alpha=0.5, samples=16, last_rows=8, budget=32, n_d=2, first=2, answer_rows=4)",
        "infllm(sinks=16, window=32, budget=32, block_size=32)+h2o(budget=24)",
        "xattention(threshold=0.5, block_size=32, stride=4)+psa(epsilon=0.4, block_size=16, microbatch=1)",
    ],
)
def test_talks_go_on_as_the_reference_does(engines, policy):
    """Turns after turns, an edit, and heads one at a time: what was evicted or learnt is of latents, what a prefill
    chooses of heads."""
    said: list[list[int]] = []
    for llm in engines:
        with llm.session(policy=policy) as session:
            for turn, length in enumerate((90, 70, 130)):
                output = session.generate(random_ids(length, seed=turn), GREEDY)
                assert output.error is None, output.error
            edited = session.token_ids[:150] + random_ids(80, seed=9)
            if "keep" not in policy and "snapkv" not in policy and "h2o" not in policy:
                output = session.complete(edited, GREEDY)
                assert output.error is None, output.error
            said.append(session.token_ids)
    assert said[0] == said[1]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("both"), max_position_embeddings=512)
    pair = Pair(folder)
    return pair.llm(prefill_chunk=64), pair.llm(prefill_chunk=64, backend="reference")


def test_groups_of_heads_choose_as_all_together(engines, monkeypatch):
    """One head at a time, where there is room for no more: the same keys, counted the same."""
    llm, ids = engines[0], random_ids(190, seed=6)
    policy = "flexprefill(gamma=0.4, block_size=64, min_budget=0)"
    whole = llm.generate(ids, GREEDY, policy=policy)[0]
    monkeypatch.setattr(expanded, "ROOM", 1)
    rows = taken(monkeypatch)
    apart = llm.generate(ids, GREEDY, policy=policy)[0]
    assert tokens(whole) == tokens(apart)
    assert sum(rows) >= (llm.model.spec.layers - 1) * 190
    assert whole.report["prefill"]["density"] < 0.95
    for name in ("keys_attended", "keys_scored", "keys_causal", "density"):
        assert whole.report["prefill"][name] == pytest.approx(apart.report["prefill"][name])


def test_what_a_prefill_reads_is_what_transformers_makes_of_latents(engines, monkeypatch):
    """An observer sees the keys and values of every head; attention over what it chose is float64's."""
    llm, ids, seen = engines[0], random_ids(190, seed=7), []
    module = llm.model.runner.modules.layers[1].self_attn

    def look(call):
        if call.layer != 1 or call.kv.kv_heads == 1:
            return
        seen.append(call)
        weights = module.kv_b_proj.weight.double().unflatten(0, (4, 32))
        latents = llm_rows(llm, call.request, 1, call.kv.length)
        made = torch.einsum("hcr,nr->hnc", weights, latents[:, :32].double())
        keys = torch.cat([made[..., :12], latents[None, :, 32:].double().expand(4, -1, -1)], -1)
        torch.testing.assert_close(call.kv.keys()[..., :28].double(), keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(call.kv.values()[..., :20].double(), made[..., 12:], rtol=1e-5, atol=1e-5)
        scores = call.q[..., :28].double() @ keys.transpose(1, 2) * module.scaling
        scores = scores.masked_fill(~call.selection.mask(), -torch.inf)
        out = scores.softmax(-1) @ made[..., 12:]
        torch.testing.assert_close(call.out.double(), out, rtol=1e-4, atol=1e-4)

    with observing(llm.engine, look):
        output = llm.generate(ids, GREEDY, policy=SPARSE.replace("0.5", "0.3"))[0]
    assert output.error is None, output.error
    assert len(seen) == 3
    assert any(call.selection.density() < 1 for call in seen)


def llm_rows(llm, request: int, layer: int, length: int) -> torch.Tensor:
    """The latents of a request that runs, [length, 48]."""
    running = next(one for one in llm.engine.scheduler.running if one.id == request)
    memory = llm.engine.worker.memories[running.sequence.id]
    return memory.kv.view(layer).keys(0, length)[0]


def test_int8_latents_are_what_their_codes_stand_for(engines, pair, monkeypatch):
    ids = random_ids(150, seed=5)
    asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    both = [pair.llm(kv_dtype="int8", **given) for given in ({}, {"backend": "reference"})]
    layout = both[0].pool.format
    assert (layout.joined, layout.turned, layout.k) == (True, False, INT8)
    assert layout.block_bytes == 16 * (48 + 4)
    for policy in ("dense", "quest(budget=48, dense_layers=0)", "topk(k=24)", "psa", SPARSE):
        one, other = (llm.generate(ids, asked, policy=policy)[0] for llm in both)
        assert one.error is None, one.error
        assert tokens(one) == tokens(other)
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=5e-3)
    with pytest.raises(SaccadeError, match="kv_rotate"):
        pair.llm(kv_rotate=True)


def test_layouts_and_configs_that_do_not_exist(tmp_path):
    with pytest.raises(SaccadeError, match="value_dim=49 must be from 1 to head_dim=48"):
        KVFormat(torch.float32, 1, 48, value_dim=49)
    storage = KVStorage(KVFormat(torch.float32, 1, 48, value_dim=32), 3)
    storage.k.copy_(torch.arange(3.0)[:, None, None, None])
    storage.copy(torch.tensor([[2]]), torch.tensor([[0]]))
    assert storage.k[:, 0, 0, 0].tolist() == [2.0, 1.0, 2.0]
    from saccade.models.refusals import refuse_unsupported

    config = {"model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 2, "kv_lora_rank": 32}
    with pytest.raises(ModelError, match="num_key_value_heads"):
        refuse_unsupported(config, "here")
    with pytest.raises(ModelError, match="kv_lora_rank must be a positive"):
        refuse_unsupported({**config, "num_key_value_heads": 4, "kv_lora_rank": -1}, "here")
    with pytest.raises(ModelError, match="MLA"):
        refuse_unsupported({"model_type": "llama", "kv_lora_rank": 512}, "here")


def test_kimi_is_read_as_the_family_that_it_is(tmp_path):
    folder = make_checkpoint("deepseek_v3", tmp_path / "kimi", n_group=1, topk_group=1)
    pair, ids = Pair(folder), random_ids(40, seed=1)
    edit_config(folder, model_type="kimi_k2")
    assert described(folder).family == "deepseek_v3"
    with pair.llm() as llm:
        pair.check(ids, llm.generate(ids, GREEDY)[0])


def test_quantised_matrices_make_the_keys_that_their_codes_stand_for(tmp_path):
    wide = {"hidden_size": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    folder = make_checkpoint("deepseek_v3", tmp_path / "wide", **wide, q_lora_rank=None)
    made = [load_model(folder, dtype="float32", quantize=one) for one in (None, "int8")]
    plain, rounded = (one.runner.modules.layers[1].self_attn for one in made)
    assert type(rounded.kv_b_proj).__name__ == "MatrixProduct"
    for exact, own in zip(plain.forward.weights, rounded.forward.weights):
        off = (exact - own).abs().amax()
        assert 0 < off < 0.01 * exact.abs().amax()


def test_audits_and_what_is_refused(pair):
    ids = random_ids(120, seed=9)
    with pair.llm() as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, audit_steps=1.0)
        output = llm.generate(ids, params, policy="topk(k=10000)")[0]
        pair.check(ids, output)
        assert output.report["audit"]["agreement"]["mean"] == 1
        asked = SamplingParams(max_tokens=2, certify=(0.1, 0.1))
        with pytest.raises(SaccadeError, match="stores latents"):
            llm.generate(ids, asked, policy="vattention")
        with pytest.raises(SaccadeError, match="stores latents"):
            llm.generate(ids, SamplingParams(max_tokens=2), policy="vattention(certify=true)")
    with pytest.raises(SaccadeError, match="tensor_parallel_size=2"):
        pair.llm(tensor_parallel_size=2)


@CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [20, 48, 77, 128])
def test_kernels_with_heads_as_lanes(heads, dtype):
    """Rows of many heads over one list of keys: everything, both ends, and blocks, ragged, beside float64."""
    rng = torch.Generator().manual_seed(heads)
    for length in (1, 31, 700, 9001):
        k = torch.randn(1, length, 96, generator=rng).to(dtype)
        q = torch.randn(heads, 1, 96, generator=rng).to(dtype)
        layout = KVFormat(dtype, 1, 96, 16, value_dim=64)
        storage = KVStorage(layout, layout.blocks(length) + 3)
        table = torch.randperm(layout.blocks(length) + 3, generator=rng)[: layout.blocks(length)].to(torch.int32)
        storage.k.fill_(torch.nan)
        view = KVView(Paged(storage.k, storage.v, table[None], length, layout))
        view.write(0, k, k)
        shape = Shape.suffix(heads, 1, 1, length)
        some = torch.arange(0, -(-length // 48), 2)
        blocks = Blocks.from_lists(shape, 48, [some])
        for selection in (Dense(shape), Band(shape, window=200, sinks=5), blocks):
            ran = run(Call(q, view, selection, 0.13), "cpu")
            scores = (q[:, 0].double() @ k[0].double().T * 0.13).masked_fill(~selection.mask()[:, 0], -torch.inf)
            right = scores.softmax(-1) @ k[0].double()
            close = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ran.out[:, 0, :64].double(), right[:, :64], rtol=close, atol=close)
            torch.testing.assert_close(ran.lse[:, 0].double(), scores.logsumexp(-1), rtol=close, atol=close)


def random_config(seed: int) -> tuple[str, dict]:
    """A family and sizes of it: heads, ranks, rotated and plain channels, experts and their groups, YaRN."""
    rng = random.Random(seed)
    family = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")[seed % 4]
    heads, layers = rng.choice((1, 2, 3, 6)), rng.randrange(2, 5)
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": 48,
        "q_lora_rank": rng.choice((None, 16, 40)),
        "kv_lora_rank": rng.choice((16, 32, 40, 64)),
        "qk_nope_head_dim": rng.choice((8, 16, 24)),
        "qk_rope_head_dim": rng.choice((8, 16, 32)),
        "v_head_dim": rng.choice((8, 20, 48)),
        "attention_bias": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if family != "youtu":
        groups = rng.choice((1, 2, 4))
        sizes |= {"n_routed_experts": 2 * groups * rng.choice((1, 2)), "n_shared_experts": rng.choice((1, 3))}
        sizes |= {"n_group": groups, "topk_group": rng.randrange(1, groups + 1), "num_experts_per_tok": 2}
        sizes |= {"routed_scaling_factor": rng.choice((1.0, 2.5))}
    if family in ("deepseek_v2", "deepseek_v3"):
        sizes["first_k_dense_replace"] = rng.randrange(layers + 1)
    if family == "deepseek_v2":
        sizes["topk_method"] = rng.choice(("greedy", "group_limited_greedy"))
    else:
        sizes |= {"rope_interleave": rng.random() < 0.5, "norm_topk_prob": rng.random() < 0.5}
    if rng.random() < 0.5:
        sizes["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": rng.choice((4.0, 40.0)),
            "original_max_position_embeddings": 32,
            "mscale": rng.choice((0.707, 1.0)),
            "mscale_all_dim": rng.choice((0.0, 0.707, 1.0)),
        }
    else:
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    return family, sizes


@pytest.mark.parametrize("seed", quick(range(32), lambda seed: seed < 8))
def test_random_configs(seed, tmp_path):
    family, sizes = random_config(seed)
    pair = Pair(make_checkpoint(family, tmp_path / "model", seed=seed, **sizes))
    with pair.llm(exact=seed % 2 == 0, enable_prefix_caching=True) as llm:
        assert isinstance(llm.model.runner.modules.layers[0].self_attn.forward, LatentAttention)
        prompts = [random_ids(length, seed=length + seed) for length in (70, 1, 26)]
        for ids, output in zip(prompts, llm.generate(prompts, GREEDY)):
            pair.check(ids, output)
        ids = prompts[0] + random_ids(9, seed=seed)
        shared = llm.generate(ids, GREEDY)[0]
        pair.check(ids, shared)
        assert shared.report["cached_tokens"] == 64
        pair.check(ids, llm.generate(ids, GREEDY, policy="lossless(draft=topk(k=16), tokens=2)")[0])
        with llm.session() as session:
            session.generate(prompts[2], GREEDY)
            session.generate(prompts[0], GREEDY)
            edited = session.token_ids[:50] + random_ids(20, seed=seed)
            pair.check(edited, session.complete(edited, GREEDY))
