"""Calls of tools, read out of answers: none is made up, nothing of an answer is lost, and arguments are the model's own
text, however the text comes."""

from __future__ import annotations

import json
import random

import pytest

from saccade.server.reader import Joined, Reader
from saccade.server.reasoning import FORMATS as THOUGHTS
from saccade.server.reasoning import ReasoningReader
from saccade.server.tool_formats import FORMATS
from saccade.server.tool_formats.parts import Begun, settled
from saccade.server.tool_formats.source import Source

_PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "r": {"$ref": "#/$defs/r~1s"},
    "any": {},
    "list": {"type": ["array", "string"]},
}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "$defs": {"r/s": {"enum": [1, 2]}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": _PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]


def joined(parts):
    """Parts of an answer that has ended as text and (name, arguments), neighbouring texts as one."""
    made: list = []
    for part in settled(parts):
        if isinstance(part, str):
            made.append(part)
        elif isinstance(part, Begun):
            made.append(part.name)
        elif hasattr(part, "text"):
            made[-1] = made[-1], part.text
    return made


def events(format: str, pieces, tools=TOOLS):
    """All that a stream tells, neighbours of a kind as one, without ids."""
    reader, told = FORMATS[format].reader(tools), []
    for part in [part for piece in pieces for part in reader.feed(piece)] + reader.feed("", True):
        kind, text = type(part).__name__, part if isinstance(part, str) else getattr(part, "text", "")
        text = part.name if isinstance(part, Begun) else text
        if told and told[-1][0] == kind and kind in ("str", "Arguments"):
            told[-1] = kind, told[-1][1] + text
        else:
            told.append((kind, text))
    return told


def read(format: str, pieces, tools=TOOLS):
    reader = FORMATS[format].reader(tools)
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.feed("", True))


def read_however_it_comes(format: str, text: str, tools=TOOLS):
    """What a format reads, which must be the same for the whole, for single characters, for every split into two, and
    for random ones."""
    whole = events(format, [text], tools)
    assert events(format, text, tools) == whole
    for cut in range(len(text)):
        assert events(format, [text[:cut], text[cut:]], tools) == whole, text[:cut]
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=4))
        assert events(format, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], tools) == whole
    return read(format, [text], tools)


def tagged(*inside: str) -> str:
    return "".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in inside)


def call(arguments: str, name: str = "f") -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


# Each argument text must come out as it went in.
OWN_TEXT = [
    "{}",
    '{"n": 1e999, "m": -0.0, "k": 1.0E+2}',
    '{"n": 123456789012345678901234567890, "m": ' + "9" * 5000 + "}",
    '{"z": 1, "a": 2, "z": 3}',
    '{ "a" :\t1 ,\n "b": [ ] }',
    r'{"s": "\ud83d", "t": "\u00e9\/", "u": "é😀"}',
    '{"s": "a </tool_call> b <tool_call> c"}',
    r'{"s": "quote \" </tool_call> and \\"}',
    '{"s": {"a": {"b": [{"c": "}}]]"}]}}}',
    '{"name": "x", "arguments": {"y": 1}}',
    "null",
]


@pytest.mark.parametrize("arguments", OWN_TEXT)
def test_arguments_are_the_models_own_text(arguments):
    short = arguments.replace("9" * 5000, "9" * 50)
    for format in ("hermes", "qwen3_coder"):
        found = read_however_it_comes(format, f"so {tagged(call(short))}then {tagged(call(short, 'g'))}")
        assert found == ["so ", ("f", short), "\nthen ", ("g", short), "\n"]
        assert read(format, [tagged(call(arguments))]) == [("f", arguments)]
    for given in ("arguments", "parameters"):
        bare = f'{{"name": "f", "{given}": {short}}}'
        assert read_however_it_comes("llama3_json", bare) == [("f", short)]
    assert read_however_it_comes("json", f"[{call(short)}]") == [("f", short)]


# (reported of, format, what the model wrote, what the client gets). Cases of public reports, in our own words.
REPORTED = [
    ("llama.cpp 16710, 18183: sample JSON with a name is no call", "hermes", '{"name": "Bingo", "age": 30}', None),
    ("sglang 35562: an empty object is an answer", "llama3_json", "{}", None),
    ("sglang 35562: JSON with words behind it is an answer", "llama3_json", '{"a": 1} is a dict', None),
    ("a record with a name is data", "llama3_json", '{"name": "Alice", "age": 3}', None),
    ("a name that is no tool's", "llama3_json", '{"name": "Alice", "parameters": {"age": 3}}', None),
    ("other members beside a tool's name", "llama3_json", '{"name": "f", "parameters": {}, "note": "x"}', None),
    ("no arguments, among tags", "hermes", '<tool_call>{"name": "f", "age": 3}</tool_call>', None),
    ("vllm 28806: empty arguments arrive", "hermes", tagged(call("{}", "g")), [("g", "{}")]),
    (
        "vllm 47901: calls behind one with empty arguments keep theirs",
        "hermes",
        tagged(call("{}", "g"), call('{"s": "x"}')),
        [("g", "{}"), ("f", '{"s": "x"}')],
    ),
    ("vllm 10395: braces and quotes", "hermes", tagged(call(r'{"s": "{\"}"}')), [("f", r'{"s": "{\"}"}')]),
    ("cut off within the arguments", "hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "ab', None),
    ("the end tag is missing", "hermes", f"<tool_call>{call('{}')}", [("f", "{}")]),
    ("cut off within the end tag", "hermes", f"<tool_call>{call('{}')}\n</tool_c", [("f", "{}")]),
    (
        "a broken call does not take the next one with it",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "x}</tool_call>' + tagged(call("{}", "g")),
        ['<tool_call>{"name": "f", "arguments": {"s": "x}</tool_call>', ("g", "{}"), "\n"],
    ),
    ("quotes in a tag that holds no JSON", "hermes", '<tool_call>say "hi</tool_call> so', None),
    ("the tag is only spoken of", "hermes", "write <tool_call> first", None),
    ("white space around calls is no content", "hermes", "\n\n" + tagged(call("{}"), call("{}")), [("f", "{}")] * 2),
    ("an answer of white space", "hermes", " \n\n", None),
    ("arguments as text", "hermes", tagged(call(r'"{\"s\": 1e999}"')), [("f", '{"s": 1e999}')]),
    ("arguments that are no object", "hermes", "<tool_call>" + call("[1]") + "</tool_call>", None),
    ("NaN is no JSON", "hermes", "<tool_call>" + call('{"n": NaN}') + "</tool_call>", None),
    ("two values for one thing", "hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>', None),
    ("both", "hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>', None),
    ("a list, half of it calls", "llama3_json", '[{"name": "f", "parameters": {}}, 5]', None),
    ("a list of calls", "llama3_json", f"[{call('{}')}, {call('{}', 'g')}]", [("f", "{}"), ("g", "{}")]),
    ("calls with semicolons", "llama3_json", f"{call('{}')}; {call('{}', 'g')}", [("f", "{}"), ("g", "{}")]),
    ("the marker makes any name a call", "llama3_json", '<|python_tag|>{"name": "x", "parameters": {}}', [("x", "{}")]),
    ("code behind the marker", "llama3_json", "<|python_tag|>print(1)", None),
    ("half of the marker", "llama3_json", "<|python", None),
    ("a type beside", "llama3_json", ' {"type": "function", "name": "g", "parameters": null}\n', [("g", "null")]),
    ("a call behind words has no marker", "llama3_json", 'so: {"name": "f", "parameters": {}}', None),
]  # fmt: skip


@pytest.mark.parametrize(("said", "format", "text", "wanted"), REPORTED)
def test_what_was_reported_of_other_servers(said, format, text, wanted):
    assert read_however_it_comes(format, text) == ([text] if wanted is None else wanted), said


def function(*parameters: tuple[str, str], name: str = "f") -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<function={name}>\n{inside}</function>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (function(("s", "</tool_call></parameter>\n</function> ")), '{"s": "</tool_call></parameter>\\n</function> "}'),
        (function(("n", "12345678901234567890123")), '{"n": 12345678901234567890123}'),
        (function(("n", "1e999"), ("n", "2")), '{"n": 1e999, "n": 2}'),
        (function(("s", "5"), ("s", "null")), '{"s": "5", "s": "null"}'),
        (function(("o", "null"), ("o", "5"), ("o", "nil")), '{"o": null, "o": "5", "o": "nil"}'),
        (function(("r", "2"), ("r", "x"), ("any", "[1,  2]")), '{"r": 2, "r": "x", "any": [1,  2]}'),
        (function(("list", "[1]"), ("list", "a, b"), ("new", "5")), '{"list": [1], "list": "a, b", "new": "5"}'),
        (function(), "{}"),
    ],
)  # fmt: skip
def test_values_of_xml_are_what_the_schema_says(text, wanted):
    found = read_however_it_comes("qwen3_coder", f"so <tool_call>\n{text}\n</tool_call> then")
    assert found == ["so ", ("f", wanted), " then"]
    json.loads(wanted)


def test_xml_that_is_more_than_calls_or_less_stays_text():
    two = f"<tool_call>{function(name='f')}\n{function(('s', 'x'), name='g')}</tool_call>"
    assert read_however_it_comes("qwen3_coder", two) == [("f", "{}"), ("g", '{"s": "x"}')]
    for inside in (
        "hm " + function(),
        function()[:-9],
        "</func tion>",
        function(("s", "a")).replace("</parameter>", ""),
    ):
        text = f"<tool_call>{inside}</tool_call> so"
        assert read_however_it_comes("qwen3_coder", text) == [text]


def test_what_is_no_call_is_told_as_soon_as_its_end_is_there():
    for inside in ("<b>x</b>", "", "say 'hi", "5", '{"a": 1}'):
        for format in ("hermes", "qwen3_coder"):
            reader = FORMATS[format].reader(TOOLS)
            assert joined(reader.feed(f"<tool_call>{inside}</tool_call> so")) == [f"<tool_call>{inside}</tool_call> so"]


def test_what_is_no_call_is_told_whole_for_any_mixture_of_its_pieces():
    """Texts out of a grammar of troublesome pieces: calls that are found, written back, and text give the answer."""
    pieces = [
        "<tool_call>",
        "</tool_call>",
        '"',
        "\\",
        '{"name": "f", "arguments": ',
        '{"s": "',
        "}",
        "{",
        "x",
        "\n",
        "<",
    ]
    draw = random.Random(3)
    found = 0
    for _ in range(400):
        text = "x" + "".join(draw.choices(pieces, k=draw.randint(1, 14)))
        if draw.random() < 0.5:
            text += f"<tool_call>{call('{}')}</tool_call>" + "".join(draw.choices(pieces, k=4))
        for format in ("hermes", "qwen3_coder"):
            whole = read(format, [text])
            assert read(format, text) == whole
            back = "".join(part if isinstance(part, str) else part[1] for part in whole)
            calls = [part for part in whole if not isinstance(part, str)]
            found += len(calls)
            if not calls:
                assert back == text
            at = 0
            for part in whole:  # in order, and each as the model wrote it
                own = part if isinstance(part, str) else part[1]
                at = text.index(own, at) + len(own)
    assert found > 100


def test_reading_takes_time_linear_in_the_answer(monkeypatch):
    """Counted by the characters that are scanned, those again that are read again."""
    scanned = 0
    take = Source.take

    def counted(self, size):
        nonlocal scanned
        scanned += size
        return take(self, size)

    monkeypatch.setattr(Source, "take", counted)
    units = ("ab ", '</tool_call><tool_call>{\\"', '"</tool_call>', "</tool_call>")
    for unit in (*units, '<tool_call>{"name": "f", "arguments": {"', "<tool_call>{"):
        counts = []
        for size in (500, 1000):
            scanned = 0
            read("hermes", "<tool_call>{" + unit * size)
            counts.append(scanned)
        assert counts[1] <= 2.2 * counts[0] + 100, unit


def test_no_more_than_whole_calls_are_calls_where_one_must_be_made():
    half = '{"name": "g", "argum'
    for text, wanted in (
        (f"[{call('{}')}, {half}", [("f", "{}"), half]),
        (f"[{call('{}')}, ", [("f", "{}")]),
        ("[" + half, ["[" + half]),
        ("[", ["["]),
    ):
        assert read_however_it_comes("json", text) == wanted


def test_thoughts_text_and_calls_keep_their_order():
    text = f"<think>hm {tagged(call('{}'))}</think>\n\none {tagged(call('{}'))}two"
    for size in (1, 3, 1000):
        reader = Reader(Joined(ReasoningReader(THOUGHTS["qwen3"]), FORMATS["hermes"].reader(TOOLS)))
        deltas = [reader.feed(text[at : at + size], False) for at in range(0, len(text), size)]
        deltas.append(reader.feed("", True))
        assert "".join(delta.thoughts for delta in deltas) == f"hm {tagged(call('{}'))}"
        assert joined([part for delta in deltas for part in delta.parts]) == ["one ", ("f", "{}"), "\ntwo"]
        assert reader.called == 1
