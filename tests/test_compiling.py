"""Kernels are compiled before requests come, and a request that waited for the compiler says so."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from saccade import LLM, SamplingParams
from saccade.engine.settings.config import EngineConfig
from saccade.errors import ModelError, PolicyError, SaccadeError
from saccade.methods.policy import Policy
from saccade.ops import compiling
from saccade.server import warming
from saccade.server.metrics import Metrics
from saccade.server.policies import to_warm
from saccade.server.warmed import mark_of

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.skipif(compiling.cache_folder() is None, reason="Triton is not installed")
def test_what_a_dry_run_finds_is_compiled_elsewhere_and_found_again(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("compiling_ahead.py")
    ran = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr[-2000:]


@pytest.fixture
def llm():
    with LLM("retriever", max_model_len=512, kv_memory="16MiB") as made:
        yield made


def test_a_request_that_waited_for_the_compiler_says_so(llm, monkeypatch):
    """So does one that queued meanwhile; one that comes later does not."""
    monkeypatch.setattr(compiling.compiled, "kernels", 0)
    monkeypatch.setattr(compiling.compiled, "seconds", 0.0)
    llm.engine.compile_waits._told = compiling.Compiled()
    real, times = llm.engine.worker.run, []

    def run(step, **options):
        times.append(1)
        if len(times) == 1:
            compiling._listen(times=type("T", (), {"total": 2_500_000}), cache_hit=False)
            compiling._listen(times=type("T", (), {"total": 100_000}), cache_hit=True)
        return real(step, **options)

    monkeypatch.setattr(llm.engine.worker, "run", run)
    first, second = llm.generate(["one text", "another text"], GREEDY)
    for one in (first, second):
        assert (one.report["compiled_kernels"], one.report["compile_seconds"]) == (1, 2.5)
        assert any("it waited 2.5 s while 1 kernels were compiled" in note for note in one.report["notes"])
    later = llm.generate("one text", GREEDY)[0].report
    assert (later["compiled_kernels"], later["compile_seconds"], later["notes"]) == (0, 0.0, [])
    assert llm.loop.statistics().compiled == (1, 2.5)


def test_metrics_count_what_was_compiled(llm, monkeypatch):
    monkeypatch.setattr(compiling.compiled, "kernels", 3)
    monkeypatch.setattr(compiling.compiled, "seconds", 4.5)

    class Face:
        def statistics(self):
            return llm.loop.statistics()

    text = Metrics(Face(), "m").text().decode()
    assert 'saccade:compiled_kernels_total{model_name="m"} 3.0' in text
    assert 'saccade:compile_seconds_total{model_name="m"} 4.5' in text


def test_which_policies_a_server_is_made_ready_for():
    dense = Policy.parse("dense")
    assert to_warm(["auto"], dense, []) == [dense]
    assert to_warm(["auto"], dense, ["psa(*)", "lfps", "dense"]) == [dense, Policy.parse("lfps")]
    safe = Policy.parse("sampled_rows(threshold=0.0005)+psa")  # what the policy auto may become
    assert to_warm(["psa", "auto()"], dense, ["lfps"]) == [Policy.parse("psa"), dense, safe]
    assert to_warm(["auto"], Policy.parse("auto"), []) == [dense, safe]
    assert to_warm(["none"], dense, ["lfps"]) == []
    with pytest.raises(PolicyError, match="goes with no other"):
        to_warm(["none", "psa"], dense, [])
    with pytest.raises(PolicyError, match="psaa"):
        to_warm(["psaa"], dense, [])


def test_nothing_is_done_where_there_is_no_gpu(llm):
    assert warming.begin(EngineConfig(device="cpu"), [Policy.parse("dense")]) is None
    warming.warm(llm, [Policy.parse("dense")])
    assert llm.generate("one", GREEDY)[0].report["cached_tokens"] == 0


def test_prompts_are_run_under_each_policy_and_what_fails_is_left_out(llm, monkeypatch, caplog):
    asked = []
    real = llm.generate

    def generate(prompt, params, *, policy):
        asked.append((policy.text, len(prompt["prompt_token_ids"])))
        if policy.text == "psa":
            raise ZeroDivisionError("no kernel")
        return real(prompt, params, policy=policy)

    monkeypatch.setattr(llm, "generate", generate)
    assert warming.run_through(llm, [Policy.parse("psa"), Policy.parse("streaming")]) == 0
    assert asked == [("psa", 40), ("psa", 504), ("streaming", 40), ("streaming", 504)]
    assert "'psa' is not made ready: ZeroDivisionError: no kernel" in caplog.text
    assert llm.pool.used_blocks == 0


@pytest.mark.parametrize(
    ("family", "layers", "least"),
    [("llama", 4, 2), ("gemma3_text", 6, 2), ("qwen3_moe", 3, 2)],
)
def test_the_first_layers_alone_are_what_transformers_makes_of_them(family, layers, least, tmp_path):
    kinds = ["sliding_attention", "full_attention"] * layers
    more = {"layer_types": kinds[:layers]} if family == "gemma3_text" else {}
    folder = make_checkpoint(family, tmp_path / family, num_hidden_layers=layers, **more)
    config = AutoConfig.from_pretrained(folder)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:least])
    config.num_hidden_layers = least
    oracle = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    ids = list(range(5, 45))
    want = oracle.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(folder, layers=least, dtype="float32", device="cpu", kv_memory="8MiB") as short:
        assert short.model.spec.layers == least
        assert short.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids == want


def test_wrong_numbers_of_layers_are_refused(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=2)
    with pytest.raises(ModelError, match="layers=3 must be from 1 to 2"):
        LLM(folder, layers=3, device="cpu")
    for wrong in (0, "2", True):
        with pytest.raises(SaccadeError, match=r"layers=.* must be an integer >= 1"):
            EngineConfig(layers=wrong)


def test_a_dry_run_has_every_kind_of_layer_and_keeps_nothing(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=1)
    made = warming.dry_config(EngineConfig(model=folder, device="cpu", session_dir=tmp_path / "s", kv_memory="profile"))
    assert (made.layers, made.session_dir, made.kv_memory) == (1, None, warming.DRY_MEMORY)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    folder = make_checkpoint("gemma3_text", tmp_path / "gemma", num_hidden_layers=6, layer_types=kinds)
    assert warming.dry_config(EngineConfig(model=folder, kv_memory="4MiB")).layers == 6
    assert warming.dry_config(EngineConfig(model=folder, kv_memory="4MiB")).kv_memory == 4 << 20


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    if compiling.cache_folder() is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert compiling.why_not_kept() is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "set TRITON_CACHE_DIR to a folder that can" in str(compiling.why_not_kept())


def test_a_server_knows_what_one_before_it_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    folder = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=1)
    policies = [Policy.parse("dense"), Policy.parse("psa")]
    config = EngineConfig(model=folder, device="cpu")
    mark = mark_of(config, policies)
    assert mark == mark_of(EngineConfig(model=folder, device="cpu", session_dir=tmp_path / "s"), policies)
    others = [
        mark_of(config, policies[:1]),
        mark_of(EngineConfig(model=folder, device="cpu", max_requests=3), policies),
        mark_of(EngineConfig(model=make_checkpoint("qwen2", tmp_path / "other"), device="cpu"), policies),
    ]
    assert len({mark, *others}) == 4
    assert mark_of(EngineConfig(model=tmp_path / "absent", device="cpu"), policies) is None
    made = []
    monkeypatch.setattr(warming, "KernelsAhead", lambda *given: made.append(given))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    there = replace(config, device="cuda")
    warming.begin(there, policies)
    assert len(made) == 1
    mark_of(there, policies).touch()
    assert warming.begin(there, policies) is None
    assert len(made) == 1
