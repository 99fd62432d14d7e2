"""Result folders: config.json is the source of truth, the folder's name is for readers, logs grow line by line.

A folder is never mixed from two settings: what differs from its config is an error that says what and the way out.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from saccade import __version__
from saccade.errors import RequestError
from saccade.files import write_text
from saccade.machine import gpu_name, processor, show_bytes, total_bytes

CONFIG, PREDICTIONS, TIMINGS, SCORES = "config.json", "predictions.jsonl", "timings.jsonl", "scores.jsonl"
MIXED = "continued_with"  # environments that a folder was continued in, although they differ
ENVIRONMENT = ("versions", "commit", "machine")  # may differ once a folder is complete, never while it grows
# What things are called and where they lie; what they are is settled by their hashes.
PLACES = ("model.name", "model.path", "data.path")


def read_json(path: Path) -> dict[str, Any]:
    """RequestError if the file is missing or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{path} holds no JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all. RequestError if the folder cannot be written."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def open_folder(path: Path, config: Mapping[str, Any]) -> None:
    """Make the folder for ``config``, or check that it was made for the same. RequestError naming the difference."""
    file = path / CONFIG
    if file.exists():
        stored = read_json(file)
        different = differences(stored, config, skip=(*ENVIRONMENT, *PLACES, MIXED, *_not_compared(stored, config)))
        if different:
            raise RequestError(
                f"{path} holds results of another setting: {'; '.join(different)}. Give another --out, or remove the "
                "folder to start it again"
            )
    else:
        write_json(file, config)


def _not_compared(*configs: Mapping[str, Any]) -> tuple[str, ...]:
    """By what models are not compared: a hash of files differs where the same model was saved again; folders without
    identities have nothing else."""
    known = all(config.get("model", {}).get("identity") is not None for config in configs)
    return ("model.weights_sha256",) if known else ("model.identity", "model.tokenizer_hash")


def check_environment(path: Path, config: Mapping[str, Any], mix: bool = False) -> None:
    """Raise RequestError if adding to the folder would mix versions, commits or machines; with ``mix`` write down in
    its config that it does."""
    stored = read_json(path / CONFIG)
    ours = {key: config.get(key) for key in ENVIRONMENT}
    different = [line for key in ENVIRONMENT for line in differences(stored.get(key), ours[key], key)]
    if different and not mix:
        raise RequestError(
            f"{path} is incomplete and was begun elsewhere: {'; '.join(different)}. Finish it there, give another "
            "--out, remove the folder to start it again, or allow it with --mix, which its config will say"
        )
    if different and ours not in stored.get(MIXED, []):
        write_json(path / CONFIG, {**stored, MIXED: [*stored.get(MIXED, []), ours]})


def differences(ours: Any, theirs: Any, where: str = "", skip: Iterable[str] = ()) -> list[str]:
    """``key: a, asked for b`` for every leaf in which two plain values differ; ``skip``: keys with those above them,
    such as ``model.path``."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        names = {key: f"{where}.{key}" if where else str(key) for key in {**ours, **theirs}}
        return [
            line
            for key, name in names.items()
            if name not in skip
            for line in differences(ours.get(key), theirs.get(key), name, skip)
        ]
    return [] if ours == theirs else [f"{where} is {ours!r} there, asked for is {theirs!r}"]


class Log:
    """A jsonl file that grows a line at a time. A last line that a kill cut off is dropped when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        try:
            data = path.read_bytes() if path.exists() else b""
            whole = data.rfind(b"\n") + 1
            for number, line in enumerate(data[:whole].splitlines(), 1):
                self.records.append(_record(path, number, line))
            self.file = path.open("ab")
            self.file.truncate(whole)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}; choose another folder") from None

    def append(self, record: Mapping[str, Any]) -> None:
        """Handed to the system at once: a kill loses nothing that was finished."""
        self.file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RequestError(
            f"{path}, line {number} is not JSON ({error}); remove that line and what follows it"
        ) from None
    if not isinstance(record, dict) or "id" not in record:
        raise RequestError(f"{path}, line {number} is no record with an id; remove that line and what follows it")
    return record


def slug(text: str) -> str:
    """A policy or a model as part of a folder's name: ``psa(epsilon=0.98)`` -> ``psa_epsilon-0.98``."""
    plain = re.sub(r"[^A-Za-z0-9.+,_-]+", "_", text.replace("=", "-").replace(", ", ","))
    return plain.strip("_.")[:120] or "_"


def file_hash(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def tokenizer_hash(hf: Any | None) -> str | None:
    """Of what transformers' tokenizer does and of its chat template, however their files are written; None for None."""
    if hf is None:
        return None
    backend = getattr(hf, "backend_tokenizer", None)
    does = json.dumps(sorted(hf.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(json.dumps([does, hf.chat_template]).encode()).hexdigest()


def weights_hash(folder: Path) -> str:
    """sha256 over the names and contents of a checkpoint's config, tokenizer and weights."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]):
        if file.is_file():
            digest.update(f"{file.name}\0{file_hash(file)}\0".encode())
    return digest.hexdigest()


@lru_cache
def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions, git commit of this package if it lies in a checkout, and the machine, with its GPU where the model is
    on one; as this process began, since that is the code it runs."""
    gpu = gpu_name(device)
    return {
        "versions": {
            "python": platform.python_version(),
            "saccade": __version__,
            **{name: _version(name) for name in ("torch", "transformers")},
        },
        "commit": _commit(),
        "machine": {
            **{"processor": processor(), "cores": os.cpu_count(), "memory": show_bytes(total_bytes())},
            **({"gpu": gpu} if gpu else {}),
        },
    }


def machine_name(machine: Mapping[str, Any]) -> str:
    """What ``environment`` says of a machine, for readers; its GPU first, where a model was on one."""
    host = f"{machine['processor']}, {machine['cores']} cores"
    return f"{machine['gpu']} ({host})" if machine.get("gpu") else host


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """With ``+changes`` if the package differs from it. None unless this file is tracked: an environment inside
    a foreign checkout has that checkout's commit."""
    package = str(Path(__file__).parents[1])
    if _git("ls-files", "--error-unmatch", __file__) is None or (head := _git("rev-parse", "HEAD")) is None:
        return None
    return head if _git("diff", "--quiet", "HEAD", "--", package) is not None else f"{head}+changes"


def _git(*words: str) -> str | None:
    """What git prints, None where it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
