"""saccade's attention in transformers' own loop: eager attention's tokens under dense, our engine's under a policy."""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, PAD, byte_tokenizer, make_checkpoint, oracle, random_ids
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)

from saccade import LLM, SamplingParams
from saccade.errors import CapacityError, ModelError, PolicyError, RequestError, SaccadeError
from saccade.methods.policy import Policy
from saccade.models.families import FAMILIES
from saccade.models.key_turns import PLAIN
from saccade.models.rebuilt import cache_argument
from saccade.transformers import SaccadeCache, configure, report
from saccade.transformers.__main__ import main
from saccade.transformers.runtime import runtime_of

CACHE = cache_argument(LlamaForCausalLM.forward)  # by the name that this version of transformers has
LENGTHS = (60, 13, 1, 37)
POLICIES = (  # one of each way in which a policy knows something
    "a_shape(sinks=4, window=32)+streaming(sinks=4, window=32)",
    "flexprefill(min_budget=64)+lfps(k=8)",
    "snapkv(capacity=32, window=8)",
    "h2o",
    "cis(k=16)+psaw",
    "flashprefill+arkvale(budget=64)",
)


LATENT = {name for name, family in FAMILIES.items() if family.latent}
SIZES = ("gemma4_text",)  # layers whose heads have other sizes than others' have


def keeps(family: str) -> bool:
    return family in FAMILIES and FAMILIES[family].keeping is not None


def batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Prompts padded on the left."""
    longest = max(lengths)
    rows = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows]),
    }


def greedy(tokens: int = 10) -> dict[str, Any]:
    return {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": tokens}


def endless(model: Any) -> Any:
    """Rows of a batch all go on to the last token."""
    model.generation_config = GenerationConfig(bos_token_id=256, pad_token_id=PAD)
    return model


def load(folder: Path, **settings: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="saccade").eval()
    configure(model, kv_memory="32MiB", **settings)
    return endless(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("hf") / "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def ours(folder) -> Any:
    return load(folder, prefill_chunk=128)


@pytest.fixture(scope="module")
def theirs(folder) -> Any:
    return endless(oracle(folder))


@pytest.mark.parametrize("family", sorted(one for one in CONFIGS if not keeps(one) and one not in {*LATENT, *SIZES}))
def test_every_family_gives_eager_attentions_tokens(family, tmp_path):
    """In a batch with padding; a forward pass without a cache gives its logits."""
    made = make_checkpoint(family, tmp_path / family, tokenizer=False)
    ours, theirs, inputs = load(made), endless(oracle(made)), batch()
    assert torch.equal(ours.generate(**inputs, **greedy(5)), theirs.generate(**inputs, **greedy(5)))
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        found, expected = (model(**inputs).logits[real] for model in (ours, theirs))
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", sorted(LATENT))
def test_latents_are_refused_by_name(family, tmp_path):
    made = make_checkpoint(family, tmp_path / family, tokenizer=False)
    with pytest.raises(ModelError, match=f"does not serve '{family}': .* of latents .* use saccade.LLM"):
        load(made)


@pytest.mark.parametrize("family", SIZES)
def test_heads_of_several_sizes_are_refused_by_name(family, tmp_path):
    made = make_checkpoint(family, tmp_path / family, tokenizer=False)
    with pytest.raises(ModelError, match=f"does not serve '{family}': .* more than one size; use saccade.LLM"):
        load(made)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_the_engines_tokens_and_reads_its_keys(folder, ours, policy):
    lengths = (300, 131, 7, 256)  # several chunks, less than one, a chunk and a few
    inputs = batch(lengths)
    made = ours.generate(**inputs, **greedy(), saccade=policy)[:, 300:].tolist()
    with LLM(
        folder,
        dtype="float32",
        prefill_chunk=128,
        kv_memory="32MiB",
        generation_config="none",
        enable_prefix_caching=False,
    ) as llm:
        prompts = [{"prompt_token_ids": random_ids(length, seed)} for seed, length in enumerate(lengths)]
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        outputs = llm.generate(prompts, params, policy=policy)
    for tokens, found, output in zip(made, report(ours), outputs):
        assert tokens == output.outputs[0].token_ids
        assert found["policy"] == output.report["policy"] == Policy.parse(policy).text
        for count in ("keys_attended", "keys_scored", "retrievals", "density_per_layer"):
            assert found["decode"][count] == output.report["decode"][count]
        for count in ("tokens", "policy", "selections"):
            assert found["prefill"][count] is not None
    assert report(ours)[0]["prefill"]["keys_causal"] == 3 * 300 * 301 // 2


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_keys_and_values_of_eight_bits_give_the_engines_tokens(tmp_path, family):
    """Of a model whose keys have no bias, and of one whose have, by which they are balanced; with beams, too."""
    made = make_checkpoint(family, tmp_path, max_position_embeddings=1024, head_dim=16)
    model, inputs = load(made, kv_dtype="int8", prefill_chunk=128), batch((140, 30))
    found = model.generate(**inputs, **greedy(6), saccade="topk(k=24)")[:, 140:].tolist()
    settings = {"dtype": "float32", "prefill_chunk": 128, "kv_memory": "32MiB", "generation_config": "none"}
    with LLM(made, **settings, kv_dtype="int8") as llm:
        prompts = [{"prompt_token_ids": random_ids(length, seed)} for seed, length in enumerate((140, 30))]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        outputs = llm.generate(prompts, params, policy="topk(k=24)")
    assert found == [output.outputs[0].token_ids for output in outputs]
    runtime = runtime_of(model.config)
    assert runtime.running.pool.format.turned
    turns = [runtime.turn_of(layer.self_attn) for layer in model.model.layers]
    assert all((turn is PLAIN) == (family == "mistral") for turn in turns)
    assert model.generate(**inputs, **greedy(4), num_beams=3).shape == (2, 144)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0},
        {"prefill_chunk_size": 16},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_other_ways_to_generate_give_eager_attentions_tokens(ours, theirs, asked):
    """Beams reorder the cache, drafts crop it, and a prompt may come in chunks, some of them padding alone."""
    inputs = batch((60,) if "prompt_lookup_num_tokens" in asked else LENGTHS)
    if "prompt_lookup_num_tokens" in asked:
        inputs = {"input_ids": inputs["input_ids"][:, :20].repeat(1, 3)}  # there is something to look up
    assert torch.equal(ours.generate(**inputs, **greedy(), **asked), theirs.generate(**inputs, **greedy(), **asked))


def test_what_generate_hands_on_to_attention_is_let_through(ours, theirs):
    """A tokenizer for stop strings reaches every layer's attention as a keyword."""
    asked = {"stop_strings": ["never said"], "tokenizer": byte_tokenizer(), "output_hidden_states": True}
    assert torch.equal(*(model.generate(**batch((20,)), **greedy(3), **asked) for model in (ours, theirs)))


def test_samples_of_one_prompt(ours, theirs):
    inputs = {name: rows[:1] for name, rows in batch().items()}
    made = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        made.append(
            model.generate(**inputs, pad_token_id=PAD, max_new_tokens=8, do_sample=True, num_return_sequences=3)
        )
    assert torch.equal(*made)


def test_a_prompt_in_chunks_gives_a_sparse_policys_tokens(ours):
    """The engine's chunks are cut where transformers' end; under chunks of equal size nothing differs."""
    inputs, policy = batch((300,)), POLICIES[0]
    whole = ours.generate(**inputs, **greedy(), saccade=policy)
    keys = report(ours)[0]["decode"]["keys_attended"]
    assert torch.equal(ours.generate(**inputs, **greedy(), saccade=policy, prefill_chunk_size=128), whole)
    assert report(ours)[0]["decode"]["keys_attended"] == keys


@pytest.mark.parametrize("policy", ["dense", "lfps(k=8)"])
def test_turns_over_one_cache(ours, theirs, policy):
    """A cache goes on where the last call left it. Under dense that equals one long call; sparse reads less."""
    ids, cache = torch.tensor([random_ids(50, 1)]), SaccadeCache(ours, policy)
    first = ours.generate(ids, **{CACHE: cache}, **greedy(6))
    again = torch.cat([first, torch.tensor([random_ids(9, 2)])], 1)
    second = ours.generate(again, **{CACHE: cache}, **greedy(6))
    assert cache.get_seq_length() == second.shape[1] - 1
    if policy == "dense":
        assert torch.equal(second, theirs.generate(again, **greedy(6)))
    (found,) = report(ours)
    assert (found["prefill"]["tokens"], found["decode"]["tokens"]) == (50 + 1 + 9, 10)
    assert (found["decode"]["density"] == 1) == (policy == "dense")


def test_a_loop_of_ones_own(ours, theirs):
    """Forward passes over our cache, cropped in between; over no cache each pass stands alone."""
    ids, cache = batch((40, 22)), SaccadeCache(ours)
    with torch.no_grad():
        places = (ids["attention_mask"].cumsum(1) - 1).clamp(min=0)
        ours(**ids, position_ids=places, **{CACHE: cache})
        cache.crop(-15)
        assert cache.get_seq_length() == 25
        fewer = {name: rows[:, :25] for name, rows in ids.items()}
        rest = {name: torch.cat([fewer[name], batch((9, 9))[name]], 1) for name in ids}
        places = (rest["attention_mask"].cumsum(1) - 1).clamp(min=0)
        new = {"input_ids": rest["input_ids"][:, 25:], "position_ids": places[:, 25:]}
        logits = ours(**new, attention_mask=rest["attention_mask"], **{CACHE: cache}).logits
        expected = theirs(**rest, position_ids=places, use_cache=False).logits[:, 25:]
    assert torch.allclose(logits, expected, atol=1e-4)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.batch_size == 1
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 3


def test_memory_comes_back(ours):
    inputs = batch()
    ours.generate(**inputs, **greedy(3), num_beams=2)
    kept = ours.generate(**inputs, **greedy(3), return_dict_in_generate=True)
    pool = runtime_of(ours.config).running.pool
    assert pool.used_blocks > 0
    assert getattr(kept, CACHE).get_seq_length() == 62
    del kept
    gc.collect()
    assert pool.used_blocks == 0
    assert not runtime_of(ours.config).memories


def test_a_default_policy_and_the_environments(folder, monkeypatch):
    monkeypatch.setenv("SACCADE_POLICY", "streaming(sinks=4, window=16)")
    model = load(folder)
    model.generate(**batch((60,)), **greedy(3))
    assert report(model)[0]["policy"] == "streaming(window=16)"
    configure(model, "lfps")
    model.generate(**batch((60,)), **greedy(3))
    assert report(model)[0]["policy"] == "lfps"


def test_a_pipeline_is_unchanged(ours, folder):
    ask = pipeline("text-generation", model=ours, tokenizer=byte_tokenizer())
    said = ask("hello there", max_new_tokens=4, do_sample=False, saccade="lfps")
    assert said[0]["generated_text"].startswith("hello there")
    assert report(ours)[0]["policy"] == "lfps"


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"saccade": "lossless"}, PolicyError, "saccade.LLM"),
        ({"saccade": "infinigen"}, PolicyError, "takes in|take in"),
        ({"saccade": "cpe"}, PolicyError, r"or 'cis\+psaw'"),
        ({"saccade": "nonsense"}, PolicyError, "unknown method"),
        ({"saccade": "lfps", "prompt_lookup_num_tokens": 3}, RequestError, "prompt_lookup_num_tokens"),
        ({"cache_implementation": "static"}, RequestError, "cache_implementation='static'"),
        ({"use_cache": False}, RequestError, "use_cache"),
        ({"output_attentions": True}, RequestError, "eager"),
        ({"custom_generate": print}, RequestError, "custom_generate"),
        ({CACHE: DynamicCache()}, RequestError, "DynamicCache"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(ours, asked, error, says):
    with pytest.raises(error, match=says):
        ours.generate(**batch((60,)), **greedy(3), **asked)


def test_forward_passes_refuse_what_they_cannot_do(ours):
    ids = torch.tensor([random_ids(12, 0)])
    with pytest.raises(SaccadeError, match="no gradients"):
        ours(ids)
    with torch.no_grad():
        with pytest.raises(ModelError, match="4 dimensions"):
            ours(ids, attention_mask=torch.zeros(1, 1, 12, 12), use_cache=False)
        with pytest.raises(ModelError, match="packed"):
            ours(ids, position_ids=torch.tensor([[*range(6), *range(6)]]), use_cache=False)
        left = getattr(ours(ids), CACHE)
        with pytest.raises(SaccadeError, match="SaccadeCache"):
            ours(ids[:, :1], **{CACHE: left})
        cache = SaccadeCache(ours, "lfps(k=8)")
        ours(ids, **{CACHE: cache})
        ours(ids[:, :1], **{CACHE: cache})
        with pytest.raises(SaccadeError, match="from -13 to 0"):
            cache.crop(5)
        cache.crop(-1)
        with pytest.raises(SaccadeError, match="learnt from what was cut off"):
            ours(ids[:, :1], **{CACHE: cache})
        with pytest.raises(SaccadeError, match="cannot go on"):
            ours(ids[:, :1], **{CACHE: cache})
        short = SaccadeCache(ours)
        ours(ids, **{CACHE: short})
        with pytest.raises(SaccadeError, match=r"must have \(1, 13\)"):
            ours(ids[:, :1], attention_mask=torch.zeros(1, 1), **{CACHE: short})


def test_a_pool_that_is_too_small_says_so(folder):
    model = load(folder)
    configure(model, kv_memory="64KiB")
    with pytest.raises(CapacityError):
        model.generate(torch.tensor([random_ids(900, 0)]), **greedy(3))
    made = model.generate(torch.tensor([random_ids(40, 0)]), **greedy(3))  # what it held is given back
    assert made.shape == (1, 43)
    with pytest.raises(SaccadeError, match="unknown setting max_requests"):
        configure(model, max_requests=3)


def test_padding_between_tokens_of_a_model_with_windows_is_refused(tmp_path):
    model = load(make_checkpoint("mistral", tmp_path / "m", tokenizer=False))
    inputs = batch((20,))
    inputs["attention_mask"][0, 5:8] = 0
    with pytest.raises(SaccadeError, match="between tokens"):
        model.generate(**inputs, **greedy(3))


def test_other_models_are_left_as_they_are(theirs):
    with pytest.raises(PolicyError, match="this model has 'eager'"):
        theirs.generate(**batch((20,)), **greedy(2), saccade="lfps")
    assert theirs.generate(**batch((20,)), **greedy(2)).shape == (1, 22)


def test_a_command_gets_saccades_attention(folder, tmp_path, monkeypatch, capsys):
    """python -m saccade.transformers COMMAND: what the command loads attends by saccade, under the policy given."""
    theirs = PreTrainedModel.__dict__["from_pretrained"]
    for place, name, value in ((PreTrainedModel, "from_pretrained", theirs), (sys, "argv", sys.argv)):
        monkeypatch.setattr(place, name, value)  # put back behind the test
    monkeypatch.setenv("SACCADE_POLICY", "dense")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, saccade.transformers\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "model.generate(torch.arange(9)[None], max_new_tokens=2, pad_token_id=0)\n"
        "print(saccade.transformers.report(model)[0]['policy'])\n"
    )
    assert main(["--policy", "lfps", str(script), str(folder)]) == 0
    assert capsys.readouterr().out == "lfps\n"
    assert main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err
    assert main(["--policy", "lossless", str(script)]) == 2
    assert "saccade.LLM" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize("policy", ["lfps", "h2o"])
def test_beams_under_methods_that_count_in_native_code(ours, policy):
    one = ours.generate(**batch((200,)), **greedy(4), saccade=policy)
    alone = report(ours)[0]["decode"]["keys_attended"]
    two = ours.generate(**batch((200,)), **greedy(4), saccade=policy, num_beams=2)
    assert two.shape == one.shape
    assert report(ours)[0]["decode"]["keys_attended"] == alone  # of a beam as of a run without beams


@pytest.mark.parametrize("policy", ["lfps", "snapkv", "h2o", "quest"])
def test_a_cache_goes_on_under_another_policy(ours, policy):
    first = ours.generate(**batch((200,)), **greedy(3), saccade="dense", return_dict_in_generate=True)
    more = ours.generate(first.sequences, **greedy(3), **{CACHE: getattr(first, CACHE)}, saccade=policy)
    assert more.shape[1] == first.sequences.shape[1] + 3
    assert report(ours)[0]["decode"]["policy"] != "dense"


def test_drafts_that_a_config_asks_for_are_refused_under_sparse_policies(ours):
    config = copy.deepcopy(ours.generation_config)
    config.prompt_lookup_num_tokens = 3
    with pytest.raises(RequestError, match="prompt_lookup_num_tokens goes with saccade='dense' alone"):
        ours.generate(**batch((200,)), generation_config=config, saccade="lfps")


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "falcon_h1"])
def test_layers_that_keep_a_state_are_refused_by_name(family, tmp_path):
    made = make_checkpoint(family, tmp_path / family, tokenizer=False)
    with pytest.raises(ModelError, match=f"does not serve '{family}': its layers that keep a state"):
        load(made).generate(**batch((20,)), **greedy(2))
