"""auto: the policy that a request gets once its length is known.

Whether reading less pays hangs on the length, the model and the machine; what may be left out hangs on the model. Both
are measured: once a model and machine, dense and what is offered run over a text at two lengths, and ``saccade tune``
finds what the user's checkpoint allows. An engine asks for that when it takes a request (:func:`settled`), so the
policy of a request is fixed from then on: batches, chunks and recomputations make no difference to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from saccade.errors import PolicyError, shown
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.dense import DenseMethod
from saccade.methods.options import require_whole
from saccade.selection import Selection
from saccade.selection.forms import MOST

if TYPE_CHECKING:
    from saccade.methods.policy import Policy

# By drift on SmolLM2 and Qwen2.5-Coder, and on Gemma 3, by which it was not chosen (docs/choosing.md).
SAFE = "sampled_rows(threshold=0.0005)+psa"
# Of methods that are no oracle the one that drifts least at equal keys, on both (docs/real-models.md),
# and the only one that lost nothing at 256 keys (docs/results/board-h200.md).
FEWEST = "lfps(k=0.05)"
LEAST = 1024  # tokens below which nothing is left out, and nothing is timed
SHORT_ANSWER = 16  # tokens; what a decode method learns of a context first is not made up for by fewer


@dataclass(frozen=True)
class Auto(Method):
    """Dense where reading less does not pay at this length, for this model, on this machine; else what
    ``saccade tune`` found for the model, or without that a safe preset. It is decided for a phase each, when a request
    comes, and its report says what it became and why.

    ``least``: the length from which the policy is used, in place of what was timed. ``method``: the policy to use, in
    place of what was tuned: ``auto(method="sampled_rows+psa")``.
    """

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "measured costs"
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    deferred: ClassVar[bool] = True

    least: int | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        if self.least is not None:
            require_whole("least", self.least, 1)
        if self.method is not None:
            self._given()

    def offered(self, phase: str, offer: Offer) -> tuple[Method, int | None]:
        """What the phase may run by, and the length from which that pays, None for never."""
        policy = offer.policy if self.method is None else self._given()
        upto = self.least if self.least is not None else getattr(offer, f"{phase}_from")
        method: Method = getattr(policy, phase)
        return method, upto

    def select_prefill(self, chunk: Chunk) -> Selection:
        raise self._unsettled()

    def select_decode(self, query: Query, state: Any) -> Selection:
        raise self._unsettled()

    def _unsettled(self) -> PolicyError:
        return PolicyError(f"'{self.text}' is settled where an engine takes a request; name the method to run here")

    def _given(self) -> Policy:
        from saccade.methods.policy import Policy

        try:
            given = Policy.parse(self.method)
        except PolicyError as error:
            raise PolicyError(f"method={shown(self.method)}: {error}") from None
        if given.deferred:
            raise PolicyError(f"method={self.method!r} must be a policy that reads something, not auto itself")
        if given.window is not None or given.freeze is not None:
            raise PolicyError(
                f"method={self.method!r} has a window or a freeze; join them to auto instead, as in auto+psaw"
            )
        return given


@dataclass(frozen=True)
class Offer:
    """What ``auto`` may become for one model on one machine. ``prefill_from``, ``decode_from``: tokens of a context
    from which leaving out pays; None for never. ``said``: where both come from, for reports."""

    policy: Policy
    prefill_from: int | None
    decode_from: int | None
    said: str


@dataclass(frozen=True)
class Asked:
    """What is known of a request when it comes: tokens of its whole context, those of them that are ``new``, the most
    tokens of its ``answer`` and others that run as decode steps (None: as many as fit), and the length from which a
    sparse prefill may be chosen where prefixes are shared: it is shared by whole chunks alone."""

    length: int
    new: int
    answer: int | None = None
    shared_from: int = 0


def settled(policy: Policy, asked: Asked, offer: Callable[[], Offer]) -> tuple[Policy, str | None]:
    """``policy`` with methods in the place of ``auto``, and a sentence on that; itself and None where it names none.
    ``offer`` is asked for nothing where the request is too short anyway."""
    phases = {phase: part for phase in ("prefill", "decode") if isinstance(part := getattr(policy, phase), Auto)}
    if not phases:
        return policy, None
    least = min(LEAST if part.least is None else part.least for part in phases.values())
    if asked.length < least:
        chosen = _with(policy, dict.fromkeys(phases, DenseMethod()))
        return chosen, f"auto became '{chosen.text}' at {asked.length:,} tokens: shorter than {least:,}"
    known: Offer | None = None
    whys: list[str] = []
    found: dict[str, Method] = {}
    for phase, part in phases.items():
        if known is None and (part.least is None or part.method is None):
            known = offer()
        method, first = part.offered(phase, known or Offer(policy, None, None, ""))
        held = None if part.least is not None else _held_back(phase, asked)
        if not method.is_dense and first is not None and asked.length >= first and held is None:
            found[phase] = method
            continue
        found[phase] = DenseMethod()
        if not method.is_dense:
            pays = "never pays here" if first is None else f"pays from {first:,} tokens on"
            whys.append(held if held is not None else f"'{method.text}' {pays}")
    chosen = _with(policy, found)
    said = "given in the policy" if known is None else known.said
    return chosen, f"auto became '{chosen.text}' at {asked.length:,} tokens: {'; '.join([*whys, said])}"


def ends(policy: Policy) -> list[Policy]:
    """What a policy may become, as far as that is known without a model: itself, or dense and what a safe preset or its
    own ``method`` makes of it."""
    from saccade.methods.policy import Policy

    offer = Offer(Policy.parse(SAFE), 1, 1, "")
    return list(dict.fromkeys(settled(policy, Asked(length, length), lambda: offer)[0] for length in (0, MOST)))


def _with(policy: Policy, methods: Mapping[str, Method]) -> Policy:
    prefill, decode = (methods.get(phase, getattr(policy, phase)) for phase in ("prefill", "decode"))
    return replace(policy, prefill=prefill, decode=decode)


def _held_back(phase: str, asked: Asked) -> str | None:
    """Why a phase stays dense at any length, for this request."""
    if phase == "decode" and asked.answer is not None and asked.answer < SHORT_ANSWER:
        return f"an answer of {asked.answer} tokens is too short for a decode method to pay"
    if phase == "prefill" and asked.new < min(LEAST, asked.length):
        return f"{asked.new:,} new tokens are too few for a prefill method to pay"
    if phase == "prefill" and asked.length < asked.shared_from:
        return f"where prefixes are shared, prefill methods are chosen from {asked.shared_from:,} tokens on"
    return None
