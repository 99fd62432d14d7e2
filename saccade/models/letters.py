"""How many letters of a text one token can stand for, so that a text that cannot fit is known by its length."""

from __future__ import annotations

import json
from typing import Any

_KEEP = ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")  # parts of a tokenizer that drop no letter


def most_letters(hf: Any | None) -> int | None:
    """The most letters of a text that a token of ``hf``, transformers' tokenizer, stands for: those of its longest.
    None where a token may stand for any number: an unknown word, spaces that are dropped, or a tokenizer of a kind that
    is not known here."""
    backend = getattr(hf, "backend_tokenizer", None)
    if hf is None or backend is None or type(backend.model).__name__ != "BPE":
        return None
    model = backend.model
    if model.unk_token is not None and not model.byte_fallback:
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    if not all(_keeps(part) for part in (backend.normalizer, backend.pre_tokenizer)):
        return None
    # Composed forms have up to three letters of a text.
    return 3 * max(map(len, backend.get_vocab()), default=1)


def _keeps(part: Any) -> bool:
    """Whether a normalizer or a pre-tokenizer drops no letter."""
    return part is None or _kept(json.loads(part.__getstate__()))


def _kept(state: dict[str, Any]) -> bool:
    kind = state.get("type")
    if kind == "Sequence":
        return all(map(_kept, [*state.get("normalizers", ()), *state.get("pretokenizers", ())]))
    if kind == "Split":
        return state.get("behavior") != "Removed"
    if kind == "Replace":
        text = state.get("pattern", {}).get("String")
        return text is not None and len(text) <= len(state.get("content", ""))
    return kind in _KEEP
