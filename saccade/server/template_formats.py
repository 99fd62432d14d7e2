"""In which formats a model writes calls of tools and thoughts, as its chat template shows them."""

from __future__ import annotations

AUTO = "auto"  # the parser that is chosen so
NONE = "none"  # no parser


def tool_parser_of(template: str) -> str | None:
    """One of ``tools.FORMATS`` whose marks the template writes; None where it is none of them, or knows no tools."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "arguments" in template and "<arg_key>" not in template:
        return "hermes"
    if '"parameters"' in template and "<|start_header_id|>" in template and "<|python_start|>" not in template:
        return "llama3_json"
    return None


def reasoning_parser_of(template: str) -> str | None:
    """One of ``reasoning.FORMATS``; None where the template tells of no thoughts."""
    if "Here is my thought process" in template:
        return "granite"
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def chosen(parser: str | None, of_template: str | None) -> str | None:
    """The parser that was named, or the template's where none was; None for none."""
    return of_template if parser == AUTO else None if parser == NONE else parser
