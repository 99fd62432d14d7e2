"""What callers of vLLM find where they look for it."""

from __future__ import annotations

import json
import shutil
import time

import pytest
from engine_helpers import GREEDY, make, tokens
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.errors import ModelError, RequestError, SaccadeError

IDS = random_ids(60, seed=5)


def test_no_prompts_no_outputs(llm):
    assert llm.generate([]) == []
    assert llm.generate([], []) == []
    assert llm.generate([], GREEDY, use_tqdm=True) == []


def test_prompts_as_mappings(llm):
    alone = tokens(llm.generate(IDS, GREEDY)[0])
    text = "hello there"
    by_text = tokens(llm.generate(text, GREEDY)[0])
    outputs = llm.generate(
        [{"prompt_token_ids": IDS}, {"prompt": text}, IDS, {"prompt": "said", "prompt_token_ids": IDS}], GREEDY
    )
    assert [tokens(one) for one in outputs] == [alone, by_text, alone, alone]
    assert [one.prompt for one in outputs] == [None, text, None, "said"]
    assert tokens(llm.generate({"prompt": text}, GREEDY)[0]) == by_text
    assert [step.outcome.token_ids for step in llm.stream({"prompt": text}, GREEDY) if step.finished] == [by_text]
    with llm.session() as session:
        assert tokens(session.generate({"prompt": text}, GREEDY)) == by_text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "the keys (none) cannot be read"),
        ({"prompt": None}, "the keys prompt cannot be read"),
        ({"prompt": "x", "multi_modal_data": 1}, "a prompt has multi_modal_data (1); models read text alone here"),
        ({"prompt": "x", "multi_modal_data": {"image": 0, 3: 0}}, "a prompt has multi_modal_data (image, 3)"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": "text"}, ""),
        ({"prompt_token_ids": 5}, "a prompt must be text or a list of token ids, got int"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
    ],
)
def test_mappings_that_are_no_prompt(llm, prompt, message):
    if message:
        with pytest.raises(RequestError) as caught:
            llm.generate([prompt])
        assert message in str(caught.value)


def test_outputs_say_who_when_and_why(llm):
    before = time.time()
    outputs = llm.generate([IDS, IDS[:20]], GREEDY)
    assert len({one.request_id for one in outputs}) == 2
    for one in outputs:
        assert isinstance(one.request_id, str)
        seen = one.metrics
        assert seen.num_generation_tokens == 10
        when = [seen.arrival_time, seen.first_scheduled_time, seen.first_token_time, seen.last_token_time]
        when.append(seen.finished_time)
        assert when == sorted(when)
        assert seen.first_token_latency >= seen.time_in_queue >= 0
        assert before - 1 <= when[0] <= when[-1] <= time.time() + 1
        assert one.outputs[0].stop_reason is None
        assert one.num_cached_tokens == 0
    with llm.session() as session:
        session.generate(IDS, GREEDY)
        assert session.generate(IDS[:5], GREEDY).num_cached_tokens >= 60


def test_a_progress_bar_counts_prompts(llm, capsys):
    seen = []

    class Bar:
        def __init__(self, total, desc, **_):
            seen.append((total, desc))

        def update(self, count):
            seen.append(count)

        def close(self):
            seen.append("closed")

    llm.generate([IDS, IDS], GREEDY, use_tqdm=Bar)
    assert seen == [(2, "Processed prompts"), 1, 1, "closed"]
    llm.generate([IDS], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate([IDS], GREEDY, use_tqdm=True)
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_the_tokenizer_is_transformers_own(llm):
    assert llm.get_tokenizer()("hello")["input_ids"] == llm.tokenizer.encode("hello")


def test_variables_reach_the_chat_template(tiny_llama):
    with make(tiny_llama) as llm:
        llm.tokenizer.hf.chat_template = (
            "{{ mood }}:{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
        )
        ask = [{"role": "user", "content": "hello"}]
        for end, more in ((">", {}), ("", {"add_generation_prompt": False})):
            output = llm.chat(ask, GREEDY, chat_template_kwargs={"mood": "sad"}, **more)[0]
            assert output.prompt_token_ids == llm.tokenizer.encode(f"sad:hello{end}", add_special_tokens=False)
        with llm.session() as session:
            session.chat("hello", GREEDY, chat_template_kwargs={"mood": "sad"})
            assert session.token_ids[:9] == llm.tokenizer.encode("sad:hello", add_special_tokens=False)
        with pytest.raises(RequestError, match="cannot set tokenize"):
            llm.chat(ask, chat_template_kwargs={"tokenize": True})
        with pytest.raises(RequestError, match="must map"):
            llm.chat(ask, chat_template_kwargs=["mood"])


def test_sampling_defaults_come_from_the_checkpoint(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    said = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 7, "min_p": None}
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}) if file.is_file() else json.dumps(said))
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=7)
    with make(folder) as llm:
        assert llm.get_default_sampling_params() == expected
        assert len(tokens(llm.generate(IDS)[0])) <= 7
        assert len(tokens(llm.generate(IDS, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))[0])) == 9
        with llm.session() as session:
            assert len(session.generate(IDS).outputs[0].token_ids) <= 7
    for chosen in ("none", "vllm"):
        with make(folder, generation_config=chosen) as llm:
            assert llm.get_default_sampling_params() == SamplingParams()
    with make(tiny_llama, generation_config=folder) as llm:
        assert llm.get_default_sampling_params() == expected
    with pytest.raises(SaccadeError, match="generation_config='somewhere' must be 'auto', 'none' or a folder"):
        LLM(tiny_llama, generation_config="somewhere")
    file.write_text("{")
    with make(tiny_llama, generation_config=folder) as llm, pytest.raises(ModelError, match="generation_config"):
        llm.get_default_sampling_params()


def test_prompts_that_begin_alike_share_their_beginning_by_default(tiny_llama):
    """As vLLM's ``enable_prefix_caching``; ``reset_prefix_cache`` gives up what is kept."""
    with LLM(tiny_llama, dtype="float32", kv_memory="8MiB", device="cpu") as llm:
        first, again = (llm.generate(IDS, GREEDY)[0] for _ in range(2))
        assert tokens(first) == tokens(again)
        assert first.report["cached_tokens"] == 0
        assert again.report["cached_tokens"] >= llm.config.block_size
        assert llm.pool.used_blocks > 0
        llm.reset_prefix_cache()
        assert llm.pool.used_blocks == 0
        assert llm.generate(IDS, GREEDY)[0].report["cached_tokens"] == 0
    with LLM(tiny_llama, dtype="float32", kv_memory="8MiB", device="cpu", enable_prefix_caching=False) as llm:
        assert [llm.generate(IDS, GREEDY)[0].report["cached_tokens"] for _ in range(2)] == [0, 0]
