"""KV heads that ranks share out by what each reads: which rank has which, and that answers, reports and what is saved
are those of one process."""

from __future__ import annotations

import json
import random

import fork_server
import pytest
import rank_threads
import torch
from engine_helpers import EVERY, finish
from gguf import GGMLQuantizationType as Kind
from gguf_files import FAMILIES as GGUF_FAMILIES
from gguf_files import WIDE, tiny, write
from packed_files import FOLDERS, quantise
from rank_helpers import PROMPTS, greedy, make, same
from test_lora import write_adapter
from test_ranks_families import PACKED, POLICIES, SERVED, SIZES, ask, thorough_but, wider
from tiny_models import make_checkpoint, one_thread  # noqa: F401

from saccade import llm as llm_module
from saccade import ranks
from saccade.engine.messages import MapOrder
from saccade.errors import SaccadeError
from saccade.methods import prehoc
from saccade.methods.offline import KINDS
from saccade.methods.policy import Policy
from saccade.models.calibration import Calibrations, save_calibration
from saccade.models.checkpoint import open_checkpoint
from saccade.models.families import FAMILIES, attending_layers
from saccade.models.head_order import HeadDensities, busiest, gains, orders_of, shared_out
from saccade.models.hf_config import checked_config
from saccade.models.loader import load_model
from saccade.models.shards import Share
from saccade.models.tuned_heads import find_heads, keep_heads
from saccade.selection.head_part import HeadPart
from saccade_contrib.channels import CALIBRATION

pytestmark = pytest.mark.filterwarnings("ignore:no kernel here", "ignore:channels of weights", "ignore:quantize=")
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 512}
FOUR = {**SIZES, "num_key_value_heads": 4}
READ = (0.9, 0.8, 0.2, 0.1), (0.1, 0.2, 0.3, 0.9), (0.9, 0.1, 0.8, 0.2)  # by KV head, of layers in turn


def densities(layers: int) -> HeadDensities:
    return HeadDensities("psa", "a text", "2026-01-01", decode=tuple(READ[at % 3] for at in range(layers)))


@pytest.fixture(autouse=True)
def threads(monkeypatch, tmp_path):
    """Other ranks are threads."""
    monkeypatch.setattr(ranks, "subprocess", rank_threads.SUBPROCESS)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def measured(monkeypatch):
    """Models load as if so much was measured of theirs."""

    def of(folder) -> None:
        config = checked_config(open_checkpoint(folder))
        found = densities(len(attending_layers(FAMILIES[config.model_type], config)))
        monkeypatch.setattr(llm_module, "find_heads", lambda where, layers: found)

    return of


def test_the_busiest_part_reads_least():
    """Of few heads the best of all ways; of many no worse than any of a thousand at random, and near the mean."""
    assert [shared_out([(one,) for one in row], 2) for row in READ] == [(0, 3, 1, 2), (0, 3, 1, 2), (0, 1, 2, 3)]
    rng = random.Random(3)
    for count, parts in ((4, 2), (6, 3), (8, 2), (8, 4), (16, 4), (32, 4)):
        loads = [(rng.random(), rng.random() ** 3) for _ in range(count)]
        order = shared_out(loads, parts)
        size = count // parts
        assert sorted(order) == list(range(count))
        assert all(list(order[at : at + size]) == sorted(order[at : at + size]) for at in range(0, count, size))
        drawn = [rng.sample(range(count), count) for _ in range(1000)]
        assert busiest(loads, order, parts) <= min(busiest(loads, tuple(one), parts) for one in drawn) + 1e-9
    even = [(0.5,)] * 8
    assert shared_out(even, 2) == tuple(range(8))


def test_nothing_is_moved_where_nothing_is_gained():
    found = densities(3)
    assert orders_of(found, 3, 4, 2) == ((0, 3, 1, 2), (0, 3, 1, 2), (0, 1, 2, 3))
    for known, layers, kv_heads, parts in ((None, 3, 4, 2), (found, 3, 4, 1), (found, 3, 4, 4), (found, 2, 4, 2)):
        assert orders_of(known, layers, kv_heads, parts) == ()
    assert orders_of(found, 3, 8, 2) == ()
    assert orders_of(HeadDensities("psa", "a text", "a day"), 3, 4, 2) == ()
    both = HeadDensities("psa", "a text", "a day", prefill=((0.2, 0.1, 0.2, 0.1),), decode=((0.9, 0.9, 0.1, 0.1),))
    assert orders_of(both, 1, 4, 2) == ((0, 3, 1, 2),)
    assert gains(found) == {2: (pytest.approx((1.7 + 1.6 + 1) / 3), pytest.approx((1 + 4 / 3 + 1) / 3))}


def test_parts_of_an_order():
    part = HeadPart(1, 2, orders=((0, 3, 1, 2), (0, 1, 2, 3)))
    assert list(part.at(0).units(2)) == [1, 2]
    assert list(part.at(1).units(4)) == [4, 5, 6, 7]
    whole = torch.arange(24).view(2, 12)
    halves = [HeadPart(number, 2, orders=part.orders).at(0).own(whole, 1) for number in (0, 1)]
    assert halves[1].tolist() == [[3, 4, 5, 6, 7, 8], [15, 16, 17, 18, 19, 20]]
    assert torch.equal(part.at(0).join(halves, 1), whole)


def test_files_hang_on_the_weights(tmp_path):
    """Not on the dtype, the machine or the folder."""
    folder, other = (make_checkpoint("llama", tmp_path / str(seed), seed=seed, **LLAMA) for seed in (1, 2))
    assert find_heads(folder, None) is None
    file = keep_heads(folder, None, densities(3))
    assert find_heads(folder, None) == densities(3)
    assert find_heads(folder.rename(tmp_path / "moved"), None) == densities(3)
    assert find_heads(other, None) is None
    assert find_heads(tmp_path / "moved", 2) is None
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "version": 2}))
    assert find_heads(tmp_path / "moved", None) is None
    file.write_text(json.dumps({**data, "decode": [[2.0]]}))
    with pytest.raises(SaccadeError, match=r"no number from 0 to 1\); run saccade tune again, or remove it"):
        find_heads(tmp_path / "moved", None)


@pytest.mark.parametrize("family", thorough_but(("phi3", "olmo2"), SERVED))
def test_families(family, tmp_path, measured):
    """Fused projections and norms over all heads among them."""
    folder = make_checkpoint(family, tmp_path, **wider(family, 4))
    measured(folder)
    ask(folder, (1, 2), POLICIES[1:])


@pytest.mark.parametrize(("family", "name"), [pytest.param(*one, marks=pytest.mark.thorough) for one in PACKED])
def test_packed_weights(family, name, tmp_path, measured):
    made = make_checkpoint(family, tmp_path / "made", **FOUR)
    measured(made)
    ask(quantise(made, tmp_path / name, FOLDERS[name])[0], (1, 2), exact=False)


@pytest.mark.parametrize("quantize", ["int4", pytest.param("int8", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", thorough_but(("llama",), ("llama", "mixtral", "gpt_oss", "gemma3_text", "phi3")))
def test_weights_rounded_as_they_load(family, quantize, tmp_path, measured):
    """Channels of output matrices in groups are put into the model's order before the product."""
    folder = make_checkpoint(family, tmp_path, **FOUR)
    measured(folder)
    ask(folder, (1, 2), POLICIES[1:], quantize=quantize, exact=False)


@pytest.mark.thorough
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_files(family, tmp_path, measured):
    sizes = {**WIDE, "num_key_value_heads": 4}
    made = tiny(family, tmp_path / "made", **sizes, max_position_embeddings=512)
    measured(made)
    ask(write(made, tmp_path / "m.gguf", Kind.Q8_0), (1, 2), POLICIES[1:], exact=False)


@pytest.mark.thorough
def test_adapters(tmp_path, measured):
    made = make_checkpoint("llama", tmp_path / "base", **LLAMA)
    adapter = write_adapter(made, tmp_path / "adapter", targets=("q_proj", "v_proj", "o_proj"), use_dora=False)
    measured(made)
    ask(made, (1, 2), lora=adapter)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), **LLAMA)


@pytest.fixture
def pair(folder):
    """An engine of one process, and one of two, which find what was measured."""
    keep_heads(folder, None, densities(3))
    with make(folder, 1, kv_memory="8MiB", exact=False) as one, make(folder, 2, kv_memory="8MiB", exact=False) as two:
        assert two.model.part.orders == ((0, 3, 1, 2), (0, 3, 1, 2), (0, 1, 2, 3))
        yield one, two


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB", "kv_memory": "512KiB"}], ids=["memory", "tiers"])
def test_four_processes(tmp_path, monkeypatch, options):
    """Of eight KV heads each has two."""
    folder = make_checkpoint("llama", tmp_path / "model", **{**LLAMA, "num_key_value_heads": 8})
    rng = random.Random(5)
    read = tuple(tuple(rng.random() for _ in range(8)) for _ in range(3))
    keep_heads(folder, None, HeadDensities("psa", "a text", "a day", decode=read))
    monkeypatch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
    ask(folder, (1, 4), exact=False, **options)
    with make(folder, 4, kv_memory="8MiB") as llm:
        assert len(set(llm.model.part.orders)) == 3


NUMBERED = [  # by a head's number, or of all heads together
    "random(k=20)",
    "vattention(sinks=16, local=16)",
    "arkvale(budget=64, unit=layer)",
    "infllm(sinks=32, window=32, budget=32, block_size=32)+adakv(capacity=60, window=16, unit=q_head)",
    "hshare(heavy=30, sinks=4, local=8, source=prompt, rows=8)",
    "flexprefill(min_budget=0)+psa(epsilon=0.3)",
]


@pytest.mark.parametrize("policies", [NUMBERED, pytest.param(EVERY, marks=pytest.mark.thorough)], ids=["six", "every"])
def test_methods(pair, policies):
    """Tokens, and what each head of the model read."""
    for policy in policies:
        own = [llm.generate(PROMPTS[:1], greedy(8), policy=policy) for llm in pair]
        same(*own)
        for mine, theirs in zip(*own, strict=True):
            for phase in ("prefill", "decode"):
                assert mine.report[phase]["density_per_head"] == theirs.report[phase]["density_per_head"], policy
                assert mine.report[phase]["keys_attended"] == theirs.report[phase]["keys_attended"], policy


def test_audits_certificates_and_maps(pair):
    """By the model's numbers of heads."""
    policy, answers = Policy.parse("topk(k=24)"), []
    for llm in pair:
        params = greedy(10, seed=3, bounds=0.7, audit=0.5)
        request = llm.engine.add(PROMPTS[0], params, policy, map_order=MapOrder((0, 2), 32))
        finish(llm.engine)
        answers.append((request.audit.masses, request.report.as_dict()["bounds"], request.maps.as_dict()["maps"]))
    (masses, bounds, maps), (own_masses, own_bounds, own_maps) = answers
    assert masses.keys() == own_masses.keys()
    for place, mass in masses.items():
        assert own_masses[place].mean == pytest.approx(mass.mean, abs=2e-5), place
    dropped, own_dropped = (found["certificates"]["dropped"]["per_head"]["error"] for found in (bounds, own_bounds))
    for layer in range(3):
        assert own_dropped[layer] == pytest.approx(dropped[layer], abs=1e-4)
        assert len(set(dropped[layer])) > 4
    for one, other in zip(maps, own_maps, strict=True):
        assert other["mass"] == pytest.approx(one["mass"], abs=1e-4)
        assert other["share"] == one["share"]


@pytest.mark.parametrize(
    "options", [{"kv_dtype": "int8"}, pytest.param({}, marks=pytest.mark.thorough)], ids=["int8", "plain"]
)
def test_sessions_go_on_with_heads_elsewhere(folder, tmp_path, measured, monkeypatch, options):
    """Saved by two processes that share heads out, restored by two that do not, by one, and again."""
    settings = {"kv_memory": "8MiB", "exact": False, **options}
    policy = "flexprefill(min_budget=0)+quest(budget=64, dense_layers=0)"
    with make(folder, 1, **settings) as llm, llm.session(policy) as session:
        wanted = [session.generate(PROMPTS[turn % 3][:90], greedy(5)) for turn in range(4)]
    for turn, (number, shares) in enumerate(((2, True), (2, False), (1, False), (2, True))):
        measured(folder) if shares else monkeypatch.setattr(llm_module, "find_heads", lambda where, layers: None)
        with make(folder, number, **settings) as llm:
            assert bool(llm.model.part.orders) is shares
            session = llm.session(policy) if turn == 0 else llm.restore(tmp_path / "saved")
            assert session.note is None
            answer = session.generate(PROMPTS[turn % 3][:90], greedy(5))
            same([wanted[turn]], [answer])
            assert answer.report["cached_tokens"] == wanted[turn].report["cached_tokens"]
            session.save(tmp_path / "saved")
            session.close()


def test_calibrations_go_with_their_heads(tmp_path):
    folder = make_checkpoint("llama", tmp_path, **LLAMA)
    whole = load_model(folder)
    parts = [load_model(folder, share=Share(rank, 2, lambda: None, densities(3))) for rank in (0, 1)]
    rng = torch.Generator().manual_seed(3)
    for kind in (CALIBRATION, prehoc.LOCALITY):
        spec = whole.spec
        shapes = KINDS[kind].shapes(spec.heads, spec.kv_heads, spec.head_dim)
        made = [{name: torch.rand(shape, generator=rng) for name, shape in shapes.items()} for _ in range(spec.layers)]
        save_calibration(folder, kind, made)
        own = [Calibrations(part.spec, folder, part.part).layer([kind], 0) for part in parts]
        for name, tensor in made[0].items():
            if kind == prehoc.LOCALITY:
                assert all(torch.equal(one[name], tensor) for one in own)
            else:
                heads = tensor.unflatten(0, (4, -1))
                assert torch.equal(own[1][name], heads[[1, 2]].flatten(0, 1))
