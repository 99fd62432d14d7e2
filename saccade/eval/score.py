"""Scoring predictions: needs the samples and the predictions, never the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.eval.metrics import METRICS
from saccade.eval.metrics.longgen import LINE_METRICS, last_line
from saccade.eval.predict import take
from saccade.eval.results import CONFIG, PREDICTIONS, SCORES, Log, file_hash, read_json
from saccade.eval.samples import Sample, Turn, write_jsonl

Metric = Callable[..., float]


def score_folder(folder: Path, data: Path | None = None, metrics: Mapping[str, Metric] | None = None) -> Path:
    """Score a result folder's predictions into its scores.jsonl, one line a sample, and return that file's path.

    ``data``: the samples, where they are not where config.json says. Raises RequestError if they are missing or are not
    the ones that were answered, or if a metric is unknown.
    """
    config = read_json(folder / CONFIG)
    data = Path(config["data"]["path"]) if data is None else data
    if not data.is_file():
        raise RequestError(f"the samples {data} of {folder} do not exist; give them with --data")
    if file_hash(data) != config["data"]["sha256"]:
        raise RequestError(f"{data} is not what {folder} answered: its content has changed; prepare it again")
    scorers = METRICS if metrics is None else metrics
    with Log(folder / PREDICTIONS) as log:
        records = log.records
    samples = {sample.id: sample for sample in take(data, None)}
    rows = [score_record(samples[record["id"]], record, scorers) for record in records if record["id"] in samples]
    write_jsonl(folder / SCORES, rows)
    return folder / SCORES


def score_record(sample: Sample, record: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """One sample's scores (0 to 1; the mean of its turns), what stood where, and its cost.

    Lines of a long answer also have ``end``: 1 where the last one is right.
    A sample that could not be asked (too long, say) has no score; one that failed while it ran scores 0.
    """
    answered: list[dict[str, Any]] = record["turns"]
    scores: list[float | None] = []
    ends: list[float] = []
    for turn, said in zip(sample.turns, answered):
        if turn.metric not in metrics:
            known = ", ".join(sorted(metrics))
            raise RequestError(
                f"sample '{sample.id}' wants the metric '{turn.metric}', which is unknown; known: {known}"
            )
        ends.append(last_line(said["prediction"], turn.answers) if turn.metric in LINE_METRICS else 0.0)
        scores.append(0.0 if said["finish"] == "error" else _score(turn, said["prediction"], metrics[turn.metric]))
    if record["failed"]:
        missing = [0.0] * (len(sample.turns) - len(scores))
        scores, ends = [*scores, *missing], [*ends, *missing]
    complete = len(scores) == len(sample.turns)
    return {
        **{key: record[key] for key in ("id", "task", "length", "index", "protocol", "error")},
        "score": sum(score or 0.0 for score in scores) / len(scores) if complete and scores else None,
        "turns": [
            {
                "score": score if complete else None,
                "position": turn.position,
                "depth": turn.meta.get("depth", sample.meta.get("depth")),
                **({"end": end} if turn.metric in LINE_METRICS else {}),
            }
            for turn, score, end in zip(sample.turns, scores, ends)
        ],
        "prompt_tokens": max((part["prompt_tokens"] for part in answered), default=0),
        "empty": sum(not said["prediction"].strip() for said in answered),
        "notes": list(dict.fromkeys(note for part in _parts(record) for note in part["notes"])),
        "cost": total_cost(record),
    }


def _score(turn: Turn, prediction: str, metric: Metric) -> float:
    if turn.meta.get("first_line"):  # LongBench's rule for its few-shot sets
        prediction = prediction.lstrip("\n").split("\n")[0]
    options = {"all_classes": turn.meta["all_classes"]} if turn.metric == "classification_score" else {}
    return float(metric(prediction, turn.answers, **options))


def total_cost(record: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of all requests of a sample together, the shared context's included."""
    parts = _parts(record)
    return {
        phase: {name: sum(part[phase][name] for part in parts) for name in (parts[0][phase] if parts else ())}
        for phase in ("prefill", "decode")
    }


def _parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A sample's requests."""
    return [*([record["context"]] if record.get("context") else []), *record["turns"]]
