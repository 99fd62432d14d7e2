"""Where the checkpoint of a model lies, however the model is named."""

from __future__ import annotations

from pathlib import Path

from saccade.errors import ModelError, shown


def checkpoint_folder(model: str | Path, revision: str | None = None) -> Path:
    """The folder of a model given by name (one that is built in, or of a hub) or by path."""
    from saccade.models import hub, reference

    if isinstance(model, (str, Path)) and str(model) in reference.NAMES:
        return reference.checkpoint(str(model))
    if not isinstance(model, (str, Path)) or not str(model):
        raise ModelError(
            f"model={shown(model)} is no model; give a checkpoint folder, a hub name such as Qwen/Qwen3-8B, or one of: "
            f"{', '.join(reference.NAMES)}"
        )
    if hub.is_name(model):
        return hub.fetch(str(model), revision)
    if revision is not None:
        raise ModelError(f"revision={shown(revision)} is for models of a hub, but {str(model)!r} is not one")
    return Path(model)  # whoever opens it expands a ~user, or says that there is none
