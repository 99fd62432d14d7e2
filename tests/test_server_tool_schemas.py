"""Grammars made of tools: each tool's schema is a document of its own, whose references mean what they mean there."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import unquote

import pytest
from engine_helpers import make
from server_helpers import error, serving
from test_server_structured import template_with_tools
from tiny_models import EOS, VOCAB, byte_tokenizer, make_checkpoint

from saccade.server.errors import ApiError
from saccade.server.grammar import json_grammar
from saccade.server.matchers import Compiler, Grammar
from saccade.server.protocol import ChatRequest
from saccade.server.tool_choice import tool_choice
from saccade.server.tool_formats import FORMATS
from saccade.server.tool_formats.words import Words

TOKENIZER = byte_tokenizer()
COMPILER = Compiler(TOKENIZER, VOCAB, [EOS])
ENDS = TOKENIZER.encode(']},"', add_special_tokens=False)
NO_SPACE = {str(token): -100.0 for token in TOKENIZER.encode(" \n\t", add_special_tokens=False)}


def objects(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return closed | more


TREE = objects({"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}}, required=["v"])
OTHER = {"$id": "https://e.org/t", "$ref": "#/$defs/z", "$defs": {"z": {"const": 2}}}
OLD = {"type": "integer", "maximum": 7, "exclusiveMaximum": True}
CONST = objects({"a": {"const": 1}})
LIKE = objects({"a": {"const": {"$ref": "#/no"}}})
# (schema, arguments that are valid, arguments that are not)
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "$defs": (objects({"a": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": {"enum": [1, 2]}}}), [{"a": 2}], [{"a": 3}]),
    "definitions": (objects({"a": {"$ref": "#/definitions/n"}}, definitions={"n": {"const": 1}}), [{"a": 1}], [{}]),
    "the root": (TREE, [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}]}], [{"v": 1, "kids": [{}]}, {}]),
    "a property": (
        objects({"a": {"enum": [1]}, "b": {"$ref": "#/properties/a"}}),
        [{"a": 1, "b": 1}],
        [{"a": 1, "b": 2}],
    ),
    "escapes": (
        objects({"a": {"$ref": "#/$defs/x~1y~0z%25%20w"}}, **{"$defs": {"x/y~z% w": {"const": 1}}}),
        [{"a": 1}],
        [{"a": 2}],
    ),
    "an escape of an escape": (
        objects({"a": {"$ref": "#/$defs/p%2525"}}, **{"$defs": {"p%25": {"const": 1}, "p%": {"const": 2}}}),
        [{"a": 1}],
        [{"a": 2}],
    ),
    "beside a reference": (
        objects({"a": {"$ref": "#/$defs/n", "minimum": 5}}, **{"$defs": {"n": {"type": "integer", "maximum": 7}}}),
        [{"a": 6}],
        [{"a": 4}, {"a": 8}],
    ),
    "an anchor": (
        objects({"a": {"$ref": "#x"}}, **{"$defs": {"n": {"$anchor": "x", "const": 1}}}),
        [{"a": 1}],
        [{"a": 2}],
    ),
    "properties that look like references": (
        objects({"$ref": {"const": "#/nowhere"}, "$id": {"const": 1}}),
        [{"$ref": "#/nowhere", "$id": 1}],
        [{"$ref": "x", "$id": 1}],
    ),
    "values that look like references": (LIKE, [{"a": {"$ref": "#/no"}}], [{"a": 1}]),
    "an own name": (
        objects({"a": {"$ref": "item"}}, **{"$id": "https://e.org/s", "$defs": {"i": {"$id": "item", "const": 1}}}),
        [{"a": 1}],
        [{"a": 2}],
    ),
    "the same name with other contents": (
        objects({"a": {"$ref": "item"}}, **{"$id": "https://e.org/s", "$defs": {"i": {"$id": "item", "const": 2}}}),
        [{"a": 2}],
        [{"a": 1}],
    ),
    "a name inside": (
        objects(
            {"a": {"$ref": "https://e.org/t"}},
            **{"$defs": {"z": {"const": 1}, "t": OTHER}},
        ),
        [{"a": 2}],
        [{"a": 1}],
    ),
    "an older draft": (
        objects({"a": {"$ref": "#/definitions/n"}}, definitions={"n": OLD})
        | {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://e.org/old"},
        [{"a": 6}],
        [{"a": 7}],
    ),
    "only a reference": ({"$ref": "#/$defs/n", "$defs": {"n": CONST}}, [{"a": 1}], [{"a": 2}, 5]),
    "no type": ({"properties": {"a": {"const": 1}}, "additionalProperties": False}, [{"a": 1}, {}], [5, [], {"b": 1}]),
    "no parameters": (None, [{}], [{"a": 1}, 5, "", None]),
}  # fmt: skip


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | ({} if schema is None else {"parameters": schema})}


def grammar(tools: list[Any], choice: Any, **fields: Any):
    body = ChatRequest.model_validate({"messages": [{}], "tools": tools, "tool_choice": choice, **fields})
    return Grammar(*tool_choice(body).grammar(FORMATS["json"], Words(TOKENIZER)), COMPILER)


def follows(grammar, text: str) -> bool:
    """Whether ``text`` may be a whole answer."""
    matcher, tokens = grammar.begin(), TOKENIZER.encode(text, add_special_tokens=False)
    return all(matcher.allowed(tokens[:at])[token] for at, token in enumerate([*tokens, EOS]))


def calls(*made: tuple[str, Any]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in made])


ALL = [tool(f"t{index}", schema) for index, (schema, _, _) in enumerate(SCHEMAS.values())]


@pytest.mark.parametrize("index", range(len(SCHEMAS)), ids=[*SCHEMAS])
def test_references_mean_the_same_among_other_tools(index):
    schema, valid, invalid = [*SCHEMAS.values()][index]
    name = f"t{index}"
    required, named = grammar(ALL, "required"), grammar(ALL, {"type": "function", "function": {"name": name}})
    single = grammar(ALL, "required", parallel_tool_calls=False)
    alone = None if schema is None else Grammar(json_grammar(schema), "x", COMPILER)
    for arguments in valid:
        assert follows(named, calls((name, arguments)))
        assert alone is None or follows(alone, json.dumps(arguments))
        for one in (required, single):
            assert follows(one, calls((name, arguments)))
        assert follows(required, calls(("t2", {"v": 3}), (name, arguments), (name, arguments)))
        assert not follows(single, calls((name, arguments), (name, arguments)))
    for arguments in invalid:
        assert not follows(named, calls((name, arguments)))
        assert not follows(required, calls((name, arguments)))
        assert not follows(required, calls(("t2", {"v": 3}), (name, arguments)))
    assert not follows(required, calls(("t99", {})))
    assert not follows(required, "[]")


def resolve(reference: str, root: Any) -> Any:
    """What a reference of these tests' schemas refers to."""
    if reference.startswith("#"):
        target = root
        for part in filter(None, unquote(reference[1:]).split("/")):
            target = target.get(part.replace("~1", "/").replace("~0", "~"))
        return target
    raise AssertionError(reference)


def valid(value: Any, schema: Any, root: Any) -> bool:
    """A validator by hand, of the keywords that the sampled schemas have."""
    kinds = {"object": dict, "array": list, "integer": int}
    checks = {
        "$ref": lambda it: valid(value, resolve(it, root), root),
        "enum": lambda it: value in it,
        "const": lambda it: value == it,
        "type": lambda it: isinstance(value, kinds[it]),
        "minimum": lambda it: value >= it,
        "maximum": lambda it: value <= it,
        "properties": lambda it: all(valid(value[key], one, root) for key, one in it.items() if key in value),
        "required": lambda it: all(key in value for key in it),
        "additionalProperties": lambda it: set(value) <= set(schema["properties"]),
        "items": lambda it: all(valid(one, it, root) for one in value),
        "anyOf": lambda it: any(valid(value, one, root) for one in it),
    }
    return all(check(schema[key]) for key, check in checks.items() if key in schema)


def test_sampled_calls_are_valid_by_another_validator():
    names = [
        "$defs",
        "the root",
        "a property",
        "escapes",
        "an escape of an escape",
        "beside a reference",
        "no parameters",
    ]
    schemas = {f"s{index}": SCHEMAS[name][0] for index, name in enumerate(names)}
    wanted = grammar([tool(name, schema) for name, schema in schemas.items()], "required")
    draw, met = random.Random(2), set()
    for _ in range(25):
        matcher, answer = wanted.begin(), []
        while not answer or answer[-1] != EOS:
            allowed = matcher.allowed(answer).nonzero().flatten().tolist()
            dense = [one for one in allowed if str(one) not in NO_SPACE] or allowed
            ends = [one for one in dense if one in ENDS or one == EOS]
            answer.append(draw.choice(ends if ends and len(answer) > 120 else dense))
            assert len(answer) < 900
        for call in json.loads(TOKENIZER.decode(answer[:-1])):
            schema = schemas[call["name"]] or {"properties": {}, "additionalProperties": False}
            assert isinstance(call["arguments"], dict)
            assert valid(call["arguments"], schema, schema), call
            met.add(call["name"])
    assert len(met) >= 5


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "tools", max_position_embeddings=8192)
    template_with_tools(folder)
    with serving(make(folder), tool_parser="hermes") as running:
        yield running
        running.idle()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (objects({"a": {"$ref": "#/$defs/none"}}), "tools[1].function.parameters"),
        (objects({"a": {"$ref": "http://e.org/x"}}), "tools[1].function.parameters"),
        (objects({"a": {"$dynamicRef": "#x"}}), "tools[1].function.parameters"),
        ({"type": "array"}, "tools[1].function.parameters.type='array'"),
        (objects({"a": {"const": "\ud800"}}), None),
        (objects({"a": {"maximum": float("inf")}}), None),
    ],
)
def test_parameters_that_no_grammar_can_be_made_of_are_refused_by_name(server, schema, says):
    for choice in ("required", {"type": "function", "function": {"name": "b"}}):
        body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": choice, "max_tokens": 9}
        response = server.ask("/v1/chat/completions", {**body, "tools": [tool("a", TREE), tool("b", schema)]})
        assert error(response)[0] == 400
        assert says is None or says in response.json()["error"]["message"]
        flat = [{"type": "function", **one["function"]} for one in (tool("a", TREE), tool("b", schema))]
        named = choice if isinstance(choice, str) else {"type": "function", "name": "b"}
        asked = {"input": "x", "tools": flat, "tool_choice": named, "max_output_tokens": 9}
        assert error(server.ask("/v1/responses", asked))[0] == 400


def test_a_tool_without_parameters_is_called_without_any(server):
    """In chats and in responses; so is one that must be called and recurs."""
    fields = {"temperature": 1.0, "seed": 3, "ignore_eos": False, "logit_bias": NO_SPACE}
    choice = {"type": "function", "function": {"name": "now"}}
    message = server.chat(
        **fields, max_tokens=90, tools=[tool("now", None), tool("x", TREE)], tool_choice=choice
    ).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"
    asked = {**fields, "input": "x", "tools": [{"type": "function", "name": "now"}], "tool_choice": "required"}
    output = server.ask("/v1/responses", {**asked, "max_output_tokens": 90, "parallel_tool_calls": False}).json()[
        "output"
    ]
    assert [(item["type"], item["name"], item["arguments"]) for item in output] == [("function_call", "now", "{}")]


def test_many_tools_are_compiled_once_each():
    """A grammar names every tool's schema once: its size is that of the schemas, and little more."""
    sizes = [len(tool_choice_source(count)) for count in (50, 100)]
    assert sizes[1] < 2.1 * sizes[0]


def tool_choice_source(count: int) -> str:
    tools = [tool(f"t{index}", TREE) for index in range(count)]
    body = ChatRequest.model_validate({"messages": [{}], "tools": tools, "tool_choice": "required"})
    source: str = tool_choice(body).grammar(FORMATS["json"], Words(TOKENIZER))[0]
    return source


def test_two_tools_of_one_name_may_both_be_meant():
    both = [tool("f", objects({"a": {"const": 1}})), tool("f", objects({"b": {"const": 2}}))]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        made = grammar(both, choice)
        assert follows(made, calls(("f", {"a": 1})))
        assert follows(made, calls(("f", {"b": 2})))
        assert not follows(made, calls(("f", {"a": 2})))
    with pytest.raises(ApiError, match="tool_choice"):
        grammar(both, {"type": "function", "function": {"name": "g"}})
