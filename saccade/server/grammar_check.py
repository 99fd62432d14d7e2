"""Compiles grammars in a process of its own: ``python -m saccade.server.grammar_check``.

A grammar may be written so that compiling it takes hours, all memory, or more stack than there is. Nothing can end that
in a thread. Here it costs this process alone, which its parent ends (grammars.py).

One JSON object a line comes in, one goes out. The first has the tokenizer; the others a ``source`` each. This module
imports little: it begins in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from importlib.metadata import version
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

MEMORY = 4 << 30  # bytes of addresses, of which a tokenizer takes most
OFF = "structured outputs and forced calls are off here"  # how errors begin that no other grammar would mend
_GBNF = "%gbnf\n"


def gbnf_source(text: str) -> str:
    """A grammar as people write it, Lark or GBNF, which is still to be rewritten: that takes long, too."""
    return _GBNF + text


def read_tokenizer(told: dict[str, Any]) -> LLTokenizer:
    """A model's tokens as llguidance has them. ``told``: the ``tokenizer`` as JSON, how many tokens the model has
    (``vocab``), and those that end an answer (``ends``). ValueError, of one line, where llguidance cannot read them."""
    try:
        return LLTokenizer(told["tokenizer"], n_vocab=told["vocab"], eos_token=told["ends"])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise ValueError(
            f"{OFF}: llguidance {version('llguidance')} cannot read this model's tokenizer "
            f"({type(error).__name__}: {_first_line(error)}); serve it with another version of llguidance or another "
            "tokenizer.json"
        ) from error


def checked(tokens: LLTokenizer, source: str) -> dict[str, str]:
    """``source`` as llguidance writes it, or an ``error``: one line."""
    try:
        if source.startswith(_GBNF):
            source = grammar_from("grammar", source.removeprefix(_GBNF))
    except (ValueError, RecursionError) as error:
        return {"error": _first_line(error)}
    matcher = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()  # what a first token takes belongs to it
    if matcher.is_error():
        said = _first_line(matcher.get_error())
        internal = any(word in said for word in ("limits.", "lexer", "Parser Error", "Current row"))
        return {"error": "it is too complex; make it simpler" if internal else said}
    return {"source": source}


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "it is no grammar")[:300]


def _end_with(parent: int) -> None:
    """A grammar that never compiles would run on once the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokens: LLTokenizer | None = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if tokens is None:
            try:
                tokens = read_tokenizer(asked)
                answer: dict[str, str] = {}
            except ValueError as error:
                answer = {"error": str(error)}
        else:
            answer = checked(tokens, asked["source"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
