"""The embedded models, which need no download: the trained ``reference`` and the hand-built ``retriever``."""

from pathlib import Path

from saccade.models.reference.cache import NAME, save
from saccade.models.reference.cache import checkpoint as _retriever
from saccade.models.reference.retriever import build

NAMES = ("reference", NAME)

# What each can do, for readers who expect a language model.
ABOUT = {
    NAME: "it only completes sentences whose beginning it has read before in the same text",
    "reference": "it only answers the evaluation's tasks, in a vocabulary of its own",
}

__all__ = ["ABOUT", "NAME", "NAMES", "build", "checkpoint", "save"]


def checkpoint(name: str = NAME) -> Path:
    """The checkpoint folder of an embedded model. ``reference``: the trained one of size S, part of the package."""
    return Path(__file__).parent / "s" if name == "reference" else _retriever()
