"""From a conversation to token ids, and where in them the context ends and the question begins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from saccade.eval.samples import Turn


@dataclass(frozen=True)
class Exchange:
    """An earlier turn: what the user said, and what the context holds as the answer (``prefix`` included)."""

    message: str
    answer: str


@dataclass(frozen=True)
class Prompt:
    """``ids``: the whole prompt. ``cut``: how many of them come before the question: they are the same whatever is
    asked. ``question_last``: nothing of the context stands after the question."""

    ids: list[int]
    cut: int
    question_last: bool


_LISTS = ("recall", "iou", "ordered", "string_match_all")  # metrics that want all references, not one of them


def gold_answer(turn: Turn) -> str:
    """What stands in the context as the answer under gold history: ``meta["gold"]`` if it is there, else all references
    or the first one, as the metric has it."""
    gold = ", ".join(turn.answers if turn.metric in _LISTS else turn.answers[:1])
    return str(turn.meta.get("gold", gold))


def render(tokenizer: Any, history: Sequence[Exchange], turn: Turn, keep: bool = True) -> Prompt:
    """The prompt of ``turn`` after ``history``, through the model's chat template if it has one, else as plain text;
    ``meta["chat"]`` false asks for plain text.

    The ids do not depend on where they are cut; a token that straddles the border belongs to the question. ``keep``:
    remember what was encoded, for prompts that come again.
    """
    before, after = turn.split()
    chat_ids, text_ids = (_chat_ids, _text_ids) if keep else (_chat_ids.__wrapped__, _text_ids.__wrapped__)
    if tokenizer.has_chat_template and turn.meta.get("chat", True):
        said = [one for exchange in history for one in (("user", exchange.message), ("assistant", exchange.answer))]
        ids = list(chat_ids(tokenizer, (*said, ("user", before + after))))
        ids += tokenizer.encode(turn.prefix, add_special_tokens=False) if turn.prefix else []
        context = chat_ids(tokenizer, (*said, ("user", before)))
    else:
        text = "".join(f"{exchange.message}{exchange.answer}\n" for exchange in history)
        ids = list(text_ids(tokenizer, text + before + after + turn.prefix))
        context = text_ids(tokenizer, text + before)
    cut = next((at for at, (one, other) in enumerate(zip(ids, context)) if one != other), min(len(ids), len(context)))
    return Prompt(ids, min(cut, len(ids) - 1), after == turn.question)


# A board asks the same samples under hundreds of settings, and a long context takes longer to encode than a GPU takes
# to answer about it. Four bytes a token are kept: 512 contexts of 16K tokens are 32 MiB, and their texts.
@lru_cache(512)
def _chat_ids(tokenizer: Any, messages: tuple[tuple[str, str], ...]) -> array[int]:
    return array("i", tokenizer.apply_chat_template([{"role": role, "content": said} for role, said in messages]))


@lru_cache(512)
def _text_ids(tokenizer: Any, text: str) -> array[int]:
    return array("i", tokenizer.encode(text))
