"""Where the files that ``saccade tune`` wrote hold, and which of them ``auto`` passes by: those of other threads,
another machine or another format of keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.models.tuned import VERSION, tuned_homes

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel

_SHAPE = ("family", "layers", "heads", "kv_heads", "head_dim")  # of a model; the rest of a place may differ
_HOST = ("machine", "cores")
_SETTINGS = ("dtype", "kv_dtype", "threads")
_TURNED = "turned"  # named where keys are not turned as their format has it by default


def policy_files() -> dict[Path, dict[str, Any]]:
    """Every file with a tuned policy, and its contents; those that are broken or of another version are left out."""
    found: dict[Path, dict[str, Any]] = {}
    for home in tuned_homes():
        for file in sorted(home.glob("policy-*.json")):
            try:
                data = json.loads(file.read_text(encoding="utf-8"))
                if data["version"] == VERSION and isinstance(data["place"], dict) and isinstance(data["policy"], str):
                    found[file] = data
            except (OSError, ValueError, TypeError, KeyError):
                continue
    return found


def tuned_elsewhere(model: LoadedModel, place: Mapping[str, Any]) -> str | None:
    """Why ``auto`` passes by what ``saccade tune`` found of ``model``: it holds at another place than ``place``, with
    the way out, in one sentence without a stop. None where nothing was found at all. Of several places the nearest one
    is named. Reads the model's weights where a model of this shape was tuned, and only there."""
    places = {file: data["place"] for file, data in policy_files().items()}
    alike = {file: one for file, one in places.items() if all(one.get(name) == place[name] for name in _SHAPE)}
    if not alike:
        return None
    begins = f"policy-{model.identity.digest}-"
    ours = [differences(one, place) for file, one in alike.items() if file.name.startswith(begins)]
    ours = [one for one in ours if one]
    return None if not ours else said_of(min(ours, key=_distance))


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two places, by name: there, and here. Of ``here`` only what it names counts, and whether
    keys are turned."""
    named = [*(name for name in (*_HOST, *_SETTINGS) if name in here), _TURNED]
    return {name: (there.get(name), here.get(name)) for name in named if there.get(name) != here.get(name)}


def said_of(differs: Mapping[str, tuple[Any, Any]]) -> str:
    """A sentence on :func:`differences`, without a stop, that names the way out."""
    begins = "saccade tune found a policy for this model"
    there, here = (_settings({name: one[at] for name, one in differs.items()}) for at in (0, 1))
    if any(name in differs for name in _HOST):
        known = [_host({name: one[0] for name, one in differs.items()}), there]
        return f"{begins} on another machine ({', '.join(filter(None, known))}); run it again on this one"
    return f"{begins} with {there}, not with {here}; run it again with {here}, or this with {there}"


def _distance(differs: Mapping[str, Any]) -> tuple[bool, int]:
    return any(name in differs for name in _HOST), len(differs)


def _settings(values: Mapping[str, Any]) -> str:
    said = [f"{name}={values[name]}" for name in _SETTINGS if values.get(name) is not None]
    if _TURNED in values:
        turned = values[_TURNED]
        said.append("kv_rotate as it is by default" if turned is None else f"kv_rotate={turned}")
    return " and ".join(said)


def _host(values: Mapping[str, Any]) -> str:
    cores = values.get("cores")
    return ", ".join(filter(None, (values.get("machine"), None if cores is None else f"{cores} cores")))
