"""matplotlib, where it is installed: figures are extras, and every number in them stands in a table too."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from saccade.errors import SaccadeError

MISSING = "matplotlib is not installed, so figures are left out; pip install 'saccade-llm[figures]' adds it"


def available() -> bool:
    """Whether figures can be drawn."""
    try:
        return find_spec("matplotlib") is not None
    except (ImportError, ValueError):  # an import that was blocked
        return False


def new_figure(**options: Any) -> Any:
    """A figure outside pyplot: no window, and the caller's own backend stays as it is. SaccadeError where matplotlib is
    not installed."""
    if not available():
        raise SaccadeError(MISSING)
    from matplotlib.figure import Figure

    return Figure(**options)


def styled(settings: Any) -> Any:
    """A context in which figures are drawn with ``settings``."""
    from matplotlib import rc_context

    return rc_context(settings)
