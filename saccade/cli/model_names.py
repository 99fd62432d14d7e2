"""What a model may be called, checked before torch is imported: that takes seconds, and a slip of the pen none."""

from __future__ import annotations

import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from saccade.errors import ModelError, shown
from saccade.models import catalogue

BUILT_IN = ("reference", "retriever")  # saccade.models.reference.NAMES
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def check_name(model: object) -> None:
    """ModelError for a name that no model can have: no file or folder here, none of ours, and no hub's; and for one of
    ours that was not fetched."""
    if not isinstance(model, str) or model in BUILT_IN or _HUB.fullmatch(model):
        return
    if model in catalogue.ENTRIES:
        catalogue.folder_of(model)
        return
    with suppress(RuntimeError, OSError, ValueError):  # no home of that user; a name that no file can have
        if model and Path(model).expanduser().exists():
            return
    close = get_close_matches(model, (*BUILT_IN, *catalogue.ENTRIES), 1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise ModelError(
        f"model {shown(model)} is no file or folder here{meant}; give a folder, a GGUF file, a hub name such as "
        f"Qwen/Qwen3-8B, or one of: {', '.join((*BUILT_IN, *catalogue.ENTRIES))}"
    )
