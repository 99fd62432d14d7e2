"""The embedded reference model: a hand-built retriever that needs no download. See ``retriever`` for how it works."""

from saccade.models.reference.cache import NAME, checkpoint, save
from saccade.models.reference.retriever import build

__all__ = ["NAME", "build", "checkpoint", "save"]
