"""Checkpoints by their hub names, ``org/name`` or ``org/name@revision``, through huggingface_hub and its cache.

Only safetensors and what belongs to config and tokenizer are fetched, from ``HF_ENDPOINT``; ``HF_HUB_OFFLINE=1`` keeps
to what the cache holds. A model that cannot run is refused before its weights are fetched.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from saccade.errors import ModelError
from saccade.models.checkpoint import first_line, read_config
from saccade.models.refusals import refuse_unsupported

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_CONFIGS = ["config.json", "generation_config.json"]
_FILES = [*_CONFIGS, "*.safetensors", "*.safetensors.index.json", "tokenizer*", "special_tokens_map.json"]
_FILES += ["added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json", "spiece.model", "chat_template*"]
# Other layouts of the same weights, and what lies in folders.
_LEFT_OUT = ["*/*", "consolidated*"]


def is_name(model: str | Path) -> bool:
    """Whether ``model`` reads as a hub name and is no folder here."""
    return isinstance(model, str) and bool(_NAME.fullmatch(model)) and not Path(model).exists()


def fetch(model: str, revision: str | None = None) -> Path:
    """The folder in the cache that holds the checkpoint; what is missing is fetched, with a progress bar at a terminal.
    ``revision``: a branch, tag or commit, if the name has none. ModelError, in one line with the way out."""
    name, chosen = _parts(model, revision)
    folder = fetch_config(model, revision)
    config = read_config(folder)
    refuse_unsupported(config, model)
    folder = _snapshot(name, chosen, _FILES, quiet=not sys.stderr.isatty())
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name} holds no safetensors, the only weights that are loaded; choose a model that has them")
    return folder


def fetch_config(model: str, revision: str | None = None) -> Path:
    """The folder in the cache that holds the checkpoint's config.json, which is fetched if it is missing. Weights may
    be there or not. ModelError as of :func:`fetch`."""
    return _snapshot(*_parts(model, revision), _CONFIGS, quiet=True)


def _parts(model: str, revision: str | None) -> tuple[str, str | None]:
    name, _, named = model.partition("@")
    if named and revision not in (None, named):
        raise ModelError(f"model {model!r} names a revision and revision={revision!r} another; give one of them")
    return name, named or revision


class _NoBar(tqdm):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _snapshot(name: str, revision: str | None, patterns: list[str], quiet: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{name} at revision {revision}" if revision else name
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_LEFT_OUT,
            tqdm_class=_NoBar if quiet else None,
        )
        return Path(folder)
    except GatedRepoError as error:
        raise ModelError(f"{name} needs its owner's consent: ask for it on the hub, then run: hf auth login") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision!r}; give a branch, tag or commit that it has") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is neither a folder here nor a model on {constants.ENDPOINT} that you may read; check the "
            "name, or run: hf auth login"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ModelError(
            f"model {where!r} is no folder here and not in the cache, and {offline}; fetch it where there is a "
            "network, or give a checkpoint's folder (saccade info needs no more of it than its config.json)"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"model {name!r} is no name of a hub's model: {first_line(error)}") from error
    except Exception as error:  # of the network and the disk, many kinds
        raise ModelError(
            f"model {where!r} could not be fetched from {constants.ENDPOINT}: {first_line(error)}"
        ) from error
