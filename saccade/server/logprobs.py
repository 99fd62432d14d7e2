"""Log-probabilities in the forms of both kinds of completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.engine.messages import TokenLogprob

JSON = dict[str, Any]
Entries = dict[int, TokenLogprob]

LEAST = -9999.0  # in place of minus infinity, which JSON does not have


def finite(value: float) -> float:
    return max(value, LEAST)


def _text(token: int, entry: TokenLogprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token


def chat_logprobs(tokens: Sequence[int], entries: Sequence[Entries], top: int, as_ids: bool) -> JSON:
    """``choices[].logprobs`` of a chat. ``entries``: one a token, its own among them."""

    def one(token: int, entry: TokenLogprob) -> JSON:
        text = _text(token, entry, as_ids)
        data = None if entry.token_bytes is None else list(entry.token_bytes)
        return {"token": text, "logprob": finite(entry.logprob), "bytes": data}

    content = []
    for token, row in zip(tokens, entries):
        likeliest = [one(other, entry) for other, entry in row.items() if entry.rank <= top]
        content.append({**one(token, row[token]), "top_logprobs": likeliest[:top]})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """``choices[].logprobs`` of a text completion, chunk after chunk."""

    def __init__(self, top: int, as_ids: bool) -> None:
        self.top, self.as_ids = top, as_ids

    def chunk(self, tokens: Sequence[int], entries: Sequence[Entries], before: int = 0) -> JSON:
        """Tokens of an answer; ``before``: characters of the prompt, where that is part of the text."""
        texts = [(row[token].decoded_token, before + row[token].offset) for token, row in zip(tokens, entries)]
        return self.of(tokens, entries, texts)

    def of(self, tokens: Sequence[int], entries: Sequence[Entries | None], texts: Sequence[tuple[str, int]]) -> JSON:
        """``texts``: each token's, and where it stands. The first token of a prompt has no entry."""
        out: JSON = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, row, (text, offset) in zip(tokens, entries, texts):
            name = f"token_id:{token}" if self.as_ids else text
            out["tokens"].append(name)
            out["token_logprobs"].append(None if row is None else finite(row[token].logprob))
            out["top_logprobs"].append(None if row is None else self._likeliest(token, name, row))
            out["text_offset"].append(offset)
        return out

    def _likeliest(self, token: int, name: str, row: Entries) -> JSON:
        """By text. Where several tokens have one text, parts of characters mostly, others go by their bytes."""
        found: JSON = {}
        for other, one in row.items():
            if other != token and one.rank > max(self.top, 1):
                continue
            names = [name] if other == token else [_text(other, one, self.as_ids), _spelt(one), f"token_id:{other}"]
            free = next(one for one in names if one not in found and (one != name or other == token))
            found[free] = finite(one.logprob)
        return found


def _spelt(entry: TokenLogprob) -> str:
    """A token's bytes in OpenAI's form."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes or b"")


def prompt_logprobs(entries: Sequence[Entries | None] | None) -> list[JSON | None] | None:
    """vLLM's form: one entry a token of the prompt, by token id."""
    if entries is None:
        return None
    return [
        None
        if row is None
        else {
            str(token): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in row.items()
        }
        for row in entries
    ]
