"""Carry a large file to a machine that takes small trees only: cut here, sent some parts a call, put together there.

    python tools/carry_model.py cut build/real/smollm2.gguf build/carry
    python tools/carry_model.py join build/carry/smollm2.gguf.json model.gguf

``cut`` writes parts of at most 40 MB and a list of them with their SHA-256. ``join`` takes whichever parts lie beside
the list, in any order and in as many calls as are needed: a part that is in may be deleted. It ends with 0 once the
whole is there and checked, with 1 while parts are missing (it names them), with 2 for an error. Both go on where they
were interrupted. No package is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST = 40_000_000  # bytes of a part
PIECE = 1 << 20  # bytes that are read at once


class CarryError(Exception):
    """What stops, in one line."""


def cut(file: Path, folder: Path, most: int = MOST) -> Path:
    """Write the parts of ``file`` and their list, ``NAME.json``, into ``folder``; parts that are there already stay."""
    if not 1 <= most <= MOST:
        raise CarryError(f"a part has 1 to {MOST} bytes, not {most}")
    if not file.is_file() or not file.stat().st_size:
        raise CarryError(f"{file} is no file with something in it")
    folder.mkdir(parents=True, exist_ok=True)
    whole, parts = hashlib.sha256(), []
    with file.open("rb") as data:
        while piece := data.read(most):
            whole.update(piece)
            part = folder / f"{file.name}.{len(parts):03d}"
            listed = {"file": part.name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()}
            if not (part.is_file() and _sum(part, 0, part.stat().st_size) == listed["sha256"]):
                _write(part, piece)
            parts.append(listed)
    for stale in folder.glob(f"{file.name}.[0-9]*"):  # of an earlier cut into more
        if stale.name not in {part["file"] for part in parts}:
            stale.unlink()
    listing = {"name": file.name, "bytes": file.stat().st_size, "sha256": whole.hexdigest(), "parts": parts}
    _write(folder / f"{file.name}.json", json.dumps(listing, indent=1).encode())
    return folder / f"{file.name}.json"


def join(listing: Path, file: Path) -> list[str]:
    """Put the parts beside ``listing`` into ``file``; the names of those that are still missing. What is joined so far
    lies in ``FILE.joining``; ``FILE.joined`` lists the parts in it, each written down when it is on the disk."""
    said = _listed(listing)
    if file.is_file() and _sum(file, 0, file.stat().st_size) == said["sha256"]:
        return []
    aside, record = file.with_name(f"{file.name}.joining"), file.with_name(f"{file.name}.joined")
    inside = _joined(record, aside, said)
    missing, start = [], 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with aside.open("r+b" if aside.exists() else "w+b") as out:
        out.truncate(said["bytes"])
        for part in said["parts"]:
            place, start = start, start + part["bytes"]
            if part["file"] in inside:
                continue
            source = listing.with_name(part["file"])
            if not source.is_file():
                missing.append(part["file"])
                continue
            data = source.read_bytes()
            if hashlib.sha256(data).hexdigest() != part["sha256"]:
                raise CarryError(f"{source} is not what was cut ({len(data)} of {part['bytes']} bytes); send it again")
            out.seek(place)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
            inside.append(part["file"])
            _write(record, json.dumps({"sha256": said["sha256"], "parts": inside}).encode())
    if missing:
        return missing
    _check_whole(aside, record, said)
    aside.replace(file)
    record.unlink()
    return []


def _check_whole(aside: Path, record: Path, said: dict[str, Any]) -> None:
    """CarryError where what was joined is not the whole: parts whose bytes changed since are to be sent again."""
    if _sum(aside, 0, said["bytes"]) == said["sha256"]:
        return
    right, start = [], 0
    for part in said["parts"]:
        if _sum(aside, start, part["bytes"]) == part["sha256"]:
            right.append(part["file"])
        start += part["bytes"]
    _write(record, json.dumps({"sha256": said["sha256"], "parts": right}).encode())
    wrong = [part["file"] for part in said["parts"] if part["file"] not in right]
    raise CarryError(f"{aside} was changed; send again: {' '.join(wrong) or 'everything, for the list is wrong'}")


def _listed(listing: Path) -> dict[str, Any]:
    try:
        said = json.loads(listing.read_text(encoding="utf-8"))
        if sum(part["bytes"] for part in said["parts"]) != said["bytes"] or not said["parts"]:
            raise ValueError("sizes do not add up")
        if any(Path(part["file"]).name != part["file"] for part in said["parts"]):
            raise ValueError("a part lies elsewhere")
        return dict(said)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CarryError(f"{listing} is no list of parts: {error}") from error


def _joined(record: Path, aside: Path, said: dict[str, Any]) -> list[str]:
    """Parts that earlier calls have put in; none where they were another file's."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        ours = found["sha256"] == said["sha256"] and aside.stat().st_size == said["bytes"]
        return [str(name) for name in found["parts"]] if ours else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _sum(file: Path, start: int, size: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as data:
        data.seek(start)
        while size > 0 and (piece := data.read(min(size, PIECE))):
            digest.update(piece)
            size -= len(piece)
    return digest.hexdigest()


def _write(file: Path, data: bytes) -> None:
    """A file whole or not at all."""
    aside = file.with_name(f".{file.name}.part")
    aside.write_bytes(data)
    aside.replace(file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("cut", help="write the parts of a file and their list")
    one.add_argument("file", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("--most", type=int, default=MOST, help=f"bytes of a part, at most {MOST}")
    other = commands.add_parser("join", help="put parts together; again and again, as they come")
    other.add_argument("listing", type=Path, help="NAME.json of cut")
    other.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "cut":
            listing = cut(given.file, given.folder, given.most)
            print(f"{listing}: {len(_listed(listing)['parts'])} parts")
            return 0
        missing = join(given.listing, given.file)
    except (CarryError, OSError) as error:
        print(f"carry_model: error: {error}", file=sys.stderr)
        return 2
    total = len(_listed(given.listing)["parts"])
    print(
        f"{given.file}: {total - len(missing)} of {total} parts"
        + (f"; missing: {' '.join(missing)}" if missing else "")
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
