"""The builder: a LongBench file in; canonical multi-turn records and a manifest out, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.eval.multiturn.compose import Segment, TurnPlan, compose, trim
from saccade.eval.multiturn.fewshot import compose_shots, parse
from saccade.eval.multiturn.pool import Item, Pool, read_pool
from saccade.eval.multiturn.render import SEPARATOR
from saccade.eval.multiturn.rng import Stream
from saccade.eval.multiturn.segments import words
from saccade.eval.multiturn.sets import FEW_SHOT, INSTANCES, NOISE, TURNS, MultiTurnSet, find_set
from saccade.eval.samples import write_jsonl
from saccade.files import write_text

DRAWS = "mtlb-1"  # names the streams of random numbers: turns are those of version 1
VERSION = "mtlb-2"  # summaries and samsum are scored by LCS/|R|
TEMPLATE_TOKENS = 32  # allowed for one turn's chat markers
Count = Callable[[str], int]


def build(
    set_name: str,
    source: Path,
    out: Path,
    *,
    instances: int | None = None,
    seed: int = 0,
    noise: float | None = None,
    window: int | None = None,
    allow_unknown: bool = False,
    count_tokens: Count | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Write ``out/{set_name}.jsonl`` from LongBench's ``source``, and the set's part of ``out/manifest.json``, which is
    returned.

    ``instances``: how many (500; for few-shot sets every item that parses), always a prefix of a longer build.
    ``noise``: irrelevant words as a share of a turn's (0.10 QA, 0.15 summary, 0 few-shot). ``window``: tokens of a
    whole instance with its answers, as ``count_tokens`` counts (words without one); a turn that is too long loses
    noise, then whole segments. ``tokenizer``: what the manifest calls the counter. Raises RequestError for an unknown
    set, unknown data (see ``read_pool``), values out of range, and for data that give no instance.
    """
    chosen = find_set(set_name)
    share = NOISE[chosen.kind] if noise is None else noise
    _check(chosen, instances, seed, share, window)
    pool = read_pool(set_name, source, passages=chosen.passages, allow_unknown=allow_unknown)
    ruler = _Ruler(count_tokens or words)
    rejects: Counter[str] = Counter()
    plans = _few_shot(pool, chosen, seed, rejects) if chosen.kind == FEW_SHOT else _drawn(pool, chosen, seed, share)
    wanted = INSTANCES[chosen.kind] if instances is None else instances
    records: list[dict[str, Any]] = []
    tried = 0
    for number, plan in plans:
        if wanted is not None and (len(records) == wanted or tried >= 4 * wanted + 16):
            break
        tried += 1
        fitted = _fit(plan, chosen, window, ruler)
        if fitted is None:
            rejects["does not fit the window"] += 1
            continue
        records.append(_record(set_name, chosen, seed, number, window, fitted))
    if not records:
        raise RequestError(f"{source} gives no instance of '{set_name}': {_told(pool, rejects)}")
    file = out / f"{set_name}.jsonl"
    write_jsonl(file, records)
    manifest = {
        "version": VERSION,
        "set": set_name,
        "metric": chosen.metric,
        "seed": seed,
        "noise": share,
        "window": window,
        "source": {"name": source.name, "sha256": pool.sha256, "known": pool.known},
        "items": len(pool.items),
        "instances": len(records),
        "turns": TURNS[chosen.kind],
        "trimmed": sum(any(turn["trimmed"] for turn in record["turns"]) for record in records),
        "rejects": dict(sorted((pool.rejects + rejects).items())),
        "mean_tokens_per_turn": ruler.mean(records),
        "tokenizer": tokenizer or ("words" if count_tokens is None else "unnamed"),
        "paper_mean_tokens": chosen.paper_tokens,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    _merge(out / "manifest.json", manifest)
    return manifest


Fitted = list[tuple[TurnPlan, bool]]  # turns, and whether each was cut


def _drawn(pool: Pool, chosen: MultiTurnSet, seed: int, share: float) -> Iterator[tuple[int, list[TurnPlan]]]:
    number = 0
    while True:
        plan = compose(pool, chosen, TURNS[chosen.kind], share, f"{DRAWS}|{seed}|{pool.name}|{number}")
        if plan is None:
            return
        yield number, plan
        number += 1


def _few_shot(
    pool: Pool, chosen: MultiTurnSet, seed: int, rejects: Counter[str]
) -> Iterator[tuple[int, list[TurnPlan]]]:
    """Every item once, in a drawn order. All are parsed first, so that rejects do not depend on ``instances``."""
    parsed: list[Item] = []
    for item in pool.items:
        result = parse(item, chosen)
        if isinstance(result, str):
            rejects[result] += 1
        else:
            parsed.append(result)
    Stream(f"{DRAWS}|{seed}|{pool.name}|all|items").shuffle(parsed)
    for number, item in enumerate(parsed):
        yield number, compose_shots(item, chosen)


def _fit(plan: list[TurnPlan], chosen: MultiTurnSet, window: int | None, ruler: _Ruler) -> Fitted | None:
    if window is None:
        return [(turn, False) for turn in plan]
    fixed = sum(ruler.count(turn.question + SEPARATOR + chosen.cue) for turn in plan)
    budget = (window - len(plan) * (chosen.max_new_tokens + TEMPLATE_TOKENS) - fixed) // len(plan)
    fitted = [trim(turn, budget, {id(one): ruler.segment(one) for one in turn.segments}) for turn in plan]
    return [turn for turn in fitted if turn is not None] if None not in fitted else None


def _record(
    name: str, chosen: MultiTurnSet, seed: int, number: int, window: int | None, turns: Fitted
) -> dict[str, Any]:
    return {
        "id": f"{name}/{seed}/{number}",
        "version": VERSION,
        "set": name,
        "seed": seed,
        "instance": number,
        "window": window,
        "items": [plan.item.id for plan, _ in turns],
        "turns": [_turn(chosen, plan, cut) for plan, cut in turns],
    }


def _turn(chosen: MultiTurnSet, plan: TurnPlan, cut: bool) -> dict[str, Any]:
    """Turns are numbered from 1, as in the paper. ``span``: the segment in the turn's context, that is all segments,
    each with a separator after it; ``context_span``: its text without label in its item's context."""
    segments = []
    at = 0
    for one in plan.segments:
        segments.append(
            {
                "text": one.text,
                "span": [at, at + len(one.text)],
                "item": one.item.id,
                "context_span": list(one.item.slices[one.number]),
                "owner": None if one.owner is None else one.owner + 1,
                "answer": one.answer,
            }
        )
        at += len(one.text) + len(SEPARATOR)
    meta: dict[str, Any] = {}
    if plan.item.all_classes:
        meta["all_classes"] = list(plan.item.all_classes)
    if chosen.kind == FEW_SHOT:
        meta["first_line"] = True
    return {
        "segments": segments,
        "question": plan.question,
        "prefix": chosen.cue,
        "answers": list(plan.item.answers),
        "metric": chosen.metric,
        "max_new_tokens": chosen.max_new_tokens,
        "relevant_turns": [turn + 1 for turn in plan.relevant_turns],
        "position_free": not segments,
        "trimmed": cut,
        "meta": meta,
    }


class _Ruler:
    """Counts tokens, each segment once."""

    def __init__(self, count: Count) -> None:
        self.count = count
        self.seen: dict[str, int] = {}

    def segment(self, one: Segment) -> int:
        return self.text(one.text)

    def text(self, text: str) -> int:
        if text not in self.seen:
            self.seen[text] = self.count(text + SEPARATOR)
        return self.seen[text]

    def mean(self, records: list[dict[str, Any]]) -> float:
        """Tokens of a turn, context and question."""
        turns = [turn for record in records for turn in record["turns"]]
        texts = [text for turn in turns for text in [turn["question"], *(one["text"] for one in turn["segments"])]]
        return round(sum(self.text(text) for text in texts) / len(turns), 2)


def _merge(path: Path, manifest: dict[str, Any]) -> None:
    """Put the set's manifest among those of the folder's other sets."""
    sets = json.loads(path.read_text(encoding="utf-8"))["sets"] if path.is_file() else {}
    sets[manifest["set"]] = manifest
    text = json.dumps({"version": VERSION, "sets": sets}, indent=1, sort_keys=True, ensure_ascii=False)
    write_text(path, text + "\n")


def _check(chosen: MultiTurnSet, instances: int | None, seed: int, share: float, window: int | None) -> None:
    if instances is not None and instances < 1:
        raise RequestError(f"instances={instances} must be at least 1")
    if seed < 0:
        raise RequestError(f"seed={seed} must not be negative")
    if not 0 <= share <= 10:
        raise RequestError(f"noise={share} must be from 0 to 10, a share of each turn's relevant words")
    if share and chosen.kind == FEW_SHOT:
        raise RequestError(f"noise={share} must be 0 for few-shot sets: other items' examples would be examples too")
    if window is not None and window < 1:
        raise RequestError(f"window={window} must be at least 1 token")


def _told(pool: Pool, rejects: Counter[str]) -> str:
    left = ", ".join(f"{count} {reason}" for reason, count in sorted((pool.rejects + rejects).items()))
    return f"{len(pool.items)} items with answers; left out: {left or 'none'}"
