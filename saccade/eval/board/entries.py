"""What stands on the board: for each method a policy with one number left open, its dial, which is turned until the
method reads as many keys as the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import exp, log

from saccade.methods.base import Method, PolicyPart
from saccade.methods.outside import load_outside
from saccade.methods.policy import Policy
from saccade.methods.registry import KNOWN

PARTNER = "flexprefill"  # prefills for decode methods under protocol D
ORACLE = "topk(k={share})"  # decodes for prefill methods, so that what is lost is theirs

KINDS = {
    "method": "",
    "oracle": "knows every exact score: what a budget can do at best, no method to use",
    "baseline": "chooses by place or by chance",
    "lossless": "answers as dense attention does",
    "certified": "bounds its error and reads as many keys as the bound takes; scores every key first where bounds of "
    "blocks are too loose, which bytes count and keys do not",
    "default": "becomes dense attention or another policy by the length and by times of the machine that runs it",
    "window": "hides part of the context from deep layers, at its paper's setting",
}
# Registered, and not on the board.
EXCLUDED = {"dense": "what every row is compared with"}


@dataclass(frozen=True)
class Dial:
    """The settings of one option. ``values(length)``: their texts, sparsest first, for contexts of ``length`` tokens.
    ``guess(share, length)``: the setting that reads about ``share`` of the keys, None where nothing is known before a
    measurement. ``step``: logarithm of how much denser a setting is than the one before, where that is known."""

    values: Callable[[int], list[str]]
    guess: Callable[[float, int], float] | None = None
    step: float | None = None

    def first(self, share: float, length: int) -> int:
        """The number of the setting to measure first."""
        values = self.values(length)
        if self.guess is None:
            return len(values) // 2
        wanted = self.guess(share, length)
        return min(range(len(values)), key=lambda at: abs(float(values[at]) - wanted))


@dataclass(frozen=True)
class Entry:
    """``places``: phase or modifier -> method, with ``{value}`` for the dial's setting and ``{share}`` for the budget.
    Without a dial a row is the same at every budget.

    ``phase``: whose keys are matched. ``kind``: one of KINDS. ``summary``: bytes of a score against a block summary or
    a label over those of a key; None where that is not known. ``slow``: in the full grid alone."""

    name: str
    places: Mapping[str, str]
    dial: Dial | None = None
    phase: str = "decode"
    kind: str = "method"
    summary: float | None = 0.0
    slow: bool = False

    def __reduce__(self) -> tuple[Callable[[str], Entry], tuple[str]]:
        """By name: dials are functions, and workers know the same rows."""
        return entry_named, (self.name,)

    @property
    def methods(self) -> set[str]:
        """Registered names that this row is about."""
        about = [text for text in self.places.values() if text not in (ORACLE, PARTNER, "dense")]
        return {text.partition("(")[0] for text in about}

    def serves(self, protocol: str) -> bool:
        """B ranks what leaves prefill dense. Rows without a dial that do are run in B alone."""
        dense_prefill = self.places.keys() <= {"decode"}
        return dense_prefill if protocol == "B" else not (dense_prefill and self.dial is None)

    def policy(self, protocol: str, share: float, value: str | None) -> Policy:
        """The policy at a dial's ``value``; ``share``: the budget, for its partner. PolicyError as ``Policy.parse``."""
        texts = {place: text.format(value=value, share=f"{share:g}") for place, text in self.places.items()}
        if protocol == "D":
            texts = {"prefill": PARTNER, **texts}
        return Policy.parse(texts)


def _geometric(least: float, most: float, factor: float) -> list[float]:
    count = int(log(most / least) / log(factor))
    return [*(least * factor**at for at in range(count + 1)), most]


def _whole(least: int, factor: float, multiple: int, length: int) -> list[str]:
    rounded = (multiple * max(1, round(value / multiple)) for value in _geometric(least, max(length, least), factor))
    return [str(value) for value in dict.fromkeys(rounded)]


def _keys(least: int = 8, multiple: int = 1, forced: int = 0, factor: float = 1.06) -> Dial:
    """A number of keys; ``forced`` keys are read beside it. Another tokenizer may make more than ``length`` tokens."""
    return Dial(
        lambda length: _whole(least, factor, multiple, 4 * length), lambda share, n: share * n - forced, log(factor)
    )


def _falling(values: list[float]) -> Dial:
    """An option that reads less where it is larger."""
    return Dial(lambda length: [f"{value:.6g}" for value in sorted(values, reverse=True)])


_SIGMOIDS = [1 / (1 + exp(-at / 4)) for at in range(-24, 41)]  # 0.0025 .. 0.99995, dense at both ends
SHARE = Dial(
    lambda length: [f"{value:.4g}" for value in _geometric(0.002, 1.0, 1.06)], lambda share, n: share, log(1.06)
)
THRESHOLD = Dial(lambda length: [f"{value:.6g}" for value in _SIGMOIDS])


def _decode(name: str, text: str, dial: Dial | None, summary: float | None = 0.0, kind: str = "method") -> Entry:
    return Entry(name, {"decode": text}, dial, summary=summary, kind=kind)


def _prefill(name: str, text: str, dial: Dial, kind: str = "method", slow: bool = False) -> Entry:
    return Entry(name, {"prefill": text, "decode": ORACLE}, dial, "prefill", kind, 1.0, slow)


def declared(part: type[PolicyPart] | None) -> Entry | None:
    """The row that a method from outside the package declares (``measured``), None where it does not."""
    if part is None or not issubclass(part, Method) or (how := part.measured) is None:
        return None
    dial = SHARE
    if how.turned == "keys":
        dial = _keys(forced=how.forced)
    elif how.turned != "share":
        settings = list(how.turned)
        dial = Dial(lambda length: settings)
    return _decode(part.name, how.text, dial, how.summary)


def _offered() -> Iterator[Entry]:
    """The rows that installed packages' methods declare."""
    load_outside()
    for part in KNOWN.values():
        if (entry := declared(part)) is not None:
            yield entry


ENTRIES = (
    _decode("topk", "topk(k={value})", SHARE, kind="oracle"),
    _decode("topp", "topp(p={value})", THRESHOLD, kind="oracle"),
    _decode("streaming", "streaming(sinks=4, window={value})", _keys(forced=4), kind="baseline"),
    _decode("random", "random(k={value})", SHARE, kind="baseline"),
    _decode("psa", "psa(epsilon={value})", THRESHOLD, 0.25),
    _decode("psa, cuboids", "psa(rank=cuboid, epsilon={value})", THRESHOLD, 2.0),
    _decode(
        "psa, moments",
        "psa(block_size=16, microbatch=8, rank=moments, rest=estimate, epsilon={value})",
        THRESHOLD,
        2.0,
    ),
    _decode("lfps", "lfps(k={value}, least=1)", SHARE, 1.0),
    _decode("cis", "cis(k={value})", _keys(forced=80), 1.0),
    _decode("loopserve", "loopserve(budget={value}, first=1, n_d=4)", _keys(16)),
    _decode("quest", "quest(budget={value}, dense_layers=0)", _keys(32, 16), 2.0),
    _decode("twilight", "twilight(p={value}, base=0.5, dense_layers=0)", THRESHOLD, None),
    _decode("locks", "locks(budget={value})", _keys(32, 16), 3.5),
    _decode("arkvale", "arkvale(budget={value})", _keys(160, 32), 2.0),
    _decode("snapkv", "snapkv(capacity={value}, window=32)", _keys(40)),
    _decode("rocketkv", "rocketkv(budget={value})", _keys(8, 2)),
    _decode("adakv", "adakv(capacity={value}, window=32)", _keys(40)),
    *_offered(),
    _decode(
        "vattention",
        "vattention(epsilon={value}, sinks=16, local=64, heavy=0.01, base=0.01)",
        _falling(_geometric(0.01, 0.98, 1.12)),
        2.0,
    ),
    _decode("vattention, certified", "vattention(certify=true, epsilon=0.2, delta=0.1)", None, 2.0, "certified"),
    _decode("lossless", "lossless(draft=psa(epsilon=0.3, rank=cuboid), tokens=4)", None, 2.0, "lossless"),
    _prefill("flexprefill", "flexprefill(gamma={value}, min_budget=128)", THRESHOLD),
    _prefill("flexprefill, blocks", "flexprefill(gamma={value}, min_budget=128, lines=block)", THRESHOLD),
    _prefill("loopserve, prefill", "loopserve(alpha={value})", THRESHOLD),
    _prefill("minference", "minference(vertical={value}, slash={value})", _keys(32)),
    _prefill("xattention", "xattention(threshold={value})", THRESHOLD),
    _prefill("sampled_rows", "sampled_rows(gamma=0, threshold={value})", _falling(_geometric(0.0001, 1.0, 1.15))),
    _prefill("infllm", "infllm(sinks=16, window=32, budget={value}, block_size=32)", _keys(32, forced=48)),
    _prefill("flashprefill", "flashprefill(alpha={value})", _falling(_SIGMOIDS)),
    _prefill("a_shape", "a_shape(sinks=16, window={value})", _keys(forced=16), "baseline"),
    _prefill("tri_shape", "tri_shape(sinks=16, window={value}, last=64)", _keys(forced=16), "baseline"),
    _prefill("streaming, prefill", "streaming(sinks=4, window={value})", _keys(forced=4), "baseline"),
    _prefill("random, prefill", "random(k={value})", SHARE, "baseline", slow=True),
    _prefill("topk, prefill", "topk(k={value}, prefill=true)", SHARE, "oracle", slow=True),
    _prefill("topp, prefill", "topp(p={value}, prefill=true)", THRESHOLD, "oracle", slow=True),
    Entry("auto", {"prefill": "auto", "decode": "auto"}, None, kind="default"),
    Entry(
        "cpe",
        {"prefill": "dense", "decode": "cis(k={value})", "window": "psaw", "freeze": "etf"},
        _keys(forced=80),
        summary=1.0,
    ),
    Entry("psaw", {"prefill": "dense", "decode": "dense", "window": "psaw"}, None, "prefill", "window"),
    Entry("etf", {"prefill": "dense", "decode": "dense", "freeze": "etf"}, None, "prefill", "window"),
)


def entry_named(name: str) -> Entry:
    """The row of a name. KeyError for one that is not on the board."""
    own = {entry.name: entry for entry in ENTRIES}
    return own[name] if name in own else outside_row(name)


def outside_row(name: str) -> Entry:
    """The row of a decode method from outside the package: as it declares, or its option ``budget`` counts keys and is
    the dial. KeyError for any other name."""
    load_outside()
    part = KNOWN.get(name)
    if (entry := declared(part)) is not None:
        return entry
    if part is None or part.__module__.startswith("saccade.") or "decode" not in part.phases:
        raise KeyError(name)
    if not any(one.name == "budget" and isinstance(one.default, int) for one in fields(part)):
        raise KeyError(name)
    return _decode(name, f"{name}(budget={{value}})", _keys(128, 32), None)
