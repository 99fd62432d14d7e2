"""Methods over their thresholds, from the sparse end to the dense one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from saccade.errors import SaccadeError
from saccade.methods import Method, parse_method
from saccade.methods.outside import load_outside
from saccade.methods.registry import METHODS

PREFILL = (
    "sampled_rows(gamma=0.75, threshold=0.05|0.02|0.01|0.005|0.003|0.002|0.001|0.0005|0.0004|0.0002)",
    "sampled_rows(threshold=1, gamma=0.8|0.9|0.95|0.98)",
    "xattention(threshold=0.5|0.7|0.8|0.9|0.95|0.98)",
    "flexprefill(lines=token, gamma=0.8|0.9|0.95|0.98|0.995)",
    "flexprefill(lines=block, gamma=0.8|0.9|0.95|0.98|0.995)",
    "flashprefill(alpha=0.3|0.08|0.03|0.01|0.003)",
    "flashprefill(unit=kv_head, alpha=0.3|0.08|0.03|0.01|0.003)",
    "minference(vertical=250|500|1000|1000|2000, slash=350|700|1500|6096|6096)",
    "minference(pattern=block_sparse, blocks=25|50|100|200)",
    "loopserve(lines=token, alpha=0.9|0.95|0.98|0.995)",
    "loopserve(lines=block, alpha=0.7|0.8|0.9|0.95|0.98|0.995)",
    "a_shape(window=1024|3968|8192)",
    "tri_shape(window=1024|3968|8192)",
)
DECODE = (
    "topk(k=0.005|0.02|0.05|0.1|0.2)",
    "topp(p=0.8|0.9|0.95|0.98)",
    "quest(dense_layers=0, budget=512|1024|2048|4096|8192)",
    "arkvale(budget=512|1024|2048|4096|8192)",
    "twilight(dense_layers=0, p=0.5|0.8|0.9|0.95|0.98)",
    "psa(epsilon=0.5|0.7|0.9|0.95|0.98)",
    "lfps(unit=kv_head, k=0.01|0.02|0.05|0.1)",
    "cis(unit=kv_head, k=0.01|0.02|0.05|0.1)",
    "loopserve(budget=512|1024|2048|4096|8192)",
    "vattention(epsilon=0.2|0.1|0.05|0.02)",
    "rocketkv(budget=256|512|1024|2048|8192)",
    "streaming(window=1024|4096|8192)",
)
_VALUES = re.compile(r"(?<==)([^,()]*\|[^,()]*)")


@dataclass(frozen=True)
class Ladder:
    """``text``: what its methods have in common, for tables; ``steps``: the methods, each with its policy text."""

    text: str
    steps: tuple[tuple[str, Method], ...]


def ladder(text: str, phase: str) -> Ladder:
    """``text``, whose options may have several values with | between: ``xattention(threshold=0.8|0.9)``. Options with
    several values take them side by side. SaccadeError for options with unlike numbers of values, and for a method that
    does not choose in ``phase``."""
    options = [part.split("|") for part in _VALUES.findall(text)]
    counts = {len(values) for values in options}
    if len(counts) > 1:
        raise SaccadeError(f"methods: '{text}' has options of {sorted(counts)} values; give each as many")
    steps = []
    for at in range(counts.pop() if counts else 1):
        one = _VALUES.sub(lambda found: found[1].split("|")[at].strip(), text)  # noqa: B023
        method = parse_method(one)
        if phase not in method.phases:
            raise SaccadeError(f"method '{method.name}' does not select in {phase}, only in {', '.join(method.phases)}")
        if method.calibration is not None:
            raise SaccadeError(
                f"method '{method.text}' needs a model's calibration, which these inputs have none of; give it options "
                "that do without, as minference(pattern=vertical_slash) does"
            )
        steps.append((method.text, method))
    return Ladder(_common(text), tuple(steps))


def declared() -> Iterator[str]:
    """The ladders of decode methods from outside the package that say theirs (``measured``)."""
    load_outside()
    for method in METHODS.values():
        if method.measured is not None and method.measured.ladder is not None:
            yield method.measured.ladder


def _common(text: str) -> str:
    """``text`` without the options that have several values, unless nothing else tells it from another ladder."""
    name, bracket, rest = text.partition("(")
    options = [part.strip() for part in rest.removesuffix(")").split(",") if bracket and "|" not in part]
    return f"{name}({', '.join(options)})" if options else name


def ladders(names: list[str] | None, phase: str) -> list[Ladder]:
    """What to measure in ``phase``: for a method's bare name its own ladders, any other text as it is, all that there
    are by default."""
    known = PREFILL if phase == "prefill" else (*DECODE, *declared())
    return [ladder(text, phase) for text in (known if names is None else _named(names, known))]


def _named(names: list[str], known: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        own = [text for text in known if text.partition("(")[0] == name] if name in METHODS else []
        yield from own or [name]
