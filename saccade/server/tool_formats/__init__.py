"""Formats of calls of tools, one class each: how they are read, forced, and known by a chat template."""

from __future__ import annotations

from saccade.server.tool_formats.base import ToolFormat
from saccade.server.tool_formats.harmony import Harmony
from saccade.server.tool_formats.json_formats import (
    DeepSeek3,
    DeepSeek31,
    Granite,
    Hermes,
    JsonList,
    KimiK2,
    Mistral,
    MistralArgs,
)
from saccade.server.tool_formats.llama import Llama3Json, Llama4Json
from saccade.server.tool_formats.pythonic import Lfm2, Llama4Pythonic, Pythonic
from saccade.server.tool_formats.tag_formats import DeepSeek4, DeepSeek32, Glm45, Glm47, Qwen3Coder, SeedOss

# Where several fit a template, the first one is meant.
_KINDS: tuple[type[ToolFormat], ...] = (
    Harmony, MistralArgs, Mistral, KimiK2, DeepSeek32, DeepSeek4, DeepSeek3, DeepSeek31, SeedOss, Glm47, Glm45,
    Qwen3Coder, Lfm2, Granite, Hermes,
    Llama4Pythonic, Pythonic, Llama4Json, Llama3Json, JsonList,
)  # fmt: skip
FORMATS: dict[str, ToolFormat] = {kind.name: kind() for kind in _KINDS}
# How calls are forced where nothing is known of a model's own format.
UNKNOWN = FORMATS[JsonList.name]


def format_of(template: str) -> ToolFormat | None:
    """The format in which a chat template shows calls; None where it is none of these, or knows no tools."""
    if "tools" not in template:
        return None
    return next((format for format in FORMATS.values() if format.fits(template)), None)
