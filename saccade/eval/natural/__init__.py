"""Tasks in plain English that any pretrained model can be asked, without a download.

Facts are planted in prose, made up or from a file of the user's, and asked for as one would ask a person. Samples are
fitted to a length in the model's own tokens, chat template and answers included, and scored by whether the answer holds
the fact, so that a model may be chatty. A model without a chat template completes the sentence instead.
"""

from __future__ import annotations

from saccade.eval.natural.tasks import TASKS, VERSION, make

__all__ = ["TASKS", "VERSION", "make"]
