"""Qwen3.5-4B's shape on a CPU beside llama.cpp, by turns: prefill, and decode behind it.

    python benchmarks/llama_hybrid.py --llama-bench BIN [--layers 4] [--context 8192] [--threads 1 2] [--rounds 3]
        [--tokens 16] [--vocabulary 32000]
    python benchmarks/llama_hybrid.py --write FILE [--layers 4] [--vocabulary 32000]

BIN is ``llama-bench`` of a llama.cpp built for this machine. The checkpoint is ``benchmarks/hybrid.py``'s (random
weights, bfloat16, head and embedding one matrix), written for llama.cpp with the ``gguf`` package: matrices bfloat16,
the rest float32. llama.cpp's own converter orders the heads of values otherwise; the two do the same work and do not
answer alike. Keys and values have 16 bits on both sides, llama.cpp runs with flash attention and its default batches.
The sides never run at once: prefills by turns, then llama.cpp's decode, whose one prefill serves all its rounds. A row
each: medians of seconds of the prefill and of milliseconds of a step, the fastest and the slowest in brackets. A round
of our decode is the median of its ``--tokens`` steps, of llama.cpp's the mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from hybrid import checkpoint, measure
from llama_gguf import finish, tensors_of

from saccade import LLM
from saccade.ops import cpu

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
}


def write_gguf(folder: Path, file: Path) -> None:
    """Write the ``qwen3_5_text`` checkpoint ``folder`` to ``file``, without a tokenizer."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(file, "qwen35")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)))
    writer.add_rope_dimension_sections(rope.get("mrope_section") or [11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, tensor in tensors_of(folder):
        name = name.removeprefix("model.")
        if tensor.ndim == 2 and not name.endswith("conv1d.weight"):  # as it lies there
            stored = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(_place(name), stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(_place(name), _vector(name, tensor.float()).contiguous().numpy())
    finish(writer)


def _place(name: str) -> str:
    """The tensor's name in the file."""
    layer, _, inner = name.removeprefix("layers.").partition(".")
    return f"blk.{layer}.{_NAMES[inner]}" if layer.isdecimal() else _NAMES[name]


def _vector(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What is no matrix, in the form in which llama.cpp computes with it."""
    if name.endswith("A_log"):
        return -tensor.exp()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    return tensor.squeeze()


def llama(binary: Path, file: Path, threads: int, *work: str) -> list[float]:
    """Nanoseconds of each round of ``work``, llama-bench's arguments."""
    call = [binary, "-m", file, "-t", str(threads), "-fa", "1", "--no-warmup", "-o", "json", *work]
    done = subprocess.run([str(one) for one in call], check=True, stdout=subprocess.PIPE, text=True)
    (row,) = json.loads(done.stdout)
    return [float(one) for one in row["samples_ns"]]


def _row(threads: int, context: int, by: str, prefill: list[float], steps: list[float]) -> str:
    """A line of the table, of seconds and of milliseconds."""
    cells = [
        f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"
        for found, digits in ((prefill, 2), (steps, 1))
    ]
    return f"| {threads} | {context} | {by} | {cells[0]} | {cells[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--llama-bench", type=Path)
    todo.add_argument("--write", type=Path, metavar="FILE", help="only write the file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = checkpoint(Path(made) / "model", asked.layers, asked.vocabulary)
        file = asked.write or Path(made) / "model.gguf"
        write_gguf(folder, file)
        if asked.write:
            return
        print(f"{cpu.isa()}, {asked.layers} layers", flush=True)
        print("| threads | tokens | by | prefill, s | step, ms |\n|---|---|---|---|---|", flush=True)
        for threads in asked.threads:
            torch.set_num_threads(threads)
            llm = LLM(folder, dtype="bfloat16", kv_memory="2GiB", enable_prefix_caching=False)
            measure(llm, 64, 2, 0, time.perf_counter)  # pages of the weights come in
            ours, read, size = [], [], str(asked.context)
            for turn in range(asked.rounds):
                ours.append(measure(llm, asked.context, asked.tokens, turn, time.perf_counter))
                read += llama(asked.llama_bench, file, threads, "-p", size, "-n", "0", "-r", "1")
            del llm
            work = ("-p", "0", "-n", str(asked.tokens), "-d", size, "-r", str(asked.rounds))
            written = [one / 1e6 / asked.tokens for one in llama(asked.llama_bench, file, threads, *work)]
            steps = [1e3 * statistics.median(steps) for _, steps in ours]
            print(_row(threads, asked.context, "Saccade", [one for one, _ in ours], steps), flush=True)
            print(_row(threads, asked.context, "llama.cpp", [one / 1e9 for one in read], written), flush=True)


if __name__ == "__main__":
    main()
