"""How much of the board is run: the fixed grid, which rows of different models share, a quick one, and a full one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade.errors import RequestError
from saccade.eval.board.entries import ENTRIES, Entry, outside_row

PROTOCOLS = ("B", "D")
DRIFT = 96  # forced tokens where drift alone is wanted


@dataclass(frozen=True)
class Grid:
    """``budgets``: shares of the keys that dense attention reads; ``samples`` of each task and length; ``recall``:
    samples of each task whose attention is compared with the true one. ``dealt``: ``samples`` are of each family of
    tasks (runner.prepare). ``drift``: tokens that are forced to measure each setting's drift, by whose keys dials are
    turned; 0: none, and the first sample of each task turns them. ``answers``: whether samples are answered."""

    budgets: tuple[float, ...] = (0.05, 0.1, 0.25)
    lengths: tuple[int, ...] = (4096, 16384)
    protocols: tuple[str, ...] = PROTOCOLS
    samples: int = 4
    tasks: tuple[str, ...] = ("all",)
    recall: int = 1
    dealt: bool = False
    drift: int = 0
    answers: bool = True
    entries: tuple[Entry, ...] = tuple(entry for entry in ENTRIES if not entry.slow)

    def changed(
        self,
        budgets: Sequence[float] | None = None,
        lengths: Sequence[int] | None = None,
        protocols: Sequence[str] | None = None,
        samples: int | None = None,
        tasks: Sequence[str] | None = None,
        recall: int | None = None,
        methods: Sequence[str] | None = None,
        each: int | None = None,
        drift: int | None = None,
        answers: bool = True,
        keys: Sequence[int] | None = None,
        without: Sequence[str] | None = None,
    ) -> Grid:
        """The grid with what is given in the place of its own; ``keys``: budgets as numbers of keys, at one length.
        RequestError for a value that cannot be run."""
        if keys:
            budgets = _shares(keys, budgets, lengths or self.lengths)
        for budget in budgets or ():
            if not 0 < budget < 1:
                raise RequestError(f"budget={budget!r} must be above 0 and below 1: a share of the keys dense reads")
        for letter in protocols or ():
            if letter not in PROTOCOLS:
                raise RequestError(f"protocol={letter!r} is not on the board; known: {', '.join(PROTOCOLS)}")
        if samples is not None and samples < 1:
            raise RequestError(f"samples={samples!r} must be an integer >= 1")
        if recall is not None and recall < 0:
            raise RequestError(f"recall={recall!r} must be an integer >= 0")
        if each is not None and (each < 1 or samples is not None):
            why = "give it or samples" if samples is not None else "must be an integer >= 1"
            raise RequestError(f"each={each!r}: {why}, samples of each family of tasks")
        if drift is not None and (drift < 0 or (drift == 0 and not answers)):
            raise RequestError(f"drift={drift!r} must be an integer >= 1, forced tokens, where no sample is answered")
        return replace(
            self,
            budgets=tuple(sorted(set(budgets))) if budgets else self.budgets,
            lengths=tuple(sorted(set(lengths))) if lengths else self.lengths,
            protocols=tuple(sorted(set(protocols))) if protocols else self.protocols,
            samples=each or (self.samples if samples is None else samples),
            dealt=each is not None,
            drift=(self.drift if drift is None else drift) or (0 if answers else DRIFT),
            answers=answers,
            tasks=tuple(tasks) if tasks else self.tasks,
            recall=self.recall if recall is None else recall,
            entries=_left(named(methods) if methods else self.entries, without or ()),
        )


def _shares(keys: Sequence[int], budgets: Sequence[float] | None, lengths: Sequence[int]) -> list[float]:
    """Budgets of so many keys. RequestError beside budgets, for several lengths, or for more keys than there are."""
    if budgets or len(set(lengths)) != 1:
        raise RequestError(
            f"keys={', '.join(map(str, keys))}: give either budgets or keys, and one --length with these: they are "
            "another share at each"
        )
    for count in keys:
        if not 0 < count < lengths[0]:
            raise RequestError(f"keys={count!r} must be above 0 and below the length, {lengths[0]} tokens")
    return [count / lengths[0] for count in keys]


def _left(entries: tuple[Entry, ...], without: Sequence[str]) -> tuple[Entry, ...]:
    """Rows less those named ``without``. RequestError for a name that none of them has, or where none is left."""
    for name in without:
        if name not in {entry.name for entry in entries}:
            own = ", ".join(repr(entry.name) for entry in entries)
            raise RequestError(f"without={name!r} is no row of this board; its rows: {own}")
    left = tuple(entry for entry in entries if entry.name not in without)
    if not left:
        raise RequestError(f"without={', '.join(without)!r} leaves no row; name fewer")
    return left


def named(methods: Sequence[str]) -> tuple[Entry, ...]:
    """The rows of the methods named, in that order; a name is a row's, or a method's for all its rows but slow ones.
    RequestError for one that is not on the board."""
    known = {entry.name for entry in ENTRIES} | set().union(*(entry.methods for entry in ENTRIES))
    found: dict[str, Entry] = {}
    for name in methods:
        if name not in known:
            try:
                found[name] = outside_row(name)
            except KeyError:
                raise RequestError(
                    f"method '{name}' is not on the board; known: {', '.join(map(repr, sorted(known)))}, and decode "
                    "methods from outside the package that say how they are measured or have an option budget"
                ) from None
        for entry in ENTRIES:
            if entry.name == name or (name in entry.methods and not entry.slow):
                found.setdefault(entry.name, entry)
    return tuple(found.values())


FIXED = Grid()
QUICK = Grid((0.1, 0.25), (4096,), samples=1, tasks=("single", "multikey", "vt", "span_copy"))
FULL = Grid((0.02, 0.05, 0.1, 0.25, 0.5), (2048, 4096, 8192, 16384, 32768), samples=20, entries=ENTRIES)
