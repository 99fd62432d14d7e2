"""Where samples come from: task generators by name, ``source:task``; names without a source are the suite's.

A source is a few lines: which tasks it has and a function from (task, length, index, seed) to a Sample that depends on
nothing else, so that a prefix of a longer run is the shorter run.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.errors import RequestError
from saccade.eval.haystack import file_of
from saccade.eval.samples import Sample

if TYPE_CHECKING:
    from saccade.eval.lengths import Lengths

CountTokens = Callable[[str], int]
Make = Callable[[str, int, int, int], Sample]


@dataclass(frozen=True)
class Source:
    """``make(task, length, index, seed)``: length in tokens; ``tasks`` without the source's name."""

    name: str
    version: str
    tasks: tuple[str, ...]
    make: Make


@dataclass(frozen=True)
class Given:
    """What the user brings for sources that need it. ``codec``: the model's tokenizer, fetched when it is called;
    ``longbench``: the folder of LongBench's files, ``allow_unknown``: whether others than the known ones will do;
    ``haystack`` and ``corpus``: as ``saccade.eval.ruler.make``; ``infinitebench``: as ``longbench``."""

    count_tokens: CountTokens | None = None
    codec: Callable[[], Any] | None = None
    longbench: Path | None = None
    haystack: str = "prose"
    corpus: Path | None = None
    allow_unknown: bool = False
    infinitebench: Path | None = None

    def fitted_to(self) -> dict[str, str | None]:
        """What samples of FITTED sources depend on beside their key, as plain data."""
        from saccade.eval.results import file_hash, tokenizer_hash

        path = file_of(self.haystack)
        return {
            "tokenizer": None if self.codec is None else tokenizer_hash(self.codec().hf),
            "haystack": self.haystack if path is None or not path.is_file() else file_hash(path),
            "corpus": None if self.corpus is None or not self.corpus.is_file() else file_hash(self.corpus),
        }


Loader = Callable[[Given], Source]


@dataclass(frozen=True)
class Task:
    """One task of one source. ``name`` is unique over all sources."""

    name: str
    task: str
    source: Source

    def sample(self, length: int, index: int, seed: int) -> Sample:
        made = self.source.make(self.task, length, index, seed)
        return replace(made, task=self.name, length=length, index=index, seed=seed)


def _suite(given: Given) -> Source:
    from saccade.eval import suite

    return Source("suite", suite.VERSION, tuple(suite.TASKS), suite.make)


def _facts(given: Given) -> Source:
    from saccade.eval import fact_tasks

    return Source("facts", fact_tasks.VERSION, tuple(fact_tasks.TASKS), fact_tasks.make)


def _ruler(given: Given) -> Source:
    from saccade.eval import ruler

    own = ruler.DATA_TASKS if given.haystack != "prose" or given.corpus is not None else ()
    lengths = _lengths(given, "RULER's tasks")
    make = partial(ruler.make, lengths=lengths, haystack=given.haystack, data=given.corpus)
    return Source("ruler", ruler.VERSION, (*ruler.TASKS, *own), make)


def _natural(given: Given) -> Source:
    from saccade.eval import natural

    make = partial(natural.make, lengths=_lengths(given, "natural tasks"), haystack=given.haystack)
    return Source("natural", natural.VERSION, tuple(natural.TASKS), make)


def _lengths(given: Given, what: str) -> Lengths:
    """How samples are measured: as the model reads them."""
    from saccade.eval.lengths import Lengths

    if given.count_tokens is None:
        raise RequestError(f"{what} fit a length to a tokenizer; name its model with --model")
    return Lengths(given.count_tokens, None if given.codec is None else given.codec())


def _long(given: Given) -> Source:
    from saccade.eval import longgen

    make = partial(longgen.make, lengths=_lengths(given, "tasks of long generation"), haystack=given.haystack)
    return Source("long", longgen.VERSION, tuple(longgen.TASKS), make)


def _longbench(given: Given) -> Source:
    from saccade.eval import file_sources

    return file_sources.longbench(given)


def _infinitebench(given: Given) -> Source:
    from saccade.eval import file_sources

    return file_sources.infinitebench(given)


def _infinite_prose(given: Given) -> Source:
    from saccade.eval import infinite_prose

    make = partial(infinite_prose.make, lengths=_lengths(given, "tasks over prose"), haystack=given.haystack)
    return Source("ibsyn", infinite_prose.VERSION, tuple(infinite_prose.TASKS), make)


def _multi_turn(given: Given) -> Source:
    from saccade.eval import file_sources

    return file_sources.multi_turn(given)


SOURCES: dict[str, Loader] = {
    "suite": _suite,
    "facts": _facts,
    "natural": _natural,
    "ruler": _ruler,
    "long": _long,
    "longbench": _longbench,
    "infinitebench": _infinitebench,
    "ibsyn": _infinite_prose,
    "mtlb": _multi_turn,
}
DEFAULT = "suite"
FITTED = ("natural", "ruler", "long", "mtlb", "ibsyn")  # what samples are depends on the tokenizer and the haystack


def is_fitted(names: Iterable[str]) -> bool:
    """Whether one of the tasks is of a source whose samples are fitted to a tokenizer."""
    return any(name.partition(":")[0] in FITTED for name in names if ":" in name)


def family(name: str) -> str:
    """What a task has in common with others: its source; of the natural tasks ``facts``, ``questions`` or ``turns``."""
    source, colon, task = name.partition(":")
    if not colon:
        return "suite"
    return task.partition("_")[0] if source == "natural" else source


def find_tasks(
    names: Sequence[str],
    given: Given | CountTokens | None = None,
    sources: Mapping[str, Loader] | None = None,
) -> list[Task]:
    """Tasks by name: ``single`` (the suite's), ``source:task``, or ``source:all``; in the order given, without repeats.

    ``given``: what some sources need (a function counts the tokens of a text). Raises RequestError naming an unknown
    source or task with the known ones.
    """
    known = SOURCES if sources is None else sources
    brought = given if isinstance(given, Given) else Given(given)
    opened: dict[str, Source] = {}
    found: dict[str, Task] = {}
    for name in names:
        prefix, colon, task = name.partition(":")
        if not colon:
            prefix, task = DEFAULT, name
        if prefix not in known:
            raise RequestError(f"unknown task source '{prefix}' in '{name}'; known: {', '.join(sorted(known))}")
        if prefix not in opened:
            opened[prefix] = known[prefix](brought)
        source = opened[prefix]
        if task != "all" and task not in source.tasks:
            close = difflib.get_close_matches(task, source.tasks, 1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise RequestError(f"unknown task '{task}' of '{prefix}'{hint}; known: {', '.join(source.tasks)}, all")
        for one in source.tasks if task == "all" else (task,):
            full = one if prefix == DEFAULT else f"{prefix}:{one}"
            found.setdefault(full, Task(full, one, source))
    return list(found.values())
