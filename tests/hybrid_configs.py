"""Random models of every family whose layers keep a state, or read others' keys, against transformers: ``make
hybrids``.

    PYTHONPATH=tests python -m hybrid_configs --count 30

Heads, widths, mixes of layers, rotary parts, convolutions and experts are drawn by family and seed. What a model says
is asked for whole and in chunks, resumed, forked, truncated, preempted, batched and drafted. Every log-probability that
is given, of the token and of the likeliest ones, is transformers' own within 1e-4, in float32. Logits of some of these
models are as far apart as 50, and float32 rounds them by more: what is farther off lies within 1e-4 of transformers in
float64, or within twice as much as transformers' float32 is off itself in that sequence.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from drafters import Erring, drafting
from engine_helpers import finish, start
from tiny_models import VOCAB, make_checkpoint, oracle, oracle_logits, random_ids

from saccade import LLM, SamplingParams
from saccade.models.families import FAMILIES

KEEPING = tuple(name for name, family in FAMILIES.items() if family.keeping is not None or family.shares_keys)
CLOSE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=8)
DRAFTED = "lossless(draft=quest(budget=32, block_size=16, dense_layers=0), tokens=3, lookup=2)"


def random_sizes(family: str, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{family} {seed}")
    layers, kv_heads = rng.randrange(2, 6), rng.choice((1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, 4))
    head_dim = rng.choice((16, 32, 64))
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": rng.random() < 0.5,
        "hidden_size": rng.choice((64, 96, 160)) if family.startswith("qwen") else heads * head_dim,
        "intermediate_size": rng.choice((48, 64, 160)),
    }
    if family == "gemma4_text":
        return sizes | _gemma4(head_dim, rng)
    if FAMILIES[family].shares_keys:
        return sizes | _sharing(head_dim, rng)
    keeping = FAMILIES[family].keeping
    assert keeping is not None
    if family == "nemotron_h":
        return sizes | _nemotron(layers, head_dim, rng)
    if not keeping.attend:
        kinds = [rng.choice((keeping.kinds[0], "full_attention")) for _ in range(layers - 2)]
        kinds += [keeping.kinds[0], "full_attention"]
        rng.shuffle(kinds)
        attend = [at for at, kind in enumerate(kinds) if kind == "full_attention"]
        sizes |= {"attn_layer_indices": attend} if family == "bamba" else {"layer_types": kinds}
    if keeping.module == "conv":
        sizes |= {"conv_L_cache": rng.choice((2, 3, 5)), "conv_bias": rng.random() < 0.5}
    elif keeping.module == "mamba":
        sizes |= _mamba(family, heads, rng)
    elif keeping.module == "linear_attn":
        keys = rng.choice((1, 2, 3))
        sizes |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice((1, 2, 3))}
        sizes |= {"linear_key_head_dim": rng.choice((16, 32)), "linear_value_head_dim": rng.choice((16, 24))}
        sizes |= {"linear_conv_kernel_dim": rng.choice((2, 4))}
    if family.startswith("qwen"):
        sizes |= {"head_dim": head_dim, "rope_parameters": _rotary(family, head_dim, rng.choice((0.25, 0.5, 1.0)))}
    if family in ("lfm2_moe", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid"):
        experts = rng.choice((2, 4, 8))
        name = "num_local_experts" if family == "granitemoehybrid" else "num_experts"
        sizes |= {name: experts, "num_experts_per_tok": rng.randint(1, experts)}
    if family == "qwen3_next":
        sizes["mlp_only_layers"] = sorted(rng.sample(range(layers), rng.randint(0, layers)))
    if family == "lfm2_moe":
        sizes["num_dense_layers"] = rng.randint(0, layers)
    return sizes


def _gemma4(head_dim: int, rng: random.Random) -> dict[str, Any]:
    """Layers without a window have heads of another size and number, most of the time."""
    layers, shared, kinds = _read_others(rng)
    kinds[-1] = "full_attention"  # as transformers has it
    if "full_attention" not in kinds[: layers - shared]:
        kinds[rng.randrange(layers - shared)] = "full_attention"
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "num_attention_heads": 12,
        "num_key_value_heads": rng.choice((1, 2, 3)),
        "hidden_size": rng.choice((64, 96)),
        "layer_types": kinds,
        "sliding_window": rng.choice((5, 16, 33)),
        "head_dim": head_dim,
        "global_head_dim": rng.choice((head_dim, 2 * head_dim, 48)),
        "attention_k_eq_v": rng.random() < 0.5,
        "num_global_key_value_heads": rng.choice((None, 1, 2, 3)),
        "hidden_size_per_layer_input": rng.choice((8, 24) if shared else (0, 8, 24)),  # as transformers runs them
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": rng.choice((None, 10.0)),
        "use_bidirectional_attention": rng.choice((None, "vision")),
        "use_double_wide_mlp": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        experts = rng.choice((2, 4, 8))
        sizes |= {"enable_moe_block": True, "num_experts": experts, "moe_intermediate_size": rng.choice((16, 32))}
        sizes |= {"top_k_experts": rng.randint(1, experts)}
    return sizes


def _read_others(rng: random.Random) -> tuple[int, int, list[str]]:
    """Layers, those of them that read others' keys, of which there may be none, and the types of all: both are there
    before those that read others'."""
    layers, shared = rng.randrange(3, 8), rng.choice((0, 1, 2, 4))
    layers = max(layers, shared + 2)
    kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    first = kinds[: layers - shared]
    if len(set(first)) < len(set(kinds)):
        kinds[:2] = rng.sample(("sliding_attention", "full_attention"), 2)
    return layers, shared, kinds


def _sharing(head_dim: int, rng: random.Random) -> dict[str, Any]:
    layers, shared, kinds = _read_others(rng)
    streams = rng.choice((1, 2, 4))
    return {
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "layer_types": kinds,
        "head_dim": head_dim,
        "sliding_window": rng.choice((5, 16, 40)),
        "hidden_size_per_layer_input": rng.choice((4, 8)),
        "laurel_rank": rng.choice((2, 8)),
        "altup_num_inputs": streams,
        "altup_active_idx": rng.randrange(streams),
        "altup_correct_scale": rng.random() < 0.7,
        "activation_sparsity_pattern": [rng.choice((0.0, 0.0, 0.5, 0.95)) for _ in range(layers)],
    }


def _mamba(family: str, heads: int, rng: random.Random) -> dict[str, Any]:
    shapes = [one for one in product((1, 2), (1, 3), (8, 16)) if heads * math.prod(one) <= 400]
    groups, per_group, width = rng.choice(shapes)
    hidden = heads * groups * per_group * width  # a multiple of what it expands to
    sizes = {
        "hidden_size": hidden,
        "mamba_expand": 1,
        "mamba_n_groups": groups,
        "mamba_d_state": rng.choice((4, 8, 16)),
    }
    sizes |= {"mamba_n_heads": hidden // width, "mamba_d_head": width}
    sizes |= {"mamba_chunk_size": rng.choice((8, 64)), "mamba_d_conv": rng.choice((2, 4))}
    return sizes | ({"mamba_d_ssm": hidden} if family == "falcon_h1" else {})


def _nemotron(layers: int, head_dim: int, rng: random.Random) -> dict[str, Any]:
    """Each layer that mixes rows is followed by one of an MLP or of experts alone."""
    kinds = [rng.choice(("linear_attention", "full_attention")) for _ in range(layers - 2)]
    kinds += ["linear_attention", "full_attention"]
    rng.shuffle(kinds)
    groups, chosen = rng.choice((1, 2)), rng.choice((1, 2))
    return {
        "layers_block_type": [one for kind in kinds for one in (kind, rng.choice(("mlp", "moe")))],
        "n_groups": groups,
        "mamba_num_heads": groups * rng.choice((1, 3)),
        "mamba_head_dim": rng.choice((8, 16)),
        "head_dim": head_dim,
        "ssm_state_size": rng.choice((4, 8, 16)),
        "chunk_size": rng.choice((8, 64)),
        "conv_kernel": rng.choice((2, 4)),
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 24,
        "n_group": chosen,
        "topk_group": chosen,
        "moe_latent_size": rng.choice((None, 24)),
    }


def _rotary(family: str, head_dim: int, part: float) -> dict[str, Any]:
    turned = int(head_dim * part) // 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    sections = [turned - 2 * (turned // 3), turned // 3, turned // 3]
    return rope if family == "qwen3_next" else rope | {"mrope_section": sections}


class Oracle:
    """transformers' model of a checkpoint. ``worst``: the largest difference that was seen."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.worst = folder, 0.0
        self._theirs, self._exact = oracle(folder), None

    def check(self, way: str, context: Sequence[int], answer: Sequence[int], given: Sequence[Any]) -> None:
        """``given``, by token what is said of log-probabilities, of an ``answer`` to ``context``."""
        assert len(answer) == len(given) > 0, way
        ids = [*context, *answer]
        theirs, exact, own = self._logprobs(self._theirs, ids), None, 0.0
        for row, (token, said) in enumerate(zip(answer, given), len(context) - 1):
            assert token in said, way
            for one, entry in said.items():
                off = abs(entry.logprob - float(theirs[row, one]))
                self.worst = max(self.worst, off)
                if off > CLOSE and exact is None:
                    if self._exact is None:
                        self._exact = oracle(self.folder, torch.float64)
                        self._exact.config._experts_implementation = "eager"  # the only one that takes float64
                    exact = self._logprobs(self._exact, ids)
                    own = float((theirs - exact).abs().max())
                if off > CLOSE:
                    right = abs(entry.logprob - float(exact[row, one]))
                    assert right <= max(CLOSE, 2 * own), (way, row, one, off, right, own)

    @staticmethod
    def _logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
        return oracle_logits(model, ids).double().log_softmax(-1)


def hold(family: str, seed: int, folder: Path) -> float:
    """Hold one random model against transformers in every way; the largest difference. AssertionError that names the
    way."""
    theirs = Oracle(make_checkpoint(family, folder / "model", seed=seed, **random_sizes(family, seed)))
    prompts = [random_ids(length, seed=length + seed) for length in (70, 1, 26)]
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "64MiB", "block_size": 16, "threads": 1}
    chunks = LLM(theirs.folder, prefill_chunk=24, enable_prefix_caching=True, **options)
    packed = LLM(theirs.folder, prefill_chunk=128, enable_prefix_caching=False, exact=False, **options)
    try:
        _requests(theirs, chunks, packed, prompts)
        _turns(theirs, chunks, packed, prompts, folder / "talk")
        _preempted(theirs, (chunks, packed), prompts)
        _drafted(theirs, (chunks, packed), prompts)
        for llm in (chunks, packed):
            llm.reset_prefix_cache()
            assert [one.used_blocks for one in llm.pool.groups] == [0] * len(llm.pool.groups)
            if llm.pool.states is not None:
                assert (llm.pool.states.used, llm.pool.states.pinned) == (0, 0)
    finally:
        chunks.close()
        packed.close()
    return theirs.worst


def _held(theirs: Oracle, way: str, context: list[int], output: Any, number: int = 0) -> list[int]:
    assert output.error is None, (way, output.error)
    one = output.outputs[number]
    theirs.check(way, context, one.token_ids, one.logprobs)
    return context + one.token_ids


def _requests(theirs: Oracle, chunks: LLM, packed: LLM, prompts: list[list[int]]) -> None:
    for ids in prompts:
        _held(theirs, "whole", ids, packed.generate(ids, PARAMS)[0])
    for ids, output in zip(prompts, chunks.generate(prompts, PARAMS)):
        _held(theirs, "in chunks", ids, output)
    for ids, output in zip(prompts, packed.generate(prompts, PARAMS)):
        _held(theirs, "batched", ids, output)
    longer = prompts[0] + prompts[2][:9]
    shared = chunks.generate(longer, PARAMS)[0]
    assert shared.report["cached_tokens"] == 64, "forked from a prefix"
    _held(theirs, "forked from a prefix", longer, shared)
    samples = SamplingParams(temperature=1.5, seed=1, n=3, max_tokens=5, ignore_eos=True, logprobs=2)
    for llm in (chunks, packed):
        output = llm.generate(prompts[2], samples)[0]
        for number in range(3):
            _held(theirs, "forked samples", prompts[2], output, number)


def _turns(theirs: Oracle, chunks: LLM, packed: LLM, prompts: list[list[int]], file: Path) -> None:
    with chunks.session() as session:
        said = _held(theirs, "resumed", prompts[2], session.generate(prompts[2], PARAMS))
        said = _held(theirs, "resumed", said + prompts[0], session.generate(prompts[0], PARAMS))
        session.save(file)
        edited = said[:50] + prompts[2][:20]
        _held(theirs, "truncated", edited, session.complete(edited, PARAMS))
    with packed.restore(file) as session:
        output = session.generate(prompts[2], PARAMS)
        assert (session.note, output.report["recomputed_tokens"]) == (None, 0), "restored"
        _held(theirs, "restored", said + prompts[2], output)


def _preempted(theirs: Oracle, llms: Sequence[LLM], prompts: list[list[int]]) -> None:
    for llm in llms:
        requests = [start(llm, ids, PARAMS) for ids in prompts]
        for at in (2, 4, 3):
            for _ in range(at):
                llm.engine.step()
            running = llm.engine.scheduler.running
            if running:
                llm.engine.scheduler.preempt(running[-1])
        finish(llm.engine)
        assert sum(one.report.preemptions for one in requests) > 0, "preempted"
        for one in requests:
            assert one.error is None, ("preempted", one.error)
            theirs.check("preempted", one.prompt, one.final_ids, one.logprobs)


def _drafted(theirs: Oracle, llms: Sequence[LLM], prompts: list[list[int]]) -> None:
    drafted, longer = 0, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=8)
    for llm in llms:
        right = [ids + one.outputs[0].token_ids for ids, one in zip(prompts, llm.generate(prompts, longer))]
        with drafting(llm, Erring(right)):
            for ids, output in zip(prompts, llm.generate(prompts, longer)):
                _held(theirs, "drafted", ids, output)
                drafted += output.report["drafted_tokens"]
        output = llm.generate(prompts[0], longer, policy=DRAFTED)[0]
        _held(theirs, "drafted by lossless", prompts[0], output)
        drafted += output.report["drafted_tokens"]
    assert drafted > 0, "nothing was drafted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, help="configs of each family")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("families", nargs="*", default=KEEPING)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for family in chosen.families:
        began, worst, wrong = time.perf_counter(), 0.0, []
        for seed in range(chosen.first, chosen.first + chosen.count):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    worst = max(worst, hold(family, seed, Path(folder)))
                except Exception:
                    wrong.append(f"seed {seed}: {random_sizes(family, seed)}\n{traceback.format_exc()}")
        failed += len(wrong)
        seconds = time.perf_counter() - began
        print(f"{family}: {chosen.count} configs in {seconds:.0f} s, {len(wrong)} wrong, at most {worst:.1e} off")
        print("\n".join(wrong), end="", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
