"""Sources over files: LongBench and InfiniteBench from the user's folders, and multi-turn conversations built from the
former or from our own LongBench-shaped sets."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade import prose
from saccade.errors import RequestError
from saccade.eval import infinitebench as infinitebench_files
from saccade.eval import longbench as longbench_files
from saccade.eval.haystack import file_of, read_text
from saccade.eval.multiturn import SETS, VERSION, build, generate, render
from saccade.eval.multiturn.segments import words
from saccade.eval.multiturn.synthetic import NAMES as SYNTHETIC
from saccade.eval.samples import POSITIONS, Sample, read_jsonl
from saccade.eval.sources import Given, Source

ANSWER_ROOM = 0.1  # share of a length that LongBench's truncation leaves for answer and template
_ITEMS = 40  # of a made-up set
_SHARE = 0.7  # of a length is text of its items; the rest is noise, questions and answers


def longbench(given: Given) -> Source:
    """Tasks are the folder's files. Samples keep the files' order; the seed plays no part."""
    folder = _folder(given.longbench)
    known = {path.stem: path for path in sorted(folder.glob("*.jsonl")) if _is_set(path)}
    if not known:
        raise RequestError(f"{folder} holds no LongBench file such as hotpotqa.jsonl")

    @lru_cache(maxsize=4)
    def samples(task: str, length: int) -> list[Sample]:
        codec = None if given.codec is None else given.codec()
        longest = None if codec is None else int(length * (1 - ANSWER_ROOM))
        return list(longbench_files.load(known[task], codec=codec, max_length=longest))

    return Source(
        "longbench", "1", tuple(known), lambda task, length, index, seed: _at(samples(task, length), index, task)
    )


def infinitebench(given: Given) -> Source:
    """Tasks are the ten whose files the folder holds. Samples keep the files' order; the seed plays no part."""
    folder = given.infinitebench
    if folder is None or not folder.is_dir():
        raise RequestError(f"InfiniteBench's tasks need the folder of its files (--infinitebench DIR), got {folder}")
    known = tuple(name for name in infinitebench_files.TASKS if (folder / f"{name}.jsonl").is_file())
    if not known:
        raise RequestError(f"{folder} holds no InfiniteBench file such as passkey.jsonl")
    templates = infinitebench_files.templates(folder)

    @lru_cache(maxsize=4)
    def samples(task: str, length: int) -> list[Sample]:
        codec = None if given.codec is None else given.codec()
        fit = None if codec is None else length
        return list(
            infinitebench_files.load(folder / f"{task}.jsonl", template=templates[task], codec=codec, length=fit)
        )

    return Source(
        "infinitebench", "1", known, lambda task, length, index, seed: _at(samples(task, length), index, task)
    )


def multi_turn(given: Given) -> Source:
    """LoopServe's construction at each of its three positions: ``mtsyn_qa:begin`` over sets of made-up prose or of the
    user's text (``haystack``), and the sets of the user's LongBench folder if there is one."""
    found = [name for name in SETS if given.longbench is not None and (given.longbench / f"{name}.jsonl").is_file()]

    @lru_cache(maxsize=8)
    def records(name: str, length: int, seed: int, count: int) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as scratch:
            made = name in SYNTHETIC
            size = _characters(length, given)
            source = (
                generate(
                    name, Path(scratch) / "source", items=_ITEMS, seed=seed, characters=size, haystack=given.haystack
                )
                if made
                else _folder(given.longbench) / f"{name}.jsonl"
            )
            build(
                name,
                source,
                Path(scratch),
                instances=count,
                seed=seed,
                window=length,
                allow_unknown=made or given.allow_unknown,
                count_tokens=given.count_tokens,
            )
            return list(read_jsonl(Path(scratch) / f"{name}.jsonl"))

    def make(task: str, length: int, index: int, seed: int) -> Sample:
        name, _, position = task.rpartition(":")
        count = 1 << max(4, index.bit_length())  # a build's prefix is the smaller build: few sizes serve all indices
        return render(_at(records(name, length, seed, count), index, task), position)

    tasks = tuple(f"{name}:{position}" for name in (*SYNTHETIC, *found) for position in POSITIONS)
    return Source("mtlb", VERSION, tasks, make)


def _characters(length: int, given: Given) -> int:
    """Of an item's prose, so that a conversation of three comes near ``length`` tokens."""
    path = file_of(given.haystack)
    text = prose.generate(2000, 0) if path is None else " ".join(read_text(path)[:60])
    per_token = len(text) / (given.count_tokens or words)(text)
    return max(500, int(_SHARE * length * per_token / 3))


def _at(items: list[Any], index: int, task: str) -> Any:
    if index >= len(items):
        raise RequestError(f"'{task}' has {len(items)} samples; ask for no more with --samples")
    return items[index]


def _folder(folder: Path | None) -> Path:
    if folder is None or not folder.is_dir():
        raise RequestError(f"LongBench's tasks need the folder of its files (--longbench DIR), got {folder}")
    return folder


def _is_set(path: Path) -> bool:
    try:
        longbench_files.set_of(path)
    except RequestError:
        return False
    return True
