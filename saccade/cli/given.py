"""Options from a file and from the environment: as if they stood on the command line, before those that do.

``--config FILE`` names a YAML file of a command's options, ``kv-memory: 8GiB`` or ``kv_memory: 8GiB``;
``SACCADE_KV_MEMORY`` is the same in the environment. The command line goes before the file, and the file before the
environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from saccade.errors import RequestError, shown

FLAG = "--config"
PREFIX = "SACCADE_"
_LINK = re.compile(r"(tcp|udp|sctp)://")  # SACCADE_PORT as Kubernetes sets it for a Service named saccade
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def wanted(args: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether there may be any: who looks at a command's options has it built twice."""
    return any(one.partition("=")[0] == FLAG for one in args) or any(name.startswith(PREFIX) for name in environment)


def expanded(args: Sequence[str], group: Any, environment: Mapping[str, str]) -> list[str]:
    """``args`` of the commands of ``group`` with what a file and the environment give. RequestError, naming it, for a
    file that cannot be read, and for an option that the command does not have."""
    command, before, rest = group, list[str](), list(args)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest[0]]
        before.append(rest.pop(0))
    if hasattr(command, "commands"):
        return list(args)
    rest, file = _without_file(rest)
    known = {opt.removeprefix("--"): one for one in command.params for opt in one.opts if opt.startswith("--")}
    made: dict[str, list[str]] = {}  # what the file says goes in the place of what the environment does
    for name, one in known.items():
        text = environment.get(PREFIX + name.upper().replace("-", "_"))
        if text is not None and not (name == "port" and _LINK.match(text)):
            made[name] = _as_text(name, one, text, PREFIX + name.upper().replace("-", "_"))
    for key, value in {} if file is None else _read(file):
        name = str(key).replace("_", "-")
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(
                f"{file}: '{key}' is no option of saccade {' '.join(before)}{meant} (see: saccade {' '.join(before)} "
                "--help)"
            )
        if value is not None:
            made[name] = _as_written(name, known[name], value, str(file))
    kept = [one for name, ones in made.items() if not _replaced(known[name], rest) for one in ones]
    return [*before, *kept, *rest]


def _replaced(option: Any, args: Sequence[str]) -> bool:
    """Whether the command line has an option that may be given several times: what it says there is all."""
    before = list(takewhile(lambda one: one != "--", args))
    short = tuple(one for one in option.opts if not one.startswith("--"))
    return option.multiple and any(
        one.partition("=")[0] in option.opts or (bool(short) and one.startswith(short) and not one.startswith("--"))
        for one in before
    )


def _without_file(args: list[str]) -> tuple[list[str], Path | None]:
    rest: list[str] = []
    file: Path | None = None
    left = iter(args)
    for one in left:
        if one == "--":
            return [*rest, one, *left], file
        name, equals, text = one.partition("=")
        if name != FLAG:
            rest.append(one)
            continue
        text = text if equals else next(left, "")
        if not text:
            raise RequestError(f"{FLAG} needs a YAML file of options")
        file = Path(text).expanduser()
    return rest, file


def _read(file: Path) -> Any:
    import yaml

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{FLAG} {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{FLAG} {file} is not YAML: {error}") from error
    if data is None:
        return ()
    if not isinstance(data, dict):
        raise RequestError(
            f"{FLAG} {file} must be options and values, as in 'kv-memory: 8GiB'; it is {shown(data, 80)}"
        )
    return data.items()


def _as_written(name: str, option: Any, value: Any, where: str) -> list[str]:
    """A value of YAML, not null, as arguments."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise RequestError(f"{where}: {name}={shown(value)} must be true or false")
        return _flag(name, option, value)
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, (dict, list)) or one is None for one in values):
        raise RequestError(f"{where}: {name}={shown(value)} must be a number, a text, or a list of such")
    texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
    if option.nargs > 1:
        return [f"--{name}", *texts]
    if len(texts) != 1 and not option.multiple:
        raise RequestError(f"{where}: {name}={shown(value)} must be one value")
    return [f"--{name}={text}" for text in texts]


def _as_text(name: str, option: Any, text: str, where: str) -> list[str]:
    """A value of the environment as arguments; of an option that may be given several times, words are several."""
    if option.is_flag:
        if text.lower() not in (*_YES, *_NO):
            raise RequestError(f"{where}={shown(text)} must be one of {', '.join((*_YES, *_NO[:-1]))}")
        return _flag(name, option, text.lower() in _YES)
    if option.nargs > 1:
        return [f"--{name}", *text.split()]
    return [f"--{name}={one}" for one in (text.split() if option.multiple else [text])]


def _flag(name: str, option: Any, value: bool) -> list[str]:
    if value:
        return [f"--{name}"]
    return [option.secondary_opts[0]] if option.secondary_opts else []
