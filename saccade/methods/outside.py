"""Methods from outside the package: what a program registers, and what installed packages offer.

A package offers methods under the entry point ``saccade.methods``::

    [project.entry-points."saccade.methods"]
    mean_key = "my_package:MeanKey"

``SACCADE_METHODS_FROM`` names modules or ``.py`` files, separated by commas, whose methods are registered. Both are
looked up when a name is asked for that is not known yet, or when all names are listed, and so by every process: the
command line, the server's engine and each rank of several.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from saccade.errors import PolicyError, shown
from saccade.methods.base import FreezeMethod, Method, PolicyPart, WindowMethod
from saccade.methods.offline import KINDS, Calibration
from saccade.methods.registry import KNOWN, METHODS, MODIFIERS, PRESETS
from saccade.methods.scored import ScoredBlocks

logger = logging.getLogger(__name__)

GROUP = "saccade.methods"
VARIABLE = "SACCADE_METHODS_FROM"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")

Part = TypeVar("Part", bound=type[PolicyPart])
_lock = threading.RLock()
_looked = False
_broken: dict[str, str] = {}  # names of entry points, or of modules, that could not be loaded, and why
_offered: set[str] = set()  # names that every process finds: of entry points and of VARIABLE
_outside: dict[str, type[PolicyPart]] = {}


def register(part: Part) -> Part:
    """Make a method, a window or a freeze known by its ``name``, in this process: a class decorator.

    ``part``: a frozen dataclass over :class:`saccade.methods.Method` (or ``WindowMethod``, ``FreezeMethod``) whose
    fields, its options, have defaults. A class that is defined again, in a notebook say, replaces the one before.
    Raises PolicyError for a class that a policy could not be made of, and for a name that is taken.
    """
    where = f"{part.__module__}.{part.__qualname__}" if isinstance(part, type) else repr(part)
    if not (isinstance(part, type) and issubclass(part, (Method, WindowMethod, FreezeMethod))):
        raise PolicyError(f"{where} is no class over saccade.methods.Method; only such classes can be registered")
    if not (is_dataclass(part) and "__dataclass_params__" in vars(part) and vars(part)["__dataclass_params__"].frozen):
        raise PolicyError(f"{where} is no frozen dataclass; put @dataclass(frozen=True) on it, below @register")
    name = part.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PolicyError(f"{where}: name={shown(name)} must be at most 40 of a-z, 0-9 and _, a letter first")
    without = [one.name for one in fields(part) if one.default is MISSING]
    if without:
        raise PolicyError(f"{where}: option '{without[0]}' has no default; a policy '{name}' must say all")
    _check_phases(part, where)
    with _lock:
        before = KNOWN.get(name)
        if name in PRESETS or (before is not None and not _same(before, part)):
            taken = f"the policy {PRESETS[name]}" if before is None else f"{before.__module__}.{before.__qualname__}"
            raise PolicyError(f"{where}: the name '{name}' is taken by {taken}; choose another one")
        _check_calibrations(part, where)
        KINDS.update(part.calibrations)
        _outside[name] = KNOWN[name] = part
        if issubclass(part, Method):
            METHODS[name] = part
        else:
            MODIFIERS[name] = part
    return part


def load_outside() -> None:
    """Register what installed packages and ``SACCADE_METHODS_FROM`` offer; once in a process. What cannot be loaded is
    logged, and named by :func:`why_missing`: nothing else is lost by it."""
    global _looked
    with _lock:
        if _looked:
            return
        _looked = True
        before = set(_outside)
        for one in entry_points(group=GROUP):
            _try(one.name, partial(_take, one))
        for text in os.environ.get(VARIABLE, "").split(","):
            if text.strip():
                _try(text.strip(), partial(_import, text.strip()))
        _offered.update(set(_outside) - before)


def why_missing(name: str) -> str | None:
    """Why ``name`` may be unknown: what could not be loaded, if anything. None where all was."""
    if name in _broken:
        return f"its package offers it, but loading it failed: {_broken[name]}"
    failed = [f"{one} ({why})" for one, why in _broken.items()]
    return f"could not be loaded: {', '.join(failed)}" if failed else None


def in_this_process_alone(name: str) -> bool:
    """Whether other processes would not find the method: it was registered, and no entry point offers it."""
    load_outside()
    return name in _outside and name not in _offered


def _same(before: type[PolicyPart], part: type[PolicyPart]) -> bool:
    """Whether ``part`` is ``before``, defined again."""
    return before is part or (
        _outside.get(part.name) is before
        and (before.__module__, before.__qualname__) == (part.__module__, part.__qualname__)
    )


def _check_phases(part: type[PolicyPart], where: str) -> None:
    """PolicyError where ``part`` has no phase, leaves one to the base class, which reads everything, or is a
    ``ScoredBlocks`` without a score."""
    places = {Method: ("prefill", "decode"), WindowMethod: ("window",), FreezeMethod: ("freeze",)}
    allowed = next(phases for base, phases in places.items() if issubclass(part, base))
    if not isinstance(part.phases, tuple) or not part.phases or not set(part.phases) <= set(allowed):
        raise PolicyError(f"{where}: phases={shown(part.phases)} must be a tuple out of {', '.join(allowed)}")
    if not issubclass(part, Method) or part.is_dense or part.means_dense:
        return
    if issubclass(part, ScoredBlocks) and part.lacks_score():
        raise PolicyError(
            f"{where} is a ScoredBlocks without a score: write score(self, query, q, summary), which returns how much "
            "each full block is worth, or a select_decode of its own"
        )
    for phase in part.phases:
        if getattr(part, f"select_{phase}") is getattr(Method, f"select_{phase}"):
            raise PolicyError(
                f"{where} serves {phase} but has no select_{phase}: it would read everything; write it, or leave "
                f"{phase} out of phases"
            )


def _check_calibrations(part: type[PolicyPart], where: str) -> None:
    """PolicyError for a kind of calibration that is no :class:`Calibration`, or is another class's already."""
    for kind, made in part.calibrations.items():
        if not (isinstance(made, type) and issubclass(made, Calibration)):
            raise PolicyError(f"{where}: calibrations[{shown(kind)}] is no class over methods.offline.Calibration")
        known = KINDS.get(kind, made)
        if (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
            raise PolicyError(f"{where}: the calibration '{kind}' is taken by {known.__module__}.{known.__qualname__}")


def _take(entry: EntryPoint) -> None:
    """Register the class that an entry point names."""
    part = entry.load()
    own = getattr(part, "name", None)
    if own != entry.name:
        raise PolicyError(f"{entry.value} calls itself {shown(own)}, its entry point '{entry.name}'")
    register(part)


def _import(text: str) -> None:
    """Import a module by name, or a file by its path, and register the methods that are defined there."""
    if text.endswith(".py"):
        module = _module_of(Path(text).expanduser().resolve())
    else:
        module = importlib.import_module(text)
    for one in list(vars(module).values()):
        own = isinstance(one, type) and issubclass(one, PolicyPart) and one.__module__ == module.__name__
        if own and one.name and KNOWN.get(one.name) is not one:
            register(one)


def _module_of(path: Path) -> ModuleType:
    """What a file is as a module."""
    name = f"saccade_methods_from_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py"
    assert spec.loader is not None, "likewise"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


def _try(name: str, load: Callable[[], None]) -> None:
    """``load`` it; what goes wrong is noted under ``name``."""
    try:
        load()
    except Exception as error:  # a package may do anything
        _broken[name] = f"{type(error).__name__}: {error}"
        logger.warning("methods of '%s' could not be loaded: %s", name, _broken[name])
