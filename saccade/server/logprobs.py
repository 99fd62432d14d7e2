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
        return {"token": text, "logprob": finite(entry.logprob), "bytes": list(text.encode("utf-8", "replace"))}

    content = []
    for token, row in zip(tokens, entries):
        likeliest = [one(other, entry) for other, entry in row.items() if entry.rank <= top]
        content.append({**one(token, row[token]), "top_logprobs": likeliest[:top]})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """``choices[].logprobs`` of a text completion, chunk after chunk. ``offset``: characters of the text before."""

    def __init__(self, top: int, as_ids: bool, offset: int = 0) -> None:
        self.top, self.as_ids, self.offset = top, as_ids, offset

    def chunk(self, tokens: Sequence[int], entries: Sequence[Entries | None], texts: Sequence[str]) -> JSON:
        """``texts``: of tokens whose entry is None: the first of a prompt has none."""
        out: JSON = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, row, bare in zip(tokens, entries, texts):
            entry = None if row is None else row[token]
            text = bare if entry is None else _text(token, entry, self.as_ids)
            out["tokens"].append(f"token_id:{token}" if self.as_ids else text)
            out["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            out["top_logprobs"].append(
                None
                if row is None
                else {
                    _text(other, one, self.as_ids): finite(one.logprob)
                    for other, one in row.items()
                    if one.rank <= max(self.top, 1) or other == token
                }
            )
            out["text_offset"].append(self.offset)
            self.offset += len(bare if entry is None else entry.decoded_token)
        return out


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
