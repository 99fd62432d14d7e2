"""transformers' modules beside a decoder of the Llama shape: the oracle that runs in its place."""

from __future__ import annotations

from saccade.models.loader import load_model
from saccade.models.runner import HFRunner


def with_modules(runner: HFRunner) -> HFRunner:
    """``runner``, the modules of which hold its decoder's own tensors now, so that they can run, or be changed."""
    if runner.llama is not None:
        runner.model.load_state_dict(runner.weights, assign=True)
        runner.model.tie_weights()
        runner.model.requires_grad_(False)
    return runner


def modules_of(*args, **settings):
    """transformers' model, as :func:`load_model` of these arguments has it, with its weights."""
    return with_modules(load_model(*args, **settings).runner).model
