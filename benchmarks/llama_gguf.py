"""A Llama checkpoint as llama.cpp reads it (a GGUF file), written with the ``gguf`` package of PyPI.

    python benchmarks/llama_gguf.py MODEL FILE [--type bf16]

MODEL is a folder, ``reference``, ``random`` or ``random-8b:LAYERS``. Norms are float32 and matrices of ``--type``: f32,
bf16 or q8_0. Of the tokenizer the vocabulary goes along, as byte-level BPE without merges, with llama-bpe's rule for
cutting words, which is close to the reference model's and not the same; token ids are the checkpoint's own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from saccade.bench.cli import model_folder
from saccade.errors import SaccadeError

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, file: Path, kind: str = "bf16") -> None:
    """Write the checkpoint ``folder`` to ``file``. SaccadeError for a model that is no plain Llama."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise SaccadeError(f"{folder} is no Llama with plain rotary embedding; give one")
    dtype = {"f32": "F32", "bf16": "BF16", "q8_0": "Q8_0"}[kind]
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type({"f32": 0, "bf16": 32, "q8_0": 7}[kind])
    _tokenizer(writer, folder, config["vocab_size"])
    for name, tensor in tensors_of(folder):
        name = name.removesuffix(".weight")
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        short = _NAMES[inner if layer.isdecimal() else name]
        if short in ("attn_q", "attn_k"):
            tensor = _interleaved(tensor, head_dim)
        wanted, stored = gguf.GGMLQuantizationType.F32, tensor
        if tensor.ndim > 1 and kind != "f32":
            wanted = gguf.GGMLQuantizationType[dtype]
        if wanted.name == "BF16" and tensor.dtype == torch.bfloat16:  # as it lies there
            stored = tensor.contiguous().view(torch.uint8).numpy()
        elif wanted.name == "F32":
            stored = tensor.float().contiguous().numpy()
        else:
            stored = gguf.quants.quantize(tensor.float().numpy(), wanted)
        place = f"blk.{layer}.{short}.weight" if layer.isdecimal() else f"{short}.weight"
        writer.add_tensor(place, stored, raw_dtype=wanted)
    finish(writer)


def finish(writer: Any) -> None:
    """Write the file of a ``gguf`` writer that knows everything."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint's safetensors by its name, one at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of queries' or keys' projection in the order in which llama.cpp rotates them: pairs side by side, where
    transformers has the two halves of a head."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, 2, head_dim // 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(writer: Any, folder: Path, size: int) -> None:
    """The vocabulary, padded to the model's."""
    read = json.loads((folder / "tokenizer.json").read_text())
    special = {one["id"]: one["content"] for one in read["added_tokens"] if one["special"]}
    names = {token: text for text, token in read["model"]["vocab"].items()} | special
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {text: token for token, text in names.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([names.get(token, f"<unused_{token}>") for token in range(size)])
    writer.add_token_types([3 if token in special else 1 if token in names else 5 for token in range(size)])
    nothing = special[min(special)]
    writer.add_token_merges([f"{nothing} {nothing}"])  # llama.cpp wants some; this pair never comes
    for kind in ("bos", "eos", "pad"):
        text = settings.get(f"{kind}_token")
        if text is not None:
            getattr(writer, f"add_{kind}_token_id")(ids[text])
    writer.add_add_bos_token(True)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=("f32", "bf16", "q8_0"), default="bf16")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        dtype = torch.float32 if given.type == "f32" else torch.bfloat16
        write_gguf(model_folder(given.model, Path(scratch) / "model", dtype), given.file, given.type)


if __name__ == "__main__":
    main()
