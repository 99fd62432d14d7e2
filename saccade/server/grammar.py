"""Answers that follow a JSON schema, a regular expression, a choice or a grammar, through llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from saccade.errors import RequestError
from saccade.server.errors import ApiError, bad_request
from saccade.server.protocol import Sampling
from saccade.server.weight import weight

if TYPE_CHECKING:
    from saccade.server.serving import Serving

LONGEST = 262_144  # characters of a grammar
# As much white space as people lay JSON out with. A weak model that may write any amount never ends.
_WHITE = {"whitespace_pattern": r"[ \n\t]{0,16}"}


class GrammarMatcher:
    """One answer along its grammar (a Matcher of the engine)."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab, self._taken = matcher, vocab, 0

    def allowed(self, answer: Sequence[int]) -> Tensor:
        """See :class:`saccade.engine.steering.Matcher`. Once the grammar is at its end, end tokens alone are left."""
        self._matcher.consume_tokens(list(answer[self._taken :]))
        self._taken = len(answer)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed any further: {self._matcher.get_error()[:300]}")
        return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self._vocab]).bool()


class Grammar:
    """What answers must follow (a Constraint of the engine). ``source``: as llguidance writes it."""

    def __init__(self, matcher: LLMatcher, vocab: int, source: str) -> None:
        self._matcher, self._vocab, self.source = matcher, vocab, source

    def begin(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab)


class Grammars:
    """Compiles grammars for one model's tokens. ``hf``: transformers' tokenizer, if there is one; ``vocab``: how many
    tokens the model has; ``ends``: those that end an answer. What llguidance needs is made at the first grammar."""

    def __init__(self, hf: Any, vocab: int, ends: Sequence[int]) -> None:
        self._hf, self._vocab, self._ends, self._lock = hf, vocab, list(ends), threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: str, param: str) -> Grammar:
        """``grammar`` as llguidance writes it. 400 where it is none, or where the model has no tokenizer for it."""
        matcher = LLMatcher(self._tokens(), grammar)
        if matcher.is_error():
            raise bad_request(f"{param} cannot be compiled: {matcher.get_error()[:500]}", param)
        return Grammar(matcher, self._vocab, grammar)

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.hf.from_tokenizer(self._hf, self._vocab, self._ends)
                except Exception as error:  # no tokenizer, a slow one, no end token, or one llguidance cannot read
                    raise bad_request(
                        f"structured outputs need a fast tokenizer with an end token: {type(error).__name__}: {error}"
                    ) from error
            return self._tokenizer


def json_grammar(schema: Any) -> str:
    """JSON that is valid under ``schema``."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_WHITE)  # type: ignore[arg-type]


def grammar_of(body: Sampling) -> tuple[str, str] | None:
    """What a request's answer must follow, as llguidance writes it, and the field that says so."""
    wanted, asked = body.response_format, body.structured_outputs
    _check_size(body)
    found: list[tuple[str, str]] = []
    try:
        if wanted is not None and wanted.type == "json_object":
            found.append((json_grammar({"type": "object"}), "response_format"))
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise bad_request("response_format of type json_schema needs json_schema.schema", "response_format")
            found.append((json_grammar(wanted.json_schema.schema_), "response_format"))
        if asked is not None:
            given = asked.json_
            if given is not None:
                schema = json.loads(given) if isinstance(given, str) else given
                found.append((json_grammar(schema), "structured_outputs"))
            if asked.json_object:
                found.append((json_grammar({"type": "object"}), "structured_outputs"))
            if asked.regex is not None:
                found.append((LLMatcher.grammar_from_regex(asked.regex), "structured_outputs"))
            if asked.choice is not None:
                if not asked.choice or not all(asked.choice):
                    raise bad_request("structured_outputs.choice needs at least one text, none empty", "choice")
                found.append((llguidance.grammar_from("choice", json.dumps(asked.choice)), "structured_outputs"))
            if asked.grammar is not None:
                found.append((llguidance.grammar_from("grammar", asked.grammar), "structured_outputs"))
    except ApiError:
        raise
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the grammar of the answer cannot be read: {error}", "structured_outputs") from error
    if len(found) > 1:
        raise bad_request("an answer follows one grammar; give one of response_format and structured_outputs")
    if found and len(found[0][0]) > LONGEST:
        raise bad_request(f"a grammar may have {LONGEST} characters at most", found[0][1])
    if found and body.ignore_eos:
        raise bad_request("ignore_eos and a grammar exclude each other: grammars end with an end token", "ignore_eos")
    return found[0] if found else None


def _check_size(body: Sampling) -> None:
    """400 for a grammar that is too long, before anything reads it."""
    schema = None if body.response_format is None else body.response_format.json_schema
    given = {
        "response_format": None if schema is None else schema.schema_,
        "structured_outputs": None if body.structured_outputs is None else vars(body.structured_outputs),
    }
    for name, value in given.items():
        # As JSON a value has at least two characters, and counts as 64 of weight.
        if weight(value, 32 * LONGEST) > 32 * LONGEST:
            raise bad_request(f"a grammar may have {LONGEST} characters at most", name)


async def constraint_of(serving: Serving, found: tuple[str, str] | None) -> Grammar | None:
    """``grammar_of``'s finding, compiled on another thread."""
    if found is None:
        return None
    return await serving.off_loop(LONGEST, lambda: serving.grammars.compile(*found))
