"""The tokenizer of a GGUF file: a vocabulary of merged bytes, of which words are cut as the file names it, or of
SentencePiece's pieces, whose merges follow from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import first_line
from saccade.models.gguf_header import GgufHeader
from saccade.models.quiet import quiet_transformers

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_SPACE = "\u2581"  # which SentencePiece writes for one

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


_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_RULES = {
    **dict.fromkeys((*_WHOLE_WORDS, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
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
    kind = header.metadata["tokenizer.ggml.model"]
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{header.path}: a tokenizer of the kind {shown(kind, 40)} is not read from GGUF files, only gpt2 (merged "
            "bytes) and llama (SentencePiece); give the model's safetensors folder, or its hub name"
        )
    try:
        with quiet_transformers():
            _made(header).save_pretrained(folder)
    except Exception as error:  # tokenizers and transformers raise many kinds
        raise ModelError(f"the tokenizer of {header.path} cannot be read: {first_line(error)}") from error


def _made(header: GgufHeader) -> Any:
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    tokens, types = list(said["tokens"]), list(said.get("token_type") or ())
    types += [1] * (len(tokens) - len(types))
    bytewise = said["model"] == "gpt2"
    core = _bytes(said, tokens, types, header.path) if bytewise else _pieces(said, tokens, header.architecture)
    vocabulary = core.get_vocab()
    added = [(token, kind) for token, kind in zip(tokens, types) if token in vocabulary]
    core.add_special_tokens(
        [AddedToken(one, normalized=False, special=True) for one, kind in added if kind == _CONTROL]
    )
    core.add_tokens([AddedToken(one, normalized=False) for one, kind in added if kind == _USER_DEFINED])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: said.get(f"{theirs}_token_id") for ours, theirs in names.items()}
    special = {name: tokens[at] for name, at in ids.items() if isinstance(at, int) and at < len(tokens)}
    first = said.get("add_bos_token", not bytewise or said.get("pre") in (*_WHOLE_WORDS, "tekken"))
    around = [
        special.get("bos_token") if first else None,
        special.get("eos_token") if said.get("add_eos_token") else None,
    ]
    if any(around):
        start, end = (f"{token or ''}" for token in around)
        core.post_processor = TemplateProcessing(
            single=[*filter(None, (start, "$A", end))],
            pair=[*filter(None, (start, "$A", end, start, "$B:1", end))],
            special_tokens=[(token, tokens.index(token)) for token in around if token],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _bytes(said: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path) -> Tokenizer:
    """Merged bytes, each spelt as a letter. Tokens that are found in a text as they stand are spelt as they stand."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def spelt(token: str, kind: int) -> str:
        if kind != 1 or set(token) <= letters:
            return token
        return "".join(part for part, _ in spell.pre_tokenize_str(token))

    vocabulary = {spelt(token, kind): at for at, (token, kind) in enumerate(zip(tokens, types))}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in said["merges"])]
    rule = said.get("pre", "default")
    whole = rule in (*_WHOLE_WORDS, "glm4", "tekken")
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=whole))
    core.pre_tokenizer = _cut(rule, path)
    core.decoder = decoders.ByteLevel()
    return core


def _pieces(said: Mapping[str, Any], tokens: Sequence[str], architecture: str) -> Tokenizer:
    """SentencePiece's: bytes for what is in no piece; two pieces are merged where a better one is made, by its score,
    or by its place in the vocabulary (Gemma)."""
    vocabulary = {_SPACE * len(one) if one and not one.strip(" ") else one: at for at, one in enumerate(tokens)}
    scores = None if architecture.startswith("gemma") else said["scores"]
    pairs = [
        (float(-at if scores is None else scores[at]), piece[:cut], piece[cut:])
        for piece, at in vocabulary.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2])))
    merges = [(left, right) for _, left, right in pairs]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = said.get("add_space_prefix", not architecture.startswith("gemma"))
    if architecture == "phi3" and prefix:  # which puts a space in front of what follows a special token, too
        core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if prefix else "never"
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return core


def _cut(rule: Any, path: Path) -> Any:
    """What cuts text by the ``rule`` of that name."""
    if rule in _RULES:
        words: Any = pre_tokenizers.Split(Regex(_RULES[rule]), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if rule not in _GPT2:
        warnings.warn(
            f"{path.name} has its text cut by a rule {shown(rule, 40)} that is not known here; it is cut as GPT-2's, "
            "and some texts may get other tokens than the model was trained on",
            stacklevel=7,
        )
    return plain
