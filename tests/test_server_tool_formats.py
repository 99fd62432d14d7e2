"""Formats of calls: what a chat template shows is what its format reads and what a forced answer is made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from test_server_tool_calls import events, joined, read_however_it_comes
from tiny_models import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from saccade.models.tokenizer import Tokenizer as OurTokenizer
from saccade.server import reasoning
from saccade.server.matchers import Compiler, Grammar
from saccade.server.messages import conversation
from saccade.server.reader import Reader
from saccade.server.tool_formats import FORMATS, UNKNOWN, format_of
from saccade.server.tool_formats.harmony import MARKS, HarmonyReader, channel_grammar
from saccade.server.tool_formats.parts import Begun
from saccade.server.tool_formats.words import Words

TOOLS_SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURN = "{{ bos_token }}" + TOOLS_SHOWN + (
    "{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% else %}<assistant>CALLS"
    "<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)  # fmt: skip
JSON_CALL = '{"name": "{{ c.function.name }}", "ARGUMENTS": {{ c.function.arguments | tojson }}}'
EACH, END = "{% for c in m.tool_calls or [] %}", "{% endfor %}"
SAID = "{% if m.content %}{{ m.content }}{% endif %}"
COMMA = "{% if not loop.last %}, {% endif %}"
LINE = "{% if not loop.last or m.content %}\n{% endif %}"
BEFORE = "{% if not loop.first or m.content %}\n{% endif %}"
VALUE = "{{ v if v is string else v | tojson }}"
PARAMETERS = "{% for k, v in c.function.arguments.items() %}"
DEEP = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
PYTHON = (
    "{{ c.function.name }}(" + PARAMETERS + "{{ k }}={% if v is string %}{{ v | tojson }}{% elif v is none %}None"
    "{% elif v is true %}True{% elif v is false %}False{% else %}{{ v | tojson }}{% endif %}" + COMMA + END + ")"
)  # fmt: skip


def json_call(arguments: str = "arguments") -> str:
    return JSON_CALL.replace("ARGUMENTS", arguments)


def dsml(block: str) -> str:
    return (
        "{% if m.tool_calls %}<｜DSML｜" + block + ">\n" + EACH + '<｜DSML｜invoke name="{{ c.function.name }}">\n'
        + PARAMETERS + '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">' + VALUE
        + "</｜DSML｜parameter>\n" + END + "</｜DSML｜invoke>\n" + END + "</｜DSML｜" + block + ">{% endif %}"
    )  # fmt: skip


# How templates of each family write an assistant's turn, in our own words: facts of the format, and little else.
CALLS: dict[str, str] = {
    "hermes": SAID + EACH + BEFORE + "<tool_call>\n" + json_call() + "\n</tool_call>" + END,
    "qwen3_coder": SAID + EACH + BEFORE + "<tool_call>\n<function={{ c.function.name }}>\n" + PARAMETERS
    + "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n" + END + "</function>\n</tool_call>" + END,
    "seed_oss": SAID + EACH + BEFORE + "<seed:tool_call>\n<function={{ c.function.name }}>\n" + PARAMETERS
    + "<parameter={{ k }}>" + VALUE + "</parameter>\n" + END + "</function>\n</seed:tool_call>" + END,
    "glm45": SAID + EACH + BEFORE + "<tool_call>{{ c.function.name }}\n" + PARAMETERS + "<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>" + VALUE + "</arg_value>\n" + END + "</tool_call>" + END,
    "glm47": SAID + EACH + "<tool_call>{{ c.function.name }}" + PARAMETERS + "<arg_key>{{ k }}</arg_key><arg_value>"
    + VALUE + "</arg_value>" + END + "</tool_call>" + END,
    "mistral": SAID + "{% if m.tool_calls %}[TOOL_CALLS] [" + EACH + json_call() + COMMA + END + "]{% endif %}",
    "mistral_args": SAID + EACH + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}" + END,
    "granite": SAID + "{% if m.tool_calls %}<|tool_call|>[" + EACH + json_call() + COMMA + END + "]{% endif %}",
    # DeepSeek's own templates join arguments to text, and show no calls beside a content that is no null.
    "deepseek_v3": "{% if m.content is none %}" + DEEP[0] + EACH + "{% if not loop.first %}\n{% endif %}"
    "{{ '" + DEEP[2] + "function" + DEEP[4] + "' + c.function.name + '\n```json\n' + c.function.arguments + '\n```"
    + DEEP[3] + "' }}" + END + DEEP[1] + "{% else %}{{ m.content }}{% endif %}",
    "deepseek_v31": "{% if m.tool_calls is defined %}{% if m.content is not none %}{{ m.content }}{% endif %}" + DEEP[0]
    + EACH + "{{ '" + DEEP[2] + "' + c.function.name + '" + DEEP[4] + "' + c.function.arguments + '" + DEEP[3]
    + "' }}" + END + DEEP[1] + "{% else %}{{ m.content }}{% endif %}",
    "deepseek_v32": SAID + dsml("function_calls"),
    "deepseek_v4": SAID + dsml("tool_calls"),
    "kimi_k2": SAID + "{% if m.tool_calls %}<|tool_calls_section_begin|>" + EACH + "<|tool_call_begin|>functions."
    "{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
    "<|tool_call_end|>" + END + "<|tool_calls_section_end|>{% endif %}",
    "llama3_json": SAID + EACH + json_call("parameters") + END + "{# <|start_header_id|> #}",
    "llama4_json": SAID + EACH + json_call("parameters") + END + "{# <|header_start|> #}",
    "pythonic": SAID + "{% if m.tool_calls %}[" + EACH + PYTHON + COMMA + END + "]{% endif %}{# [f(a=1)] #}",
    "llama4_pythonic": SAID + "{% if m.tool_calls %}<|python_start|>[" + EACH + PYTHON + COMMA + END
    + "]<|python_end|>{% endif %}{# [f(a=1)] #}",
    "lfm2": "{% if m.tool_calls %}<|tool_call_start|>[" + EACH + PYTHON + COMMA + END + "]<|tool_call_end|>{% endif %}"
    + SAID,
    "harmony": "{% if m.content %}<|channel|>commentary<|message|>{{ m.content }}<|end|><|start|>assistant{% endif %}"
    + EACH + " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}" + END,
}  # fmt: skip
TEMPLATES = {name: TURN.replace("CALLS", calls) for name, calls in CALLS.items()}
PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "b": {"type": "boolean"},
    "z": {"type": ["string", "null"]},
    "o": {"type": "object"},
    "l": {"type": "array", "items": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "g-2"}},
]
ONE = {"s": 'a "b" \\ é\n</x> 5', "n": -12, "b": True, "o": {"k": [1.5, None, "x, y)"]}, "l": [1, 2]}
ARGUMENTS: list[dict[str, Any]] = [ONE, {}, {"z": None, "b": False}, {"s": "5"}, {"s": ""}, {"s": "[TOOL] {x} (y="}]


def rendered(name: str, calls: list[Any], content: str = "", hf: Any = None) -> str:
    """The assistant's turn as the template of a format writes it, from its generation prompt to its end."""
    made = []
    for number, (function, arguments) in enumerate(calls):
        call = {"name": function, "arguments": json.dumps(arguments)}
        made.append({"id": f"id{number:07d}", "type": "function", "function": call})
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "tool_calls": made}
    hf = hf or byte_level(TEMPLATES[name])
    tokenizer = OurTokenizer(hf)
    asked = [{"role": "user", "content": "q"}]
    [*before, whole] = (
        hf.decode(tokenizer.apply_chat_template(conversation(turns), generate))
        for turns, generate in ((asked, True), ([*asked, message], False))
    )
    assert whole.startswith(before[0])
    return str(whole.removeprefix(before[0]).removesuffix("<end>"))


def byte_level(template: str = "", marks: tuple[str, ...] = (), special: tuple[str, ...] = ()) -> Any:
    """A tokenizer of bytes, for which ``marks`` are tokens, ``special`` ones special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", *special)])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks if text not in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def values(calls: list[Any]) -> list[Any]:
    return [(call[0], json.loads(call[1])) if isinstance(call, tuple) else call for call in calls]


def read(name: str, text: str) -> list[Any]:
    """What a format reads of an answer, the same for every split of it."""
    if name == "harmony":
        return harmony(text)[1]
    return read_however_it_comes(name, text, TOOLS)


def harmony(text: str, **settings: Any) -> tuple[str, list[Any]]:
    """(thoughts, parts), the same for every split."""

    def one(pieces: list[str]) -> tuple[str, list[Any]]:
        reader = HarmonyReader(**settings)
        told = [reader.feed(piece) for piece in pieces] + [reader.feed("", True)]
        return "".join(thoughts for thoughts, _ in told), joined([part for _, parts in told for part in parts])

    whole = one([text])
    assert one(list(text)) == whole
    for cut in range(len(text)):
        assert one([text[:cut], text[cut:]]) == whole, text[:cut]
    return whole


def test_every_format_has_a_template_here():
    assert {*TEMPLATES, UNKNOWN.name} == {*FORMATS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name):
    assert format_of(TEMPLATES[name]) is FORMATS[name]
    assert format_of(TEMPLATES[name].replace("tools", "things")) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_and_written_again(name):
    """From calls to text, to calls, to the same text: for each of some arguments, for two calls, and behind text."""
    several = FORMATS[name].several
    for number, arguments in enumerate(ARGUMENTS):
        calls = [("f", arguments), ("g-2", {})][: 1 + several]
        text = rendered(name, calls)
        found = values(read(name, text))
        assert found == calls, text
        assert rendered(name, found) == text
        if name in ("deepseek_v3", "llama3_json", "llama4_json", "pythonic", "llama4_pythonic") or number:
            continue  # these show either text or calls
        text = rendered(name, calls, "so:")
        said = [one.strip() if isinstance(one, str) else one for one in values(read(name, text))]
        assert sorted(said, key=str) == sorted(["so:", *calls], key=str)


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_of_a_call_that_is_cut_short_is_lost(name):
    """Whatever the place: whole calls, and the rest as text. What was told of a call is a beginning of it."""
    text = "" if name in ("llama3_json", "pythonic") else "t "
    text += rendered(name, [("f", {"s": "x", "n": 5}), ("g-2", {})][: 1 + FORMATS[name].several])
    if name == "harmony":
        return
    for cut in range(len(text)):
        reader = FORMATS[name].reader(TOOLS)
        parts = [part for letter in text[:cut] for part in reader.feed(letter)] + reader.feed("", True)
        made = joined(parts)
        calls = [one for one in made if isinstance(one, tuple)]
        assert calls in ([], [("f", '{"s": "x", "n": 5}')], [("f", '{"s": "x", "n": 5}'), ("g-2", "{}")])
        if not calls:
            assert "".join(made) == text[:cut]
        told = "".join(text for kind, text in events(name, text[:cut], TOOLS) if kind == "Arguments")
        assert '{"s": "x", "n": 5}{}'.startswith(told) or told.endswith("}")


def test_arguments_are_told_while_they_are_written():
    for name in TEMPLATES:
        if name in ("harmony", "pythonic", "llama4_pythonic", "lfm2"):  # the latter tell each argument whole
            continue
        text = rendered(name, [("f", {"s": "x" * 50})])
        told, half = [], text[: text.index("xxxxx") + 30]
        for part in FORMATS[name].reader(TOOLS).feed(half):
            told.append(getattr(part, "text", ""))
        assert "".join(told).endswith("x" * 20), name


# (format, what a model wrote, what the client gets). None: all of it as text.
ODD = [
    ("mistral", '[TOOL_CALLS]f{"s": "x"}', [("f", '{"s": "x"}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"s": "x"}', [("f", '{"s": "x"}')]),
    ("mistral", 'a[TOOL_CALLS][{"name": "f", "arguments": {}}] b', ["a", ("f", "{}"), " b"]),
    ("mistral", "[TOOL_CALLS] none", None),
    ("deepseek_v31", "<｜tool▁calls▁begin｜> f {}", None),
    ("deepseek_v3", f"{DEEP[0]}{DEEP[2]}function{DEEP[4]}f\n```json\n[1]\n```{DEEP[3]}{DEEP[1]}", None),
    ("deepseek_v31", f"{DEEP[0]}{DEEP[2]}f{DEEP[4]}{{}}{DEEP[3]}", [("f", "{}")]),
    ("glm45", "<tool_call>f</tool_call>", [("f", "{}")]),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a </arg_value> b</arg_value>\n</tool_call>",
     [("f", '{"s": "a </arg_value> b"}')]),
    ("glm45", "<tool_call>f\n<arg_key>n</arg_key>\n</tool_call>", None),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>', None),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>",
     [("f", '{"b": true}')]),
    ("seed_oss", "<seed:tool_call><function=f><parameter=s>\nx\n</parameter></function></seed:tool_call>",
     [("f", '{"s": "\\nx\\n"}')]),
    ("pythonic", "[f(s='it\\'s', n=1, o={'a': None}), g-2()]",
     [("f", '{"s": "it\'s", "n": 1, "o": {"a": null}}'), ("g-2", "{}")]),
    ("pythonic", "[f(n=1e999)]", [("f", '{"n": 1e999}')]),
    ("pythonic", "[1, 2]", None),
    ("pythonic", "[f(s=__import__('os'))]", None),
    ("pythonic", "[h(a=1)]", None),
    ("pythonic", "[f(s=\"x\")] is how", None),
    ("pythonic", "[f(s)]", None),
    ("pythonic", "[f(l=" + "[" * 99 + "]" * 99 + ")]", None),
    ("llama4_pythonic", "so <|python_start|>[h(a=1)]<|python_end|>", ["so ", ("h", '{"a": 1}')]),
    ("llama4_pythonic", "[f(n=1)]", [("f", '{"n": 1}')]),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {}}]<|tool_call_end|>hi', [("f", "{}"), "hi"]),
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="n">5'
     '</｜DSML｜parameter><｜DSML｜parameter name="q" string="false">[1]</｜DSML｜parameter>'
     '<｜DSML｜parameter name="s" string="false">a b'
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", [("f", '{"n": 5, "q": [1], "s": "a b"}')]),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">'
     "a </｜DSML｜parameter> b</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls> done",
     [("f", '{"s": "a </｜DSML｜parameter> b"}'), " done"]),
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="s" string="maybe">x',
     None),
    ("deepseek_v4", '<｜DSML｜function_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜function_calls>',
     None),
    ("kimi_k2", KIMI[0] + KIMI[1] + "f" + KIMI[2] + "{}" + KIMI[3] + KIMI[4] + "so", [("f", "{}"), "so"]),
    ("kimi_k2", KIMI[0] + KIMI[1] + "functions.a.b:12" + KIMI[2] + "{}", [("a.b", "{}")]),
    ("kimi_k2", KIMI[0] + KIMI[1] + "functions.f:x" + KIMI[2] + "{}" + KIMI[3] + KIMI[4], None),
    ("kimi_k2", KIMI[0] + KIMI[4], None),
    ("llama4_json", '{"name": "f", "parameters": {}}{"name": "g-2", "parameters": {}}', [("f", "{}"), ("g-2", "{}")]),
    ("hermes", "<tool_call>" * 12 + '{"name": "f", "arguments": {}}</tool_call>',
     ["<tool_call>" * 11, ("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 80 + "1" + "}" * 81 + "</tool_call>", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "wanted"), ODD)
def test_odd_answers(name, text, wanted):
    assert read(name, text) == ([text] if wanted is None else wanted)


def test_kimis_calls_keep_the_ids_that_its_template_shows_again():
    """One that comes twice gets another the second time."""
    calls = "".join(f"{KIMI[1]}functions.{one}{KIMI[2]}{{}}{KIMI[3]}" for one in ("f:3", "g-2:4", "f:3"))
    parts = FORMATS["kimi_k2"].reader(TOOLS).feed(KIMI[0] + calls + KIMI[4], True)
    first, second, third = [part for part in parts if isinstance(part, Begun)]
    assert (first.id, first.name, second.id, second.name) == ("functions.f:3", "f", "functions.g-2:4", "g-2")
    assert third.name == "f"
    assert third.id.startswith("call_")


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("print('hi')\nx = {}", ("python", '{"code": "print(\'hi\')\\nx = {}"}')),
        ('brave_search.call(query="a, b)")', ("brave_search", '{"query": "a, b)"}')),
        ('other.call(query="a")', ("python", '{"code": "other.call(query=\\"a\\")"}')),
    ],
)
def test_code_behind_llamas_tag_is_for_an_interpreter(code, wanted):
    tools = [{"type": "function", "function": {"name": name}} for name in ("python", "brave_search")]
    assert read_however_it_comes("llama3_json", f"<|python_tag|>{code}", tools) == [wanted]
    assert read_however_it_comes("llama4_json", f"<|python_start|>{code}<|python_end|>", tools) == [wanted]
    assert read_however_it_comes("llama3_json", f"<|python_tag|>{code}", TOOLS) == [f"<|python_tag|>{code}"]


THINKS, NEXT, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
CALLED = " to=functions.f<|channel|>commentary json<|message|>"


@pytest.mark.parametrize(
    ("text", "thoughts", "parts"),
    [
        (f"{THINKS}hm{NEXT}{FINAL}yes", "hm", ["yes"]),
        (f"{THINKS}hm{NEXT}{THINKS}so{NEXT}{FINAL}yes<|return|>", "hm\nso", ["yes"]),
        (f'{THINKS}hm{NEXT}{CALLED}{{"s": 1}}', "hm", [("f", '{"s": 1}')]),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": 1}<|call|>', "", [("f", '{"s": 1}')]),
        (f"<|channel|>commentary<|message|>first{NEXT}{CALLED}{{}}<|call|>", "", ["first", ("f", "{}")]),
        (f"{CALLED}{{}}{NEXT}{CALLED}{{}}", "", [("f", "{}"), ("f", "{}")]),
        ("plain words", "", ["plain words"]),
        (f"{FINAL}a <|channel|> b", "", ["a <|channel|> b"]),
        (f'{CALLED}{{"s": ', "", [f'{CALLED}{{"s": ']),
        (f"{CALLED}no", "", [f"{CALLED}no"]),
        (f"{THINKS}hm<|end|><|start|>assis", "hm", []),
        (f"{THINKS}hm{NEXT}<|channel|>fin", "hm", []),
        ("<|start|>user what", "", ["<|start|>user what"]),
        ("", "", []),
    ],
)
def test_harmony_is_read_by_its_channels(text, thoughts, parts):
    assert harmony(text) == (thoughts, parts)


def test_harmony_without_thoughts_or_calls_is_text():
    text = f"{THINKS}hm{NEXT}{CALLED}{{}}"
    assert harmony(text, thinks=False) == ("", ["hm", ("f", "{}")])
    assert harmony(text, calls=False) == ("hm", [f"<|start|>assistant{CALLED}{{}}"])
    assert harmony(f"go on{NEXT}{FINAL}x", opened="final") == ("", ["go onx"])
    assert harmony(f"hm{NEXT}{FINAL}x", opened="analysis") == ("hm", ["x"])


LIMITED = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "enum": ["Bern", "Oslo"]},
        "t": {"type": "string", "pattern": "^[ab]{1,3}$"},
        "n": {"$ref": "#/$defs/few"},
        "b": {"type": ["boolean", "null"]},
        "o": {
            "type": "object",
            "properties": {"k": {"$ref": "#/properties/n"}},
            "required": ["k"],
            "additionalProperties": False,
        },
    },
    "required": ["s", "o"],
    "additionalProperties": False,
    "$defs": {"few": {"enum": [1, 22]}},
}
FORCED = [
    {"type": "function", "function": {"name": "f", "parameters": LIMITED}},
    {"type": "function", "function": {"name": "g-2"}},
]


def fits(arguments: dict[str, Any]) -> bool:
    return (
        {"s", "o"} <= set(arguments) <= set(LIMITED["properties"])  # type: ignore[arg-type]
        and arguments["s"] in ("Bern", "Oslo")
        and arguments.get("t", "a").strip("ab") == ""
        and arguments.get("n", 1) in (1, 22)
        and arguments.get("b") in (True, False, None)
        and arguments["o"] in ({"k": 1}, {"k": 22})
    )


def walk(grammar: Grammar, compiler: Compiler, end: int, draw: random.Random) -> list[int]:
    """An answer of a model that knows nothing."""
    matcher, answer = grammar.begin(), []
    while True:
        allowed = matcher.allowed(answer).nonzero().flatten().tolist()
        token = end if end in allowed and draw.random() < 0.5 else draw.choice(allowed)
        if token == end:
            return answer
        answer.append(token)
        assert len(answer) < 3000


@pytest.mark.parametrize("tokens", ["text", "marks"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_answer_of_a_random_model_is_calls(name, tokens):
    """With marks that are single tokens, as models of the family have them, and with marks that are text."""
    format = FORMATS[name]
    hf = byte_level(marks=format.marks if tokens == "marks" else ())
    end = hf.convert_tokens_to_ids("</s>")
    compiler, words, draw = Compiler(hf, len(hf), [end]), Words(hf), random.Random(name)
    functions, met = [tool["function"] for tool in FORCED], set()
    for number in range(40):
        if number >= 8 and len(met) == 2:  # which one is drawn depends on the grammar's version
            break
        most = None if number % 2 else 1
        source = format.grammar(functions, most, words)
        if name == "harmony" and number > 3 and tokens == "marks":  # text would have to end thoughts letter by letter
            source = channel_grammar(source, words, opened=False, calls=True)
        answer = walk(Grammar(source, "calls", compiler), compiler, end, draw)
        if tokens == "marks":
            spelt = {mark for mark in format.marks if mark in hf.decode(answer)}
            assert {hf.convert_tokens_to_ids(mark) for mark in spelt} <= {*answer}
        text = hf.decode(answer)
        if name == "harmony":
            reader = Reader(HarmonyReader())
        else:
            reader = Reader(_Parts(format.reader(FORCED)))
        delta = reader.whole(text)
        calls = values(joined(delta.parts))
        assert calls, text
        assert all(isinstance(one, tuple) for one in calls), (text, calls)
        assert most is None or len(calls) == 1
        for function, arguments in calls:
            met.add(function)
            assert function in ("f", "g-2")
            assert fits(arguments) if function == "f" else arguments == {}, text
    assert met == {"f", "g-2"}


class _Parts:
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def feed(self, text: str, final: bool = False) -> tuple[str, list[Any]]:
        return "", self._reader.feed(text, final)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_may_be_forced(name):
    """A grammar lets a model write what its template shows of the same calls."""
    tools = [{"type": "function", "function": {**TOOLS[0]["function"]}}]
    hf = byte_level(TEMPLATES[name])
    end = hf.convert_tokens_to_ids("</s>")
    source = FORMATS[name].grammar([tools[0]["function"]], None, Words(hf))
    grammar = Grammar(source, "calls", Compiler(hf, len(hf), [end]))
    for arguments in ({"s": "x y", "n": 5, "b": True}, {"l": [1, 2]}, {}):
        tokens = hf.encode(rendered(name, [("f", arguments)], hf=hf), add_special_tokens=False)
        matcher = grammar.begin()
        for at, token in enumerate([*tokens, end]):
            assert matcher.allowed(tokens[:at])[token], (hf.decode(tokens[:at]), hf.decode([token]))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "seed_oss"])
def test_thoughts_before_a_grammar_end_with_their_token(name, special):
    """As models write it that have one: to llguidance it is no text, whether it is called special or not."""
    format = reasoning.FORMATS[name]
    hf = byte_level(marks=format.marks, special=format.marks if special else ())
    begin, end, stop = (hf.convert_tokens_to_ids(text) for text in (*format.marks, "</s>"))
    letters = hf.encode("hm", add_special_tokens=False)
    for opened in (True, False):
        source = format.before('start: "ok"', Words(hf), opened, calls=False)
        matcher = Grammar(source, "answer", Compiler(hf, len(hf), [stop])).begin()
        answer = [*([] if opened else [begin]), *letters, end, *hf.encode("ok", add_special_tokens=False), stop]
        for at, token in enumerate(answer):
            assert matcher.allowed(answer[:at])[token], at


def test_marks_that_are_special_tokens_are_shown():
    words = Words(byte_level(marks=("<tool_call>",), special=("[TOOL_CALLS]",)))
    assert words.hidden(("[TOOL_CALLS]", "x"))
    assert not words.hidden(("<tool_call>", "x"))
    assert not Words(None).hidden(("x",))
    assert Words(byte_tokenizer())("a<b>", ("<b>",)) == '"a<b>"'


QWEN = Path(__file__).parents[1] / "build" / "real" / "qwen2.5-coder" / "chat_template.jinja"


@pytest.mark.real
@pytest.mark.skipif(not QWEN.is_file(), reason="no pretrained model")
def test_qwens_own_template():
    template = QWEN.read_text()
    assert format_of(template) is FORMATS["hermes"]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    call = {"type": "function", "function": {"name": "f", "arguments": ONE}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so", "tool_calls": [call, call]}]
    text = environment.from_string(template).render(messages=messages, tools=TOOLS)
    answer = text.split("<|im_start|>assistant\n")[-1].removesuffix("<|im_end|>\n")
    found = read_however_it_comes("hermes", answer)
    assert [found[0], *values([one for one in found if isinstance(one, tuple)])] == ["so\n", ("f", ONE), ("f", ONE)]


def test_harmonys_marks_are_those_of_its_own_library():
    """openai-harmony reads what a forced answer may be; its vocabulary must be there (TIKTOKEN_ENCODINGS_BASE)."""
    library = pytest.importorskip("openai_harmony")
    try:
        encoding = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
    except library.HarmonyError as error:
        pytest.skip(f"no vocabulary: {error}")
    for text, channel in ((f"{THINKS}hm{NEXT}{FINAL}yes", "final"), (f'{THINKS}hm{NEXT}{CALLED}{{"s": 1}}', None)):
        tokens = encoding.encode(text, allowed_special="all")
        assert encoding.decode(tokens) == text
        read = encoding.parse_messages_from_completion_tokens(tokens, library.Role.ASSISTANT)
        thoughts, parts = harmony(text)
        assert read[0].content[0].text == thoughts
        if channel:
            assert (read[1].channel, [read[1].content[0].text]) == (channel, parts)
        else:
            assert (read[1].recipient, read[1].content[0].text) == ("functions.f", parts[0][1])
    assert all(len(encoding.encode(mark, allowed_special="all")) == 1 for mark in MARKS)
