"""Answers along grammars, through llguidance (a Constraint of the engine, and its matchers)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from saccade.errors import RequestError
from saccade.server.grammar_check import OFF, read_tokenizer
from saccade.server.logs import logger

KEPT = 64  # grammars that stay compiled
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # 2 KB a state
LONG = 0.005  # seconds of a token, from which on the next one is read without Python's lock
_TOO_COMPLEX = "is too complex to follow any further: make it simpler, with fewer alternatives that read alike and no "
_TOO_COMPLEX += "repetition of repetitions"


class Compiler:
    """Compiles grammars for one model's tokens. ``hf``: transformers' tokenizer, if there is one; ``vocab``: how many
    tokens the model has; ``ends``: those that end an answer. What llguidance needs is made by :meth:`prepare`, or at
    the first grammar. ``unfit``: why llguidance cannot read the tokenizer, once that was tried: it takes seconds, and
    is tried once."""

    def __init__(self, hf: Any, vocab: int, ends: Sequence[int]) -> None:
        self.hf, self.vocab = hf, vocab
        # An end token that is ordinary text, a full stop say, would be no text any more to llguidance.
        added = getattr(hf, "added_tokens_decoder", {})
        marks = [end for end in ends if end in added and added[end].special]
        self.ends = marks or list(ends)
        self.texts_that_end = [end for end in ends if end not in self.ends and end < vocab]
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self.unfit: str | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._both = LLExecutor(2)

    @property
    def tokens(self) -> LLTokenizer:
        """RequestError where llguidance cannot read the tokenizer."""
        with self._lock:
            if self._tokens is None:
                self.check()
                try:
                    self._tokens = read_tokenizer(self.told())
                except ValueError as error:
                    self.unfit = str(error)
                    self.check()
            assert self._tokens is not None
            return self._tokens

    def prepare(self) -> None:
        """Have llguidance read the tokenizer, which takes seconds and holds Python's lock: no other thread of this
        process goes on meanwhile. An engine has it done before its first request. A tokenizer that cannot be read is
        told in the log, and refuses requests that need a grammar."""
        try:
            began = time.perf_counter()
            tokens = self.tokens
            fields = {"tokens": tokens.vocab_size, "seconds": round(time.perf_counter() - began, 1)}
            logger.debug("grammars", extra={"fields": fields})
        except (RequestError, ValueError) as error:
            if self.hf is not None:  # without a tokenizer there are no texts, let alone grammars
                logger.warning(str(error))

    def check(self) -> None:
        """RequestError where the tokenizer is known to be unfit. Takes no time."""
        if self.unfit is not None:
            raise RequestError(self.unfit)

    def told(self) -> dict[str, Any]:
        """The tokenizer as :func:`read_tokenizer` is told of it. ValueError where there is nothing to tell."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        if self.hf is None or backend is None or not self.ends:
            what = "no tokenizer" if self.hf is None else "a slow tokenizer" if backend is None else "no end token"
            raise ValueError(
                f"{OFF}: they need a fast tokenizer (tokenizer.json) with an end token; this model has {what}"
            )
        if backend.padding is not None or backend.truncation is not None:
            backend = copy(backend)  # which takes several times what the text does, and holds Python's lock too
            backend.no_padding()
            backend.no_truncation()
        return {"tokenizer": backend.to_str(), "vocab": self.vocab, "ends": self.ends}

    def matcher(self, source: str) -> LLMatcher:
        """At the beginning of an answer. Takes as long as the grammar takes to compile."""
        tokens = self.tokens
        with self._lock:
            known = self._compiled.get(source)
            if known is not None:
                self._compiled.move_to_end(source)
        if known is None:
            known = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits(**LIMITS))  # type: ignore[arg-type]
            with self._lock:
                self._compiled[source] = known
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        return known.deep_copy()

    def read(self, matcher: LLMatcher, token: int, unlocked: bool) -> bool:
        """Have ``matcher`` go on with ``token``; False where it cannot. ``unlocked``: other threads run meanwhile,
        which llguidance lets them for several matchers at once alone: another one reads the token, too."""
        if not unlocked:
            return matcher.consume_token(token)
        return self._both.consume_token_par([(matcher, token), (self.matcher(_ANYTHING), token)])[0]


_ANYTHING = LLMatcher.grammar_from_regex(r"(?s:.*)")


class Grammar:
    """What answers must follow. ``source``: as llguidance writes it; ``name``: what errors call it."""

    def __init__(self, source: str, name: str, compiler: Compiler) -> None:
        self.source, self.name, self._compiler = source, name, compiler

    def begin(self) -> GrammarMatcher:
        """RequestError where the tokenizer is known to be unfit: the engine lets no such request in."""
        self._compiler.check()
        return GrammarMatcher(self, self._compiler)


class GrammarMatcher:
    """One answer along its grammar (a Matcher of the engine)."""

    def __init__(self, grammar: Grammar, compiler: Compiler) -> None:
        self.name, self._source, self._compiler = grammar.name, grammar.source, compiler
        self._matcher: LLMatcher | None = None
        self._taken = 0
        self._seconds = 0.0  # of the last mask

    def allowed(self, answer: Sequence[int]) -> Tensor:
        """See :class:`saccade.engine.sampling.masks.Matcher`. Once the grammar is at its end, end tokens alone are
        left."""
        began = time.perf_counter()
        matcher, vocab = self._upto(answer), self._compiler.vocab
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{self.name} {_TOO_COMPLEX}")
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab].astype(bool)
        left = np.flatnonzero(mask)
        if matcher.is_accepting():
            mask[self._compiler.texts_that_end] = True
        elif len(left) == 1:
            mask = self._spelt(matcher, mask, int(left[0]))
        elif len(left) == 0:
            raise self._unwritable()
        self._seconds = time.perf_counter() - began
        return torch.from_numpy(mask)

    def accepts(self, answer: Sequence[int]) -> bool:
        """Whether ``answer`` is whole."""
        return self._upto(answer).is_accepting()

    def _upto(self, answer: Sequence[int]) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiler.matcher(self._source)
        matcher = self._matcher
        for token in answer[self._taken :]:
            if not self._compiler.read(matcher, token, self._seconds > LONG):
                break
        self._taken = len(answer)
        if matcher.is_error():
            raise RequestError(f"{self.name} {_TOO_COMPLEX}")
        return matcher

    def _spelt(self, matcher: LLMatcher, mask: np.ndarray[Any, Any], token: int) -> np.ndarray[Any, Any]:
        """The grammar asks for a text that an added token bears, ``<|im_end|>`` say, and that token is all that is
        left: but such tokens are no text, to llguidance itself. The text is spelt with others."""
        compiler = self._compiler
        if not compiler.tokens.is_special_token(token) and token not in compiler.ends:
            return mask
        if matcher.validate_tokens([token]) == 1:  # the grammar names the token itself
            return mask
        text = matcher.compute_ff_bytes().decode("utf-8", "ignore")
        spelt = [one for one in compiler.tokens.greedy_tokenize(text) if one != token]
        if not spelt or spelt[0] >= len(mask) or matcher.validate_tokens(spelt[:1]) == 0:
            raise self._unwritable()
        mask = np.zeros_like(mask)
        mask[spelt[0]] = True
        return mask

    def _unwritable(self) -> RequestError:
        return RequestError(
            f"{self.name} asks for what no token of this model writes; ask for other characters, and for no end token"
        )
