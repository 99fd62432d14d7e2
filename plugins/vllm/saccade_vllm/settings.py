"""What a server was told by its environment: the policy, and from which length on it acts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from saccade.errors import PolicyError, SaccadeError
from saccade.methods.policy import Policy

POLICY, LEAST = "SACCADE_POLICY", "SACCADE_MIN_TOKENS"
SHORTEST = 4096  # keys: below, choosing costs more than it spares


@dataclass(frozen=True)
class Settings:
    """``policy``: its prefill method and window act. ``least``: chunks of a prompt that end before so many tokens read
    everything."""

    policy: Policy
    least: int = SHORTEST

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings | None:
        """None where no policy is set. PolicyError or SaccadeError for one that vLLM's loop cannot run."""
        text = environment.get(POLICY, "")
        if not text.strip():
            return None
        least = environment.get(LEAST, str(SHORTEST))
        if not least.isdecimal() or int(least) < 1:
            raise SaccadeError(f"{LEAST}={least!r} is no number of tokens of 1 or more; leave it out for {SHORTEST}")
        return cls(usable(Policy.parse(text)), int(least))


def usable(policy: Policy) -> Policy:
    """``policy``. PolicyError, naming the part, where attention alone, without an engine, cannot run it."""
    method = policy.prefill
    why = None
    if method.deferred:
        why = f"'{method.text}' is settled by an engine, which times what pays"
    elif method.calibration is not None:
        why = f"'{method.text}' needs a calibration of the model ('{method.calibration}'), which vLLM does not load"
    elif method.looks_at_inputs or method.looks_ahead:
        why = f"'{method.text}' looks at what layers take in, which vLLM does not hand to attention"
    elif not policy.decode.is_dense:
        why = f"'{policy.decode.text}' chooses in decode, and vLLM decodes by kernels of its own"
        if not method.is_dense:
            why += f" (write 'prefill={method.text}, decode=dense')"
    elif policy.freeze is not None:
        why = f"'{policy.freeze.text}' has rows skip layers, and vLLM runs every row through every layer"
    elif policy.window is not None and policy.window.calibration is not None:
        why = f"'{policy.window.text}' needs a calibration of the model, which vLLM does not load"
    elif method.is_dense and policy.window is None:
        why = "'dense' changes nothing"
    if why is not None:
        raise PolicyError(f"{POLICY}={policy.text!r}: {why}; take a policy of prefill alone, such as 'flexprefill'")
    return policy
