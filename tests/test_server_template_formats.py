"""Formats of calls and thoughts, chosen by chat templates in the manner of well-known families."""

from __future__ import annotations

import pytest
from chat_templates import TEMPLATES

from saccade.server import reasoning
from saccade.server.settings import chosen
from saccade.server.tool_formats import FORMATS, format_of

# As their models' cards have them, cut to what tells of tools and thoughts.
CODER = (
    "{% if tools %}<tools>...</tools><tool_call>\n<function=example>\n<parameter=one>\n1\n</parameter></function>"
    "</tool_call>{% endif %}"
)
LLAMA = (
    '<|start_header_id|>{%- if tools is not none %}Respond in the format {"name": function name, "parameters": ...}'
    "{{ '\"parameters\": ' }}{% endif %}"
)
GLM = (
    "{% if tools %}<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>{{ arguments }}</tool_call>{% endif %}<think></think>"
)
GRANITE = (
    "{% if thinking %}Here is my thought process: ... Here is my response:{% endif %}"
    "{% if tools %}<|tool_call|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "calls", "thoughts"),
    [
        ("", None, None),
        (TEMPLATES["chatml"], None, None),
        (TEMPLATES["qwen3"], "hermes", "qwen3"),
        (TEMPLATES["llama3"], None, None),
        (TEMPLATES["mistral"], None, None),
        (TEMPLATES["deepseek"], None, "deepseek_r1"),
        (CODER, "qwen3_coder", None),
        (LLAMA, "llama3_json", None),
        (GLM, "glm45", "qwen3"),
        (GRANITE, "granite", "granite"),
    ],
)
def test_what_a_template_writes_decides(template, calls, thoughts):
    assert format_of(template) is (None if calls is None else FORMATS[calls])
    assert reasoning.format_of(template) == thoughts
    assert {thoughts, None} <= {*reasoning.FORMATS, None}


def test_who_names_one_has_it():
    assert [chosen(parser, "hermes") for parser in ("auto", "none", None, "qwen3_coder")] == [
        "hermes",
        None,
        None,
        "qwen3_coder",
    ]
