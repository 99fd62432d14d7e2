"""The Python face: bad input is named in one line, and reports say what was really done."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.cli.main import main
from saccade.engine.rows.freezing import READ_ROWS
from saccade.engine.settings.config import EngineConfig
from saccade.errors import CapacityError, PolicyError, RequestError, SaccadeError
from saccade.kv.format import KVFormat
from saccade.machine import parse_bytes, show_bytes

BLOCK_BYTES = KVFormat(torch.float32, 2, 16, 32).block_bytes
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(folder, blocks: int = 200, **options) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        kv_memory=blocks * BLOCK_BYTES,
        **{"enable_prefix_caching": False, "prefill_chunk": 64, **options},
    )


@pytest.fixture(scope="module")
def llm(tiny_llama):
    engine = make(tiny_llama, max_model_len=500)
    yield engine
    assert engine.engine.pool.used_blocks == 0
    assert not engine.engine.busy


# --- bad input


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give at least one token"),
        ([[]], "the prompt is empty"),
        (["fine", ""], "the prompt is empty"),
        ([5, 288], "token id 288 is not an integer from 0 to 287"),
        ([5, -1], "token id -1"),
        ([5, 1.0], "token id 1.0"),
        ([5, "a"], "token id 'a'"),
        ([True, False], "token id True"),
        ([0] * 500, "the prompt has 500 tokens but max_model_len is 500"),
        ("x" * 499, "the prompt has 500 tokens but max_model_len is 500"),
        (5, "prompts must be text, token ids or a list of those, got int"),
        ([None], "got NoneType"),
        ([1.5, 2], "got float"),
        (["fine", 7], "got int"),
        (b"bytes", "got bytes"),
        ([b"bytes"], "got bytes"),
        (["bad \ud800 surrogate"], "not valid Unicode text: U+D800 at character 4 is half"),
    ],
)
def test_bad_prompts_are_named(llm, prompt, message):
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, GREEDY)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not llm.engine.busy


@pytest.mark.parametrize("prompt", ["", [], [5, 288], [0] * 500, 5, None, b"bytes", [[1, 2]]])
def test_a_stream_refuses_a_bad_prompt(llm, prompt):
    with pytest.raises(RequestError):
        next(llm.stream(prompt, GREEDY))
    assert not llm.engine.busy


def test_one_bad_prompt_stops_all_before_anything_runs(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("something ran"))
    with pytest.raises(RequestError):
        llm.generate([[1, 2], [3, 400]], GREEDY)
    assert not llm.engine.busy


def test_bad_lists_are_named(llm):
    two = [[1, 2], [3, 4]]
    for params in ([GREEDY], [GREEDY] * 3, "greedy", [GREEDY, None], {"temperature": 0}):
        with pytest.raises(RequestError, match="one SamplingParams or a list of 2"):
            llm.generate(two, params)
    with pytest.raises(RequestError, match="3 policies for 2 prompts"):
        llm.generate(two, GREEDY, policy=["dense"] * 3)
    with pytest.raises(PolicyError, match="unknown method 'nope'"):
        llm.generate(two, GREEDY, policy=["dense", "nope"])
    with pytest.raises(RequestError, match="cannot be streamed"):
        list(llm.stream([1, 2], SamplingParams(n=2)))
    for messages in ([], "hi", [{"role": "user"}], [{"content": "x"}], [[]], [{"role": "robot", "content": "x"}], 5):
        with pytest.raises(RequestError):
            llm.chat(messages, GREEDY)
    assert not llm.engine.busy


def test_a_prompt_that_can_never_fit_the_pool_is_refused(tiny_llama):
    small = make(tiny_llama, blocks=3 * 4)
    with pytest.raises(CapacityError, match="the prompt has 128 tokens but the KV pool holds 128 at most"):
        small.generate(random_ids(128, seed=1), GREEDY)
    assert len(small.generate(random_ids(127, seed=1), SamplingParams(max_tokens=1))[0].outputs[0].token_ids) == 1
    assert small.engine.pool.used_blocks == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "nope"}, "unknown method"),
        ({"max_model_len": 1}, "max_model_len=1 must be an integer from 2 to 2048"),
        ({"max_model_len": 4096}, "max_model_len=4096"),
        ({"max_model_len": "100"}, "max_model_len='100'"),
        ({"kv_memory": "lots"}, "kv_memory='lots'"),
        ({"kv_memory": -1}, "kv_memory=-1"),
        ({"kv_memory": float("nan")}, "kv_memory=nan"),
        ({"kv_memory": float("inf")}, "kv_memory=inf"),
        ({"kv_memory": 100}, "give at least"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be an integer >= 1, or None for the device's default"),
        ({"max_requests": -1}, "max_requests=-1"),
        ({"threads": 0}, "threads=0"),
        ({"threads": 5000}, "threads=5000 must be an integer from 1 to 1024"),
        ({"kv_memory": "4000TiB"}, "give a smaller kv_memory"),
        ({"device": None}, "unknown device None"),
        ({"backend": "gpu"}, "known: auto, cpu, reference"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"block_size": 24}, "block_size=24 is not one of"),
        ({"block_size": 0}, "block_size=0 is not one of"),
        ({"block_size": "32"}, "block_size='32' is not one of"),
        ({"dtype": "int8"}, "int8"),
        ({"quantize": torch.ones(2)}, "quantize=tensor"),  # has no truth of its own
    ],
)
def test_bad_engine_options_are_named(tiny_llama, options, message):
    with pytest.raises(SaccadeError) as caught:
        LLM(tiny_llama, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_device_says_how_many_rows_a_dense_prefills_step_has(tiny_llama, monkeypatch, capsys):
    """Of a dense prefill; sparse ones select in the same chunks everywhere. A given number is both."""
    sizes = {"cuda": 80 << 30, "cuda:1": 24 << 30}
    monkeypatch.setattr("saccade.engine.settings.config.gpu_bytes", sizes.get)
    for device, rows in (("cpu", 4096), ("cuda", 8192), ("cuda:1", 4096), ("cuda:2", 8192)):
        assert EngineConfig(device=device).dense_chunk == rows
        assert EngineConfig(device=device).chunk == 4096  # where sparse prefills select, on any device
        assert EngineConfig(device=device, prefill_chunk=96).dense_chunk == 96
        assert EngineConfig(device=device, prefill_chunk=100).chunk == 100
        monkeypatch.setattr("saccade.engine.settings.config.best_device", lambda: device)  # noqa: B023
        assert EngineConfig(prefill_chunk=None).dense_chunk == rows
    with LLM(tiny_llama, dtype="float32", kv_memory="8MiB", device="cpu", enable_prefix_caching=True) as llm:
        engine = llm.engine
        assert engine.config.chunk == engine.scheduler.chunk == engine.sessions.chunk == 4096
        assert engine.prefixes.chunk == 4096
        assert engine.scheduler.max_batch_rows == 4096 + engine.config.max_requests
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0
    assert "8192 on a GPU" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_missing_checkpoint_is_named(tmp_path):
    for path in (tmp_path / "nothing", "", None, 5):
        with pytest.raises(SaccadeError) as caught:
            LLM(path)
        assert "\n" not in str(caught.value)


def test_sizes():
    for text, size in (("4GiB", 4 << 30), ("500MB", 500_000_000), ("2g", 2 * 10**9), (" 1.5 KiB ", 1536), (7, 7)):
        assert parse_bytes(text) == size
    for text in ("", "GiB", "-1", "1XB", "0", None, True, [1]):
        with pytest.raises(SaccadeError, match="is not a size"):
            parse_bytes(text)
    assert [show_bytes(count) for count in (12, 1536, 5 << 30, 7 << 40)] == ["12 B", "1.5 KiB", "5.0 GiB", "7.0 TiB"]


# --- forms of input


def test_prompts_of_all_forms_agree(llm):
    text = "some text"
    ids = llm.tokenizer.encode(text)
    outputs = [*llm.generate(text, GREEDY), *llm.generate([text, ids, tuple(ids)], GREEDY), *llm.generate(ids, GREEDY)]
    assert len(outputs) == 5
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, text, None, None, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert all(output.finished and output.error is None for output in outputs)


def test_the_default_policy_is_the_engines(tiny_llama):
    llm = make(tiny_llama, policy="streaming(sinks=2, window=40)")
    ids = random_ids(150, seed=3)
    assert llm.generate(ids, GREEDY)[0].report["policy"] == "streaming(sinks=2, window=40)"
    outputs = llm.generate([ids, ids], GREEDY, policy=["dense", None])
    assert [output.report["policy"] for output in outputs] == ["dense", "streaming(sinks=2, window=40)"]


def test_bfloat16_runs_every_policy(tiny_llama):
    llm = LLM(tiny_llama, dtype="bfloat16", kv_memory="20MiB", prefill_chunk=64, enable_prefix_caching=False)
    for policy in ("dense", "topk(k=20)", "streaming(window=30)", "flexprefill(min_budget=0,block_size=64)+psa"):
        output = llm.generate(random_ids(250, seed=1), GREEDY, policy=policy)[0]
        assert output.error is None
        assert len(output.outputs[0].token_ids) == 8
    assert llm.engine.pool.format.dtype == torch.bfloat16
    assert llm.engine.pool.used_blocks == 0


# --- reports


def report_of(llm: LLM, policy: str, length: int = 200, **options) -> dict:
    report = llm.generate(random_ids(length, seed=2), GREEDY, policy=policy, **options)[0].report
    assert json.loads(json.dumps(report)) == report
    return report


def test_a_dense_report_counts_every_pair(llm):
    report = report_of(llm, "dense")
    assert (report["prompt_tokens"], report["output_tokens"], report["cached_tokens"]) == (200, 8, 0)
    assert report["notes"] == []
    assert report["preemptions"] == 0
    prefill, decode = report["prefill"], report["decode"]
    assert (prefill["tokens"], decode["tokens"]) == (200, 7)
    assert prefill["density"] == decode["density"] == 1.0
    unread = 200 - READ_ROWS  # rows that the last of 3 layers skips, since nobody reads what they become there
    assert prefill["rows_unread"] == unread
    assert prefill["keys_causal"] == prefill["keys_attended"] == 3 * 200 * 201 // 2 - unread * (unread + 1) // 2
    assert decode["keys_causal"] == decode["keys_attended"] == 3 * sum(range(201, 208))
    assert prefill["keys_scored"] == decode["keys_scored"] == 0
    assert prefill["selections"] == {"dense": 3 * 4 - unread // 64}  # in chunks of 64
    assert decode["selections"] == {"dense": 3 * 7}
    assert sum(decode["backends"].values()) == 21
    assert decode["density_per_head"] == [[1.0] * 4] * 3
    assert prefill["seconds"] > 0
    assert prefill["tokens_per_second"] == pytest.approx(200 / prefill["seconds"], rel=1e-2)


def test_streaming_density_by_hand(llm):
    """2 sinks and a window of 40: row p reads min(p + 1, 40) + min(max(p + 1 - 40, 0), 2) keys."""
    report = report_of(llm, "streaming(sinks=2, window=40)")
    reads = [min(p + 1, 40) + min(max(p + 1 - 40, 0), 2) for p in range(207)]
    prefill = [range(200), range(200), range(200 - READ_ROWS, 200)]  # what every layer runs
    for phase, layers in (("prefill", prefill), ("decode", [range(200, 207)] * 3)):
        expected = [sum(reads[p] for p in rows) for rows in layers]
        causal = sum(p + 1 for rows in layers for p in rows)
        assert report[phase]["keys_attended"] == sum(expected)
        assert report[phase]["density"] == pytest.approx(sum(expected) / causal)
        assert report[phase]["keys_attended_per_row"] == pytest.approx(sum(expected) / 3 / len(layers[0]), abs=0.01)
        assert report[phase]["policy"] == "streaming(sinks=2, window=40)"
    assert report["decode"]["selections"] == {"band": 21}


def test_topk_counts_what_it_scored(llm):
    report = report_of(llm, "topk(k=10)")
    assert report["prefill"]["density"] == 1.0
    assert report["prefill"]["policy"] == "dense"
    decode = report["decode"]
    assert decode["keys_attended"] == 3 * 7 * 10
    assert decode["keys_scored"] == decode["keys_causal"] == 3 * sum(range(201, 208))
    assert decode["density"] == pytest.approx(70 / sum(range(201, 208)))


def test_psa_reports_what_it_read_not_what_it_ranked(llm):
    """epsilon 0: 2 sinks, the last full, the partial block and one microbatch of 16-token blocks each."""
    report = report_of(llm, "psa(epsilon=0, block_size=16, microbatch=2, rank=cuboid)")
    decode = report["decode"]
    reads = sum(16 * (3 + 2) + n % 16 for n in range(201, 208))
    assert decode["keys_attended"] == 3 * reads
    assert decode["keys_estimated"] == 3 * sum(n // 16 - 3 for n in range(201, 208))  # those read anyway are not ranked
    assert decode["selections"] == {"blocks": 21}


@pytest.mark.parametrize(
    ("policy", "phases"),
    [
        ("streaming", ("prefill", "decode")),
        ("flexprefill", ("prefill",)),
        ("psa(rank=cuboid)", ("decode",)),
        ("topk", ("decode",)),
        ("dense", ()),
    ],
)
def test_running_dense_against_the_policy_is_said(llm, policy, phases):
    """60 tokens are within every method's budget: it runs dense, which the report must not hide."""
    report = report_of(llm, policy, 60)
    for phase in ("prefill", "decode"):
        notes = [note for note in report["notes"] if note.startswith(f"{phase}: ")]
        assert len(notes) == (phase in phases)
        assert all("ran dense" in note for note in notes)
        assert report[phase]["density"] == 1.0


def test_sliding_window_layers_say_that_they_kept_their_window(tmp_path):
    folder = make_checkpoint("mistral", tmp_path)
    llm = LLM(folder, dtype="float32", kv_memory="20MiB", enable_prefix_caching=False)
    report = llm.generate(random_ids(50, seed=1), GREEDY, policy="topk(k=5)")[0].report
    assert any("sliding-window" in note for note in report["notes"])
    assert report["decode"]["density"] == pytest.approx(sum([7] * 7) / sum(range(51, 58)))
    assert llm.generate(random_ids(50, seed=1), GREEDY)[0].report["notes"] == []


def test_reports_of_samples_are_their_own(llm):
    params = SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True)
    output = llm.generate(random_ids(100, seed=1), params, policy="streaming(sinks=2, window=40)")[0]
    assert len(output.reports) == 2
    assert output.report is output.reports[0]
    assert all(report["decode"]["tokens"] == 3 for report in output.reports)
