"""What was found of a model on a machine: which policy it allows, and from which length that pays. Files of the user's
cache, ``tuned`` in the folder of ``models.cached``; ``saccade tune`` writes the first kind, a process that runs a
policy of
``auto`` for the first time the second."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash

from saccade.errors import SaccadeError
from saccade.files import write_text
from saccade.kv.row_formats import FORMATS
from saccade.machine import gpu_name, processor
from saccade.methods.policy import Policy
from saccade.models.cached import cache_homes, is_ours

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel

FOLDER = "tuned"
VERSION = 1  # of the files; those of another are not read
Read = TypeVar("Read")


@dataclass(frozen=True)
class Times:
    """Seconds that a policy and dense attention took beside each other over one text: of whole prefills of ``lengths``
    tokens, and of a decode step after them."""

    policy: str
    lengths: tuple[int, ...]
    dense_prefill: tuple[float, ...]
    prefill: tuple[float, ...]
    dense_decode: tuple[float, ...]
    decode: tuple[float, ...]


@dataclass(frozen=True)
class Tuned:
    """A ``policy`` that a model allows. ``text``: over which text; ``kl`` (nats, its mean), ``agree`` (share of tokens)
    and ``rounding`` (what bfloat16 alone agrees in, None where that was not measured): see eval.drift. ``length``:
    tokens of the text. ``times``: None of dense, which is kept where no other policy that was tried may be.
    ``tried``: a row a policy that was tried. ``made``: the day."""

    policy: str
    text: str
    length: int
    kl: float
    agree: float
    rounding: float | None
    times: Times | None
    made: str
    tried: list[dict[str, Any]] = field(default_factory=list)


def place_of(model: LoadedModel, threads: int | None, kv_dtype: str) -> dict[str, Any]:
    """What times, and what a policy loses, hang on: the model's shape and formats, whether keys are turned otherwise
    than ``kv_dtype`` has it by default, the machine, and the threads of a CPU."""
    spec, turned = model.spec, model.runner.turns is not None
    return {
        "family": spec.family,
        "layers": spec.layers,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "weight_bytes": model.weight_bytes,
        "kv_dtype": kv_dtype,
        **({"turned": turned} if turned != FORMATS[kv_dtype].turned else {}),
        **host_of(model.device, threads),
    }


def host_of(device: torch.device, threads: int | None) -> dict[str, Any]:
    """The part of a place that is no model's: the machine, and the threads of a CPU."""
    on_cpu = device.type == "cpu"
    return {
        "machine": processor() if on_cpu else gpu_name(str(device)),
        "cores": os.cpu_count() if on_cpu else None,
        "threads": (threads or torch.get_num_threads()) if on_cpu else None,
    }


def tuned_file(model: LoadedModel, place: Mapping[str, Any]) -> Path:
    """Where what ``saccade tune`` finds of ``model`` lies. Reads the model's weights, once."""
    return tuned_home() / f"policy-{model.identity.digest}-{_digest(place)}.json"


def find_tuned(model: LoadedModel, place: Mapping[str, Any]) -> Tuned | None:
    """What ``saccade tune`` found of ``model`` at ``place``; None where it was not run. SaccadeError, naming the file
    and the command, for one that is broken."""
    ending = f"-{_digest(place)}.json"
    if not any(home.glob(f"policy-*{ending}") for home in tuned_homes()):  # weights are read for nothing
        return None
    file = next(
        (one for home in tuned_homes() if (one := home / f"policy-{model.identity.digest}{ending}").is_file()), None
    )
    return None if file is None else read_tuned(file, VERSION, _tuned)


def _tuned(data: dict[str, Any]) -> Tuned:
    data.pop("place")
    times = None if data["times"] is None else _times(data["times"])
    found = Tuned(**{**data, "times": times})
    if (Policy.parse(found.policy) == Policy()) != (times is None):
        raise ValueError("a policy has times, dense none")
    return found


def keep_tuned(model: LoadedModel, place: Mapping[str, Any], tuned: Tuned) -> Path:
    """Write what was found; returns the file. RequestError where the system refuses."""
    file = tuned_file(model, place)
    write_tuned(file, {"version": VERSION, "place": dict(place), **asdict(tuned)})
    return file


def find_times(place: Mapping[str, Any], policy: str) -> Times | None:
    """Of an earlier process; a file that is broken counts as none."""
    for home in tuned_homes():
        try:
            data = json.loads((home / _times_name(place, policy)).read_text(encoding="utf-8"))
            if data["version"] == VERSION:
                return _times(data["times"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return None


def keep_times(place: Mapping[str, Any], times: Times) -> Path:
    """Write times; returns the file. RequestError where the system refuses."""
    file = tuned_home() / _times_name(place, times.policy)
    write_tuned(file, {"version": VERSION, "place": dict(place), "times": asdict(times)})
    return file


def _times(data: Mapping[str, Any]) -> Times:
    columns: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in data.items()}
    made = Times(**columns)
    seconds = (made.dense_prefill, made.prefill, made.dense_decode, made.decode)
    numbers = [one for row in (made.lengths, *seconds) for one in row]
    if any(len(row) != len(made.lengths) for row in seconds) or len(made.lengths) < 2:
        raise ValueError("it has not as many times as lengths")
    if not all(isinstance(one, (int, float)) and 0 < one < 1e9 for one in numbers):
        raise ValueError("a time or a length is no number above 0")
    return made


def _times_name(place: Mapping[str, Any], policy: str) -> str:
    return f"times-{_digest({**place, 'policy': policy})}.json"


def _digest(data: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(dict(data), sort_keys=True).encode()).hexdigest()


def tuned_homes() -> list[Path]:
    """Folders that files may lie in."""
    return [home / FOLDER for home in cache_homes() if is_ours(home)]


def tuned_home() -> Path:
    """Where new files go."""
    for home in cache_homes():
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if is_ours(home) and os.access(home, os.W_OK):
            return home / FOLDER
    return cache_homes()[0] / FOLDER


def read_tuned(file: Path, version: int, made: Callable[[dict[str, Any]], Read]) -> Read | None:
    """What :func:`write_tuned` wrote to ``file``, as ``made`` makes it; None where it is of another ``version``.
    SaccadeError, naming the file and the command, for one that is broken."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return None if data.pop("version") != version else made(data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SaccadeError) as error:
        raise SaccadeError(f"{file} cannot be used ({error}); run saccade tune again, or remove it") from None


def write_tuned(file: Path, data: Mapping[str, Any]) -> None:
    """Write a file of this kind. RequestError where the system refuses."""
    write_text(file, json.dumps(data, indent=1) + "\n", "tuned policy")
