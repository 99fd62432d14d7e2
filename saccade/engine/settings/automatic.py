"""What ``auto`` can become in this engine: the policy that was tuned for its model, or a safe one, and the lengths from
which either pays on this machine."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

from saccade.engine.settings.config import EngineConfig
from saccade.engine.settings.pays import Runs as Timed
from saccade.engine.settings.pays import Untimed, pays_from, timed
from saccade.errors import RequestError, SaccadeError
from saccade.methods.auto import SAFE, Asked, Offer, settled
from saccade.methods.policy import Policy
from saccade.models.tuned import Times, find_times, find_tuned, keep_times, place_of
from saccade.models.tuned_places import tuned_elsewhere

logger = logging.getLogger(__name__)

SECONDS = 30.0  # that the first request of a machine and model may wait for a timing


class Runs(Timed, Protocol):
    """An engine, as far as its offers hang on it."""

    config: EngineConfig
    link: Any


class Automatic:
    """For one engine, which it does not keep alive."""

    def __init__(self, engine: Runs) -> None:
        self._engine = weakref.ref(engine)
        self._offer: Offer | None = None
        self._told = False  # that a tuned policy is passed by

    def settled(
        self, policy: Policy, length: int, new: int, answer: int | None, session: bool = False
    ) -> tuple[Policy, str | None]:
        """See :func:`saccade.methods.auto.settled`; ``session``: the context stays with its session. The first time a
        policy may pay, it is timed."""
        return settled(policy, Asked(length, new, answer, 0 if session else self._shared_from), self.offer)

    @property
    def is_timed(self) -> bool:
        """Whether an offer can be had without running anything."""
        engine = self._own()
        if self._offer is not None or engine.link is not None:
            return True
        place = place_of(engine.model, engine.config.threads, engine.config.kv_dtype)
        try:
            return find_tuned(engine.model, place) is not None or find_times(place, SAFE) is not None
        except SaccadeError:
            return find_times(place, SAFE) is not None

    def offer(self) -> Offer:
        """What there is, found once."""
        if self._offer is not None:
            return self._offer
        offer, lasts = self._found()
        if lasts:
            self._offer = offer
        return offer

    def _found(self) -> tuple[Offer, bool]:
        """The offer, and whether it stays that."""
        engine = self._own()
        config = engine.config
        if engine.link is not None:
            why = f"nothing is timed for tensor_parallel_size={config.tensor_parallel_size}"
            return Offer(Policy(), None, None, why), True
        place = place_of(engine.model, config.threads, config.kv_dtype)
        said = "a safe preset, saccade tune may find better"
        try:
            tuned = find_tuned(engine.model, place)
            if tuned is None and (elsewhere := self._passed_by(place)) is not None:
                said = f"a safe preset: {elsewhere}"
        except SaccadeError as error:
            tuned, said = None, f"a safe preset, since {error}"
        if tuned is not None:
            policy, found = Policy.parse(tuned.policy), tuned.times
            if found is None:
                said = f"saccade tune found none that reads less within its bounds on {tuned.text}"
                return Offer(policy, None, None, said), True
            agreed = f"{100 * tuned.agree:.1f} % of tokens agree"
            said = f"tuned on {tuned.text} (KL {tuned.kl:.2g} nats, {agreed}), timed on this machine"
            return Offer(policy, pays_from(found, "prefill"), pays_from(found, "decode"), said), True
        policy = Policy.parse(SAFE)
        times: Times | Untimed | None = find_times(place, policy.text)
        if times is None:
            times = timed(engine, policy, SECONDS)
            if isinstance(times, Times):
                try:
                    keep_times(place, times)
                except RequestError as error:
                    logger.warning("times are measured again by the next process: %s", error)
        if isinstance(times, Untimed):
            return Offer(policy, None, None, f"{said}; {times.why}"), not times.later
        return Offer(policy, pays_from(times, "prefill"), pays_from(times, "decode"), f"{said}; timed here"), True

    def _passed_by(self, place: dict[str, Any]) -> str | None:
        """Why what was tuned for the model holds elsewhere alone; told once in the log, too."""
        why = tuned_elsewhere(self._own().model, place)
        if why is not None and not self._told:
            logger.warning("auto is a safe preset here: %s", why)
            self._told = True
        return why

    @property
    def _shared_from(self) -> int:
        """Where prefixes are shared, a sparse prefill is so by whole chunks alone: what is lost by that is to stay
        below a quarter."""
        config = self._own().config
        return 4 * config.chunk if config.enable_prefix_caching else 0

    def _own(self) -> Runs:
        engine = self._engine()
        assert engine is not None, "an engine asks while it lives"
        return engine
