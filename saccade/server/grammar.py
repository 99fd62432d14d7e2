"""Answers that follow a JSON schema, a regular expression, a choice or a grammar, through llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from saccade.errors import SaccadeError
from saccade.server.errors import ApiError, bad_request
from saccade.server.grammar_check import gbnf_source
from saccade.server.grammars import Unread
from saccade.server.matchers import Grammar
from saccade.server.protocol import Sampling
from saccade.server.weight import weight

if TYPE_CHECKING:
    from saccade.server.serving import Serving

LONGEST = 262_144  # characters of a grammar
OFF_CODE = "unsupported_field"  # of errors that no other grammar would mend
# As much white space as people lay JSON out with. A weak model that may write any amount never ends.
_WHITE = {"whitespace_pattern": r"[ \n\t]{0,16}"}


def json_grammar(schema: Any) -> str:
    """JSON that is valid under ``schema``. 400 for a schema that is too long."""
    text = json.dumps(schema)
    if len(text) > LONGEST:
        raise bad_request(f"a grammar may have {LONGEST} characters at most; the schema has {len(text)}")
    return LLMatcher.grammar_from_json_schema(text, overrides=_WHITE)  # type: ignore[arg-type]


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
                # One terminal: alternatives of a rule are followed one by one, and there may be thousands.
                texts = " | ".join(json.dumps(text) for text in asked.choice)
                found.append((LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"), "structured_outputs"))
            if asked.grammar is not None:
                found.append((gbnf_source(asked.grammar), "structured_outputs"))
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


async def constraint_of(
    serving: Serving, found: tuple[str, str] | None, wrap: Callable[[str], str] | None = None
) -> Grammar | None:
    """``grammar_of``'s finding, once it was compiled in another process. ``wrap`` makes it part of another grammar, as
    llguidance writes it. 400 where it cannot be compiled, or not in time; with the code OFF_CODE where no
    grammar can."""
    if found is None:
        return None
    source, param = found
    try:
        checked = await serving.grammars.checked(source)
        if wrap is not None:
            checked = await serving.grammars.checked(wrap(checked))
    except Unread as error:
        raise bad_request(str(error), param, OFF_CODE) from error
    except SaccadeError as error:
        raise bad_request(f"{param} cannot be compiled: {error}", param) from error
    return Grammar(checked, f"the grammar of {param}", serving.grammars.compiler)
