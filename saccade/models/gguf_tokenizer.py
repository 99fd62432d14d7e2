"""The tokenizer of a GGUF file: as transformers makes it of the vocabulary, with words cut as the file names it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import first_line
from saccade.models.gguf_header import GgufHeader
from saccade.models.quiet import quiet_transformers

# Rules by which text is cut before merges, by tokenizer.ggml.pre (llama.cpp's src/llama-vocab.cpp, where those of the
# original tokenizers stand beside its own).
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_QWEN2 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_SEED = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return words + "|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES


_RULES = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _cased(f"{_SUFFIX}?", r"\p{N}{1,3}")),
    "tekken": _cased("", r"\p{N}"),
    "seed-coder": _SEED,
}
# Vocabularies whose merges were learned on single digits.
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2 = ("default", "gpt-2", "phi-2", "olmo", "exaone4", "mpt", "trillion", "granite-docling")


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer of a file into ``folder``. ModelError for one that cannot be made."""
    from transformers import PreTrainedTokenizerFast

    try:
        with quiet_transformers():
            made: Any = PreTrainedTokenizerFast.from_pretrained(
                header.path.absolute().parent, gguf_file=header.path.name, local_files_only=True
            )
            if header.metadata.get("tokenizer.ggml.model") == "gpt2":
                _cut(made, header.metadata.get("tokenizer.ggml.pre", "default"), header.path)
            made.save_pretrained(folder)
    except Exception as error:  # tokenizers and transformers raise many kinds
        raise ModelError(f"the tokenizer of {header.path} cannot be read: {first_line(error)}") from error


def _cut(made: Any, rule: Any, path: Path) -> None:
    """Have ``made`` cut text by the ``rule`` of that name."""
    from tokenizers import Regex, pre_tokenizers

    if rule in _RULES:
        parts = [
            pre_tokenizers.Split(Regex(_RULES[rule]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    elif rule in _DIGITS:
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:
        if rule not in _GPT2:
            warnings.warn(
                f"{path.name} has its text cut by a rule {shown(rule, 40)} that is not known here; it is cut as "
                "GPT-2's is, and some texts may get other tokens than the model was trained on",
                stacklevel=5,
            )
        return
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
