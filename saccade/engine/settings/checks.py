"""What a model and its KV pool can run at all, checked before anything runs. Any thread may ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from saccade.engine.sampling.params import SamplingParams
from saccade.engine.settings.rank_limits import check_policy, check_request
from saccade.errors import CapacityError, PolicyError, RequestError, shown
from saccade.kv.blocks import BlockManager
from saccade.methods.policy import Policy
from saccade.models.calibration import Calibrations

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt is held against. ``max_position``: tokens that the model reads at most; ``max_model_len``: that it
    is to read; ``most_tokens``: of one sequence, that the KV pool has room for, with the ``tier`` behind it."""

    vocab_size: int
    max_model_len: int
    max_position: int
    most_tokens: int
    tier: str | None = None

    @property
    def room(self) -> int:
        """Tokens of a context."""
        return min(self.max_model_len, self.most_tokens)

    @property
    def _or_tier(self) -> str:
        return "give kv_disk, a folder and its size ('~/kv:100GiB')" if self.tier is None else f"kv_{self.tier}"

    def check(self, prompt: list[int], before: int = 0) -> None:
        """Raise RequestError or CapacityError for a prompt that can never run after ``before`` earlier tokens."""
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        known = set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < self.vocab_size
        for token in () if known else prompt:  # a look at each takes milliseconds where there are many
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise RequestError(f"token id {shown(token)} is not an integer from 0 to {self.vocab_size - 1}")
        total = before + len(prompt)
        if total >= self.max_model_len:
            most = self.max_position
            way_out = (
                f"raise max_model_len (at most {most})" if self.max_model_len < most else "give a model that reads more"
            )
            raise RequestError(
                f"the prompt has {total} tokens but max_model_len is {self.max_model_len}, one of them for the answer; "
                f"shorten it or {way_out}"
            )
        if total + 1 > self.most_tokens:
            raise CapacityError(
                f"the prompt has {total} tokens but the KV pool holds {self.most_tokens} at most; "
                f"shorten it or raise kv_memory or {self._or_tier}"
            )


class Checks:
    """Raises errors that name the value, what is allowed and the way out."""

    def __init__(
        self,
        model: LoadedModel,
        pool: BlockManager,
        max_model_len: int,
        calibrations: Calibrations,
        ranks: int = 1,
    ) -> None:
        self.model, self.pool, self.max_model_len = model, pool, max_model_len
        self.calibrations, self.ranks = calibrations, ranks

    def prompt(self, prompt: list[int], before: int = 0) -> None:
        """Raise RequestError or CapacityError for a prompt that can never run after ``before`` earlier tokens."""
        self.limits.check(prompt, before)

    @property
    def limits(self) -> PromptLimits:
        """Of this model and its pool."""
        spec = self.model.spec
        tier = None if self.pool.tiers is None else self.pool.tiers.tier.name
        return PromptLimits(spec.vocab_size, self.max_model_len, spec.max_position, self.most_tokens, tier)

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence that the KV pool has room for."""
        pool = self.pool
        return min(pool.num_blocks // pool.layers, pool.logical_blocks) * pool.format.block_size

    def request(self, params: SamplingParams, policy: Policy) -> None:
        """Raise RequestError for what this engine cannot show of a request under ``policy``."""
        check_request(self.ranks, params, policy)
        if params.certify is not None and self.pool.format.joined:
            raise RequestError(f"certify={params.certify}: {self._no_certificate}; leave it out")

    def policy(self, policy: Policy) -> None:
        """Raise PolicyError for a policy that this model cannot run."""
        check_policy(self.ranks, policy, self.pool.tiers is not None, self.model.device.type == "cuda")
        freeze = policy.freeze
        if self.pool.format.joined and getattr(policy.decode, "certify", False):
            raise PolicyError(f"'{policy.decode.text}': {self._no_certificate}; leave certify out")
        if self.pool.states is not None:
            check_kept(policy, self.model.spec.family)
        if freeze is not None and freeze.copies and not self.model.runner.layers_rotate_alike:
            balanced = "" if self.model.runner.turns is None else ", or kv_rotate=False where keys have a bias"
            raise PolicyError(
                f"'{freeze.text}' copies keys from layer to layer, but {self.model.spec.family} layers do not rotate "
                f"keys all alike; use '{freeze.name}(reuse=hidden)'{balanced}"
            )
        for method in (policy.prefill, policy.decode):
            if self.calibrations.of_channels(method.calibration) and self.pool.format.turned:
                raise PolicyError(
                    f"'{method.text}' chooses by channels of keys, calibrated offline ('{method.calibration}'), and "
                    "kv_rotate turns them; give kv_rotate=False, or source=prompt where the method has it"
                )
            if method.calibration is not None:
                self.calibrations.layer((method.calibration,), 0)

    @property
    def _no_certificate(self) -> str:
        return f"{self.model.spec.family} stores latents, and a bound on what comes of them is none on an output"

    def located(self, policy: Policy) -> tuple[Policy, str | None]:
        """``policy`` with its window where the model's calibration allows it, and a sentence on that; itself and None
        where no window asks for one. PolicyError for a calibration that cannot be used."""
        window, spec = policy.window, self.model.spec
        if window is None or window.calibration is None or not window.acts(spec.layers):
            return policy, None
        kind, layers = window.calibration, None
        if self.calibrations.has(kind):
            layers = [
                self.calibrations.layer((kind,), layer) if own is None else None
                for layer, own in enumerate(spec.windows)
            ]
        window, said = window.calibrated(layers)
        return replace(policy, window=window), said


def check_kept(policy: Policy, family: str) -> None:
    """PolicyError for what layers that keep a state cannot follow."""
    if policy.freeze is not None:
        raise PolicyError(
            f"'{policy.freeze.text}' has rows skip layers, but {family} has layers that keep a state, which must see "
            f"every token; leave it out of policy={policy.text!r}"
        )


def certified(policy: Policy, params: SamplingParams) -> Policy:
    """``policy`` with the certificates that a request asks for. RequestError where its decode method has none."""
    if params.certify is None:
        return policy
    method = policy.decode.certified(*params.certify)
    if method is None or policy.window is not None:
        what = f"'{policy.decode.name}'" if method is None else f"'{policy.decode.name}' in a window"
        raise RequestError(f"certify={params.certify}: {what} has no certificate; use policy='vattention'")
    return replace(policy, decode=method)
