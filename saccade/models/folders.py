"""Where the checkpoint of a model lies, however the model is named."""

from __future__ import annotations

from pathlib import Path

from saccade.errors import ModelError, shown


def checkpoint_folder(model: str | Path, revision: str | None = None, config_alone: bool = False) -> Path:
    """The folder of a model given by name (one that is built in, one that ``saccade fetch`` brought, or of a hub), by a
    GGUF file, or by path. A folder here goes before a fetched model and a hub's of the same name. ``config_alone``:
    nothing else of a hub's model is fetched."""
    from saccade.models import catalogue, gguf_header, hub, reference

    if isinstance(model, (str, Path)) and str(model) in reference.NAMES:
        return reference.checkpoint(str(model))
    if not isinstance(model, (str, Path)) or not str(model):
        raise ModelError(
            f"model={shown(model)} is no model; give a folder, a GGUF file, a hub name such as Qwen/Qwen3-8B, "
            f"or one of: {', '.join((*reference.NAMES, *catalogue.ENTRIES))}"
        )
    gguf = gguf_header.is_gguf(Path(model))
    if hub.is_name(model) and not gguf:
        return (hub.fetch_config if config_alone else hub.fetch)(str(model), revision)
    if revision is not None:
        raise ModelError(f"revision={shown(revision)} is for models of a hub, but {str(model)!r} is not one")
    if gguf:
        from saccade.models.gguf_folder import folder_of

        return folder_of(model)
    if str(model) in catalogue.ENTRIES and not Path(model).exists():
        return catalogue.folder_of(str(model))
    return Path(model)  # opening it expands a ~user, or says that there is none
