"""The processes of vllm_plugin.py: an engine each, loaded and measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FIRST, RULER = "first", "answers"
SPARSE = "flexprefill(lines=block, max_budget={})"
SUITE = ("single", "multikey", "multivalue", "multiquery", "vt", "span_copy", "table_copy", "legend")
OF_RULER = (
    *("niah_single_1", "niah_single_2_prose", "niah_single_3_prose", "niah_multikey_1_prose"),
    *("niah_multivalue_prose", "niah_multiquery_prose", "vt", "qa_syn_1"),
)
DRAWN = 16  # the budget of a first token's policy is the prompt's length over this, some 12 % of its pairs
# (token ids, new tokens at most, ids that end an answer) by prompt -> (tokens of every answer)
Ask = Callable[[Sequence[list[int]], int, list[int]], list[list[int]]]


def told(**row: Any) -> None:
    print("ROW " + json.dumps(row), flush=True)


def main_of_a_child(job: dict[str, Any]) -> None:
    """Import the engine and make what it will be asked, wait for a line, measure."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch

    torch.set_num_threads(min(16, torch.get_num_threads()))
    prompts = asked(job) if job["part"] == RULER else []
    if job["engine"] == "vllm":
        import vllm.entrypoints.llm  # noqa: F401 - seconds of a process that waits anyway
    sys.stdin.readline()
    (vllm_engine if job["engine"] == "vllm" else our_engine)(job, prompts)


def drawn_policy(length: int, least: int) -> str:
    return SPARSE.format(max(least, length // DRAWN))


def prompt(length: int, vocab: int, seed: int) -> list[int]:
    import torch

    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=drawn).tolist()


# --- vLLM -----------------------------------------------------------------------------------------------------------


def vllm_engine(job: dict[str, Any], prompts: list[Any]) -> None:
    from vllm import LLM

    began, cuda = time.perf_counter(), job["device"] == "cuda"
    first = job["part"] == FIRST
    more: dict[str, Any] = {}
    if first:
        model, more["load_format"] = shape_folder(job), "dummy"
        longest = max(job["lengths"]) + 64
    else:
        model, longest = folder_of(job["model"]), job["context"] + 512
    if cuda and job["policy"]:
        more["attention_backend"] = "CUSTOM"
    elif not cuda:
        more["block_size"] = 32
    if job["eager"] or not cuda:
        more["enforce_eager"] = True
    else:  # decode is not timed, and prompts are longer than what graphs are recorded for
        more["compilation_config"] = {"cudagraph_mode": "NONE"}
    llm = LLM(
        str(model), dtype="bfloat16" if cuda else "float32", skip_tokenizer_init=True, max_model_len=longest,
        max_num_batched_tokens=job["batched"], max_num_seqs=8, enable_prefix_caching=False,
        gpu_memory_utilization=0.7 if cuda else 0.1, disable_log_stats=True, **more,
    )  # fmt: skip
    told(start_seconds=round(time.perf_counter() - began, 1), **_facts(llm))
    if first:
        for length in job["lengths"]:
            prompts = [prompt(length, vocab(job), turn) for turn in range(job["runs"])]
            seconds = [_timed(lambda ids=ids: _vllm_ask(llm, [ids], 1)) for ids in prompts]
            _first_row(length, seconds, _density(job))
    else:
        answers(job, prompts, lambda ids, most, ends: _vllm_ask(llm, ids, most, ends), lambda: _density(job))


def _vllm_ask(llm: Any, prompts: Sequence[list[int]], most: int, ends: Sequence[int] = ()) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=most, detokenize=False, ignore_eos=not ends, stop_token_ids=list(ends)
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


def _facts(llm: Any) -> dict[str, Any]:
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    backends = sorted({one.impl.__class__.__module__ for one in
                       config.compilation_config.static_forward_context.values() if hasattr(one, "impl")})  # fmt: skip
    return {
        "vllm": vllm.__version__, "device": device, "attention": backends,
        "block_size": config.cache_config.block_size, "compiled": str(config.compilation_config.mode),
        "tokens_a_step": config.scheduler_config.max_num_batched_tokens, "second_runner": config.use_v2_model_runner,
    }  # fmt: skip


def _density(job: dict[str, Any]) -> float:
    """Of the pairs of rows that the policy chose for, since the process began: the share that was read."""
    if not job["policy"]:
        return 1.0
    if job["device"] == "cuda":
        from saccade_vllm.flash_attention import _prefills
    else:
        from saccade_vllm.cpu_attention import _prefills  # type: ignore[assignment]
    (prefill,) = _prefills.values()
    print(prefill.text(), flush=True)
    return float(prefill.counts.density)


# --- ours -----------------------------------------------------------------------------------------------------------


def our_engine(job: dict[str, Any], prompts: list[Any]) -> None:
    import random_model

    from saccade import LLM, SamplingParams

    cuda, began = job["device"] == "cuda", time.perf_counter()
    more: dict[str, Any] = {} if cuda else {"dtype": "float32"}
    if job["part"] == FIRST:
        random_model.patch()
        shape = random_model.SHAPES[job["shape"]]
        folder, longest = shape_folder(job), max(job["lengths"]) + 64
        (folder / "shape").write_text(job["shape"])
        each = shape.layers * 2 * shape.kv_heads * shape.head_dim * (2 if cuda else 4)
        more |= {"kv_memory": each * (longest + 8192), "max_model_len": longest}
        llm = LLM(folder, device=job["device"], enable_prefix_caching=False, **more)
    else:
        llm = LLM(job["model"], device=job["device"], enable_prefix_caching=False, **more)
    told(start_seconds=round(time.perf_counter() - began, 1))
    read: list[float] = []

    def ask(policy: str, ids: Sequence[list[int]], most: int, ends: Sequence[int] = ()) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=not ends, stop_token_ids=list(ends))
        outputs = llm.generate(list(ids), params, policy=policy)
        for one in outputs:
            if one.error is not None:
                raise RuntimeError(one.error)
            read.append(one.report["prefill"]["density"])
        return [list(one.outputs[0].token_ids) for one in outputs]

    for text in job["policy"].split(";"):
        if job["part"] == RULER:
            read.clear()
            answers(job, prompts, lambda ids, most, ends, text=text: ask(text, ids, most, ends),
                    lambda: sum(read) / len(read), policy=text)  # fmt: skip
            continue
        for length in job["lengths"]:
            policy = drawn_policy(length, job["least"]) if text == SPARSE else text
            seconds = []
            for turn in range(job["runs"]):
                ids = prompt(length, vocab(job), turn)
                seconds.append(_timed(lambda policy=policy, ids=ids: ask(policy, [ids], 1)))
            _first_row(length, seconds, read[-1], policy=policy)
    llm.close()


# --- both -----------------------------------------------------------------------------------------------------------


def vocab(job: dict[str, Any]) -> int:
    import random_model

    return int(random_model.SHAPES[job["shape"]].vocab)


def shape_folder(job: dict[str, Any]) -> Path:
    """A folder with the config and a tokenizer of the random Llama."""
    import random_model
    from transformers import LlamaConfig

    from saccade.models.reference.tokenizer import build_tokenizer

    folder = Path(job["place"]) / job["shape"]
    if not (folder / "config.json").is_file():
        shape = random_model.SHAPES[job["shape"]]
        LlamaConfig(
            architectures=["LlamaForCausalLM"], vocab_size=shape.vocab, hidden_size=shape.hidden,
            intermediate_size=shape.inner, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, max_position_embeddings=1 << 18,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ).save_pretrained(folder)  # fmt: skip
        build_tokenizer().save_pretrained(folder)
    return folder


def folder_of(model: str) -> Path:
    from saccade.models import reference

    return reference.checkpoint(model) if model in reference.NAMES else Path(model)


def _timed(what: Callable[[], Any]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _first_row(length: int, seconds: list[float], density: float, **more: Any) -> None:
    told(length=length, seconds=min(seconds[1:] or seconds), all_runs=[round(one, 3) for one in seconds],
         density=density, **more)  # fmt: skip


def asked(job: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(sample, token ids) of every task, those of single turns."""
    from saccade.eval import ruler, suite
    from saccade.eval.lengths import Lengths
    from saccade.eval.render import render
    from saccade.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder_of(job["model"]))
    known = job["model"] == "reference"
    made = []
    for task in SUITE if known else OF_RULER:
        for index in range(job["samples"]):
            if known:
                sample = suite.make(task, job["context"], index)
            else:
                count = Lengths(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
                sample = ruler.make(task, job["context"], index, lengths=count)
            (turn,) = sample.turns
            made.append((sample, render(tokenizer, [], turn).ids))
    return made


def answers(
    job: dict[str, Any], prompts: list[tuple[Any, Any]], ask: Ask, density: Callable[[], float], **more: Any
) -> None:
    """A row by task, and one of all with every answer's score."""
    from saccade.eval.metrics import METRICS
    from saccade.models.tokenizer import load_tokenizer

    tokenizer, began = load_tokenizer(folder_of(job["model"])), time.perf_counter()
    ends = sorted(tokenizer.eos_token_ids)
    scores, said, tasks = [], [], {}
    for task in dict.fromkeys(sample.task for sample, _ in prompts):
        some = [(sample, ids) for sample, ids in prompts if sample.task == task]
        most = max(sample.turns[0].max_new_tokens for sample, _ in some)
        for (sample, _), tokens in zip(some, ask([ids for _, ids in some], most, ends)):
            turn = sample.turns[0]
            text = tokenizer.decode([one for one in tokens[: turn.max_new_tokens] if one not in ends])
            for stop in turn.meta.get("stop") or ():
                text = text.partition(stop)[0]
            said.append(text)
            scores.append(float(METRICS[turn.metric](text, turn.answers)))
        tasks[task] = round(100 * sum(scores[-len(some) :]) / len(some), 1)
    told(
        model=job["model"], context=job["context"], samples=len(scores), score=100 * sum(scores) / len(scores),
        density=density(), seconds_taken=time.perf_counter() - began, tasks=tasks, scores=scores, said=said, **more,
    )  # fmt: skip
