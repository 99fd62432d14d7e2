"""The predict step: one model, one policy, one protocol; a line a sample as it finishes, resumed by id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.answer import answer
from saccade.eval.results import (
    PREDICTIONS,
    TIMINGS,
    Log,
    check_environment,
    environment,
    file_hash,
    open_folder,
    read_json,
    slug,
    tokenizer_hash,
    weights_hash,
)
from saccade.eval.samples import Sample, read_jsonl
from saccade.eval.setting import Setting, sparse_in
from saccade.eval.workers import answers_in_order
from saccade.llm import LLM

__all__ = ["Setting", "answer", "configuration", "predict", "sparse_in", "take"]

Progress = Callable[[int, int], None]  # samples done, samples in all


def predict(
    data: Path,
    llm: LLM,
    model: EngineConfig,
    setting: Setting,
    results: Path,
    *,
    limit: int | None = None,
    mix: bool = False,
    workers: int = 1,
    together: int = 1,
    progress: Progress | None = None,
    until: float | None = None,
) -> Path:
    """Answer the samples of ``data`` (jsonl) and return the result folder, below ``results``.

    ``limit``: samples of each task and length, a prefix of the file. ``mix``: continue a folder that other versions
    began, and say so in its config. ``workers``: processes that answer side by side, each with a model of its own;
    ``together``: samples that ``llm`` answers at once instead. ``until``, on ``monotonic``'s clock: when what is being
    answered is ended, with everything else that ``llm`` runs, and left out (without ``workers``).
    What the folder holds already is kept, so a killed run goes on where it was and ends with the same predictions file.
    Raises RequestError for a folder of another setting, for one begun by another version that is incomplete, and for
    predictions that do not follow the samples.
    """
    config = configuration(data, llm, model, setting)
    folder = results / folder_name(config)
    open_folder(folder, config)
    samples = list(take(data, limit))
    with Log(folder / PREDICTIONS) as log, Log(folder / TIMINGS) as timings:
        check_order(log, samples)
        missing = samples[len(log.records) :]
        if missing and log.records:
            check_environment(folder, config, mix)
        answers = answers_in_order(missing, llm, model, setting, workers, together, until)
        for done, (sample, (record, timing)) in enumerate(zip(missing, answers), len(log.records) + 1):
            timings.append({"id": sample.id, **timing})
            log.append(record)
            if progress is not None:
                progress(done, len(samples))
    return folder


def configuration(data: Path, llm: LLM, model: EngineConfig, setting: Setting) -> dict[str, Any]:
    """Everything a result depends on, as plain data."""
    manifest = data.with_suffix(".json")
    described = read_json(manifest) if manifest.is_file() else {}
    return {
        "model": described_model(llm, model),
        "policy": setting.policy.text,
        "protocol": setting.letter,
        "history": setting.history,
        "data": {
            "path": str(data.resolve()),
            "sha256": _data_hash(data),
            **{key: described.get(key) for key in ("name", "seed", "sources")},
        },
        **environment(str(llm.model.device)),
    }


def described_model(llm: LLM, model: EngineConfig) -> dict[str, Any]:
    """What a result depends on of the model that runs, as plain data."""
    spec = llm.model.spec
    return {
        "name": str(model.model),
        **{key: getattr(model, key) for key in ("prefill_chunk", "backend", "device")},
        "path": str(llm.model.path),
        "weights_sha256": _weights(llm),
        "identity": llm.model.identity.digest,
        "tokenizer_hash": _tokenizer(llm),
        "dtype": str(spec.dtype).removeprefix("torch."),
        **({} if model.quantize is None else {"quantize": model.quantize}),
        **({} if model.lora is None else {"lora": str(model.lora)}),
        **{key: value for key, value in stored_as(model).items() if value is not None},
        "threads": model.threads or torch.get_num_threads(),  # sums are rounded in an order that depends on it
        "max_model_len": llm.max_model_len,
        "shape": {"layers": spec.layers, "heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim},
    }


def stored_as(model: EngineConfig) -> dict[str, Any]:
    """What was asked of how keys and values are stored, by option; None where nothing was."""
    return {"kv_dtype": None if model.kv_dtype == "auto" else model.kv_dtype, "kv_rotate": model.kv_rotate}


def folder_name(config: dict[str, Any]) -> str:
    """Readable, and the same for the same setting; config.json decides."""
    model, data = config["model"], config["data"]
    parts = [Path(model["name"]).name, config["policy"], config["protocol"], data["name"] or Path(data["path"]).stem]
    parts += ["gold"] if config["history"] == "gold" else []
    parts += [model["kv_dtype"]] if "kv_dtype" in model else []
    parts += ["rotated" if model["kv_rotate"] else "as-is"] if "kv_rotate" in model else []
    return "__".join(map(slug, parts))


def take(data: Path, limit: int | None) -> Iterator[Sample]:
    """The samples, or those of the first ``limit`` indices: a prefix, since a file is ordered by index."""
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RequestError(f"limit={limit!r} must be an integer >= 1: samples of each task and length")
    if not data.is_file():
        raise RequestError(f"{data} does not exist; make it with saccade eval prepare")
    first: int | None = None
    for record in read_jsonl(data):
        sample = Sample.from_dict(record)
        first = sample.index if first is None else first
        if limit is not None and sample.index >= first + limit:
            return
        yield sample


def check_order(log: Log, samples: list[Sample]) -> None:
    """Raise RequestError unless the predictions are those of the first samples, or of all and more."""
    for number, (record, sample) in enumerate(zip(log.records, samples), 1):
        if record["id"] != sample.id:
            raise RequestError(
                f"{log.path}, line {number} answers '{record['id']}' where the data has '{sample.id}'; remove that "
                "line and what follows it"
            )


_HASHES: dict[str, str] = {}
_TOKENIZERS: WeakKeyDictionary[LLM, str | None] = WeakKeyDictionary()


def _weights(llm: LLM) -> str:
    """Hashed once a process: checkpoints can be large."""
    path = str(llm.model.path)
    if path not in _HASHES:
        _HASHES[path] = weights_hash(llm.model.path)
    return _HASHES[path]


def _tokenizer(llm: LLM) -> str | None:
    """Hashed once a model: a large vocabulary takes a third of a second, and a board asks at every setting."""
    if llm not in _TOKENIZERS:
        _TOKENIZERS[llm] = tokenizer_hash(llm.get_tokenizer())
    return _TOKENIZERS[llm]


def _data_hash(data: Path) -> str:
    if not data.is_file():
        raise RequestError(f"{data} does not exist; make it with saccade eval prepare")
    return file_hash(data)
