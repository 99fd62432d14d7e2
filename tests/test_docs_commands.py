"""Commands that the documents print: subcommands and options exist, policies parse, scripts are there."""

from __future__ import annotations

import itertools
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from saccade.cli import main
from saccade.methods.policy import Policy

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
POLICIES = {"-p", "--policy"}
POLICY_COMMANDS = {"generate", "chat", "serve", "inspect", "demo", "run", "predict"}


def commands(text: str) -> list[str]:
    """Commands that begin with ``saccade``, of code blocks and spans; what a backslash or quote continues is joined."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines: list[str] = []
    for line in "\n".join(re.sub(r"\\\n\s*", " ", block) for block in blocks).splitlines():
        if lines and open_quote(lines[-1]):
            lines[-1] += line
        else:
            lines.append(line)
    spans = [re.sub(r"\s+", " ", span) for span in SPAN.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))]
    found = [line.rpartition(" | ")[2].strip() for line in [*lines, *spans]]
    return [line for line in found if re.match(r"(\.venv/bin/)?saccade [a-z]", line) and "..." not in line]


def open_quote(line: str) -> bool:
    if not line.startswith("saccade "):
        return False
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


@cache
def root() -> Any:
    main._mount_bench()
    return typer.main.get_command(main.app)


def check(line: str) -> None:
    """Parse a command as far as its options, without running it."""
    words = shlex.split(line, comments=True)[1:]
    command, context = root(), None
    while hasattr(command, "commands"):
        context = type(command).context_class(command, parent=context, info_name=command.name)
        if not words:
            return  # the name of a group: `saccade eval`
        assert words[0] in command.commands, f"no command {words[0]!r}: {line}"
        command = command.commands[words.pop(0)]
    context = type(command).context_class(command, parent=context, info_name=command.name)
    try:
        command.make_parser(context).parse_args(list(words))
    except Exception as error:
        raise AssertionError(f"{error}: {line}") from None
    if command.name in POLICY_COMMANDS:
        for option, value in itertools.pairwise(words):
            if option in POLICIES:
                Policy.parse(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_parse(page: Path) -> None:
    for line in commands(page.read_text(encoding="utf-8")):
        check(line)


def test_scripts_that_pages_run_exist() -> None:
    for page in PAGES:
        for script in re.findall(
            r"python (?:-m )?((?:benchmarks|tests|tools)/[\w/]+\.py)", page.read_text(encoding="utf-8")
        ):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_a_wrong_command_is_found() -> None:
    text = "```\nsaccade eval board --quick \\\n  --threads 1   # slow\n```\n"
    text += "and `saccade generate --polcy psa x`, `saccade evil x`\n"
    good, misspelt, unknown = commands(text)
    check(good)
    for line in (misspelt, unknown, "saccade generate x --policy 'psa(epsilon=)'"):
        with pytest.raises(Exception):  # noqa: B017  (an assertion, or what a policy raises)
            check(line)
