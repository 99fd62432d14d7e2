"""The steps in one: prepare the samples of a size, run policies over them, score, and fold everything into a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.haystack import PROSE, file_of
from saccade.eval.predict import predict
from saccade.eval.results import differences, file_hash, read_json, slug, write_json
from saccade.eval.samples import write_jsonl
from saccade.eval.score import Metric, score_folder
from saccade.eval.setting import Setting, sparse_in
from saccade.eval.sources import Given, Loader, family, find_tasks, is_fitted
from saccade.eval.summary import Group, Run
from saccade.eval.weak import dense_score
from saccade.llm import LLM
from saccade.methods.dense import DenseMethod
from saccade.methods.policy import Policy
from saccade.methods.random_choice import RandomChoice
from saccade.methods.streaming import Streaming
from saccade.methods.topk import TopK
from saccade.models.folders import checkpoint_folder
from saccade.models.reference import NAME as RETRIEVER
from saccade.models.reference import NAMES as BUILT_IN
from saccade.models.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Size:
    """How much is run. ``tasks``: of the suite, for the built-in models; ``samples`` of each task and length."""

    lengths: tuple[int, ...]
    samples: int
    tasks: tuple[str, ...] = ("all",)


SIZES = {
    "smoke": Size((2048,), 5, ("single", "multikey", "vt", "span_copy")),
    "core": Size((2048, 4096, 8192), 100),
    "full": Size((2048, 4096, 8192, 16384, 32768), 200),
}
# What a pretrained model is asked where no task is named, at every size: sources of other abilities are added here.
MODEL_TASKS = ("natural:all", "ruler:all", "long:all")
# Besides dense, and the oracle at the budget that was measured for each.
POLICIES = ("streaming(sinks=4, window=256)", "flexprefill(block_size=64, min_budget=256)", "psa")
ORACLES = ("decode", "both", "none")
Note = Callable[[str], None]


def size_named(name: str) -> Size:
    """RequestError for an unknown size, listing the known ones."""
    if name not in SIZES:
        raise RequestError(f"unknown size '{name}'; known: {', '.join(SIZES)}")
    return SIZES[name]


def default_tasks(tasks: Sequence[str], model: str | None) -> list[str]:
    """What ``model`` is asked where no task is named. ``tasks``: of the suite, which is in the language of the built-in
    reference model. The built-in retriever is asked its facts, and any other model MODEL_TASKS."""
    if model == RETRIEVER:
        return ["facts:all"]
    return list(tasks if model is None or model in BUILT_IN else MODEL_TASKS)


def data_name(
    size: str,
    tasks: Sequence[str],
    lengths: Sequence[int] | None,
    samples: int | None,
    seed: int,
    model: str | None = None,
    haystack: str = PROSE,
) -> str:
    """A readable name of what was asked for: the size, and what replaces its values; of samples that are fitted to a
    tokenizer, also the model and the text."""
    parts = [size]
    if tuple(tasks) not in (size_named(size).tasks, MODEL_TASKS):
        parts.append("+".join(slug(task) for task in tasks))
    parts += ["+".join(map(str, lengths))] if lengths else []
    parts += [f"n{samples}"] if samples is not None else []
    parts += [f"seed{seed}"] if seed else []
    if is_fitted(tasks):
        path = file_of(haystack)
        parts += [slug(Path(model).name)] if model is not None else []
        parts += [slug(path.stem)] if path is not None else []
    return "-".join(parts)


def given_by(
    model: str | None,
    longbench: Path | None = None,
    haystack: str = PROSE,
    corpus: Path | None = None,
    allow_unknown: bool = False,
    infinitebench: Path | None = None,
) -> Given:
    """What sources may need; the model's tokenizer is loaded when it is first used."""
    if model is None:
        return Given(None, None, longbench, haystack, corpus, allow_unknown, infinitebench)

    @lru_cache(maxsize=1)
    def tokenizer() -> Tokenizer:
        return load_tokenizer(checkpoint_folder(model))

    def count(text: str) -> int:
        return len(tokenizer().encode(text, add_special_tokens=False))

    return Given(count, tokenizer, longbench, haystack, corpus, allow_unknown, infinitebench)


def prepare(
    out: Path,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
    *,
    name: str = "samples",
    given: Given | None = None,
    sources: Mapping[str, Loader] | None = None,
    dealt: bool = False,
) -> Path:
    """Write ``samples`` samples of every task and length to ``out``/``name``.jsonl, what they are to ``name``.json, and
    return the jsonl's path. The order is by index first, so that a prefix is a smaller run of all tasks. ``dealt``:
    ``samples`` of every family and length instead, dealt out to its tasks (see ``family``), rounded up.

    Samples that are there already for the same request are left alone. Raises RequestError for unknown tasks, numbers
    out of range, or a file of the same name made for another request.
    """
    for what, value, least in (("samples", samples, 1), ("seed", seed, 0), *(("length", n, 64) for n in lengths)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RequestError(f"{what}={value!r} must be an integer >= {least}")
    if not lengths or not tasks:
        raise RequestError("give at least one task and one length")
    found = find_tasks(tasks, given, sources)
    fitted = {"fitted_to": given.fitted_to()} if given is not None and is_fitted(task.name for task in found) else {}
    wanted: dict[str, Any] = {
        **fitted,
        "name": name,
        "tasks": [task.name for task in found],
        "lengths": list(lengths),
        "samples": samples,
        **({"dealt": True} if dealt else {}),
        "seed": seed,
        "sources": {task.source.name: task.source.version for task in found},
    }
    data, manifest = out / f"{name}.jsonl", out / f"{name}.json"
    if manifest.is_file() and data.is_file():
        stored = read_json(manifest)
        different = differences(stored, {**wanted, "sha256": stored.get("sha256")})
        if different:
            raise RequestError(
                f"{data} holds other samples: {'; '.join(different)}. Give another --out, or remove the file"
            )
        if file_hash(data) != stored["sha256"]:
            raise RequestError(f"{data} has been changed since it was made; remove it to make it again")
        return data
    sizes = Counter(family(task.name) for task in found)
    counts = {task.name: -(-samples // sizes[family(task.name)]) if dealt else samples for task in found}
    try:
        write_jsonl(
            data,
            (
                task.sample(length, index, seed).as_dict()
                for index in range(max(counts.values()))
                for task in found
                if index < counts[task.name]
                for length in lengths
            ),
        )
    except OSError as error:
        raise RequestError(f"{data} cannot be written: {error.strerror}; choose another folder") from None
    write_json(manifest, {**wanted, "sha256": file_hash(data)})
    return data


def run_policies(
    data: Path,
    llm: LLM,
    model: EngineConfig,
    policies: Sequence[str],
    results: Path,
    *,
    protocol: str = "A",
    history: str = "self",
    limit: int | None = None,
    oracle: str = "decode",
    mix: bool = False,
    workers: int = 1,
    together: int = 1,
    metrics: Mapping[str, Metric] | None = None,
    note: Note = lambda text: None,
) -> list[Path]:
    """Predict and score dense, every policy, and the oracle at the budget measured for it; the folders in that order.

    ``protocol`` B holds for policies with a dense prefill; the others keep the letter that follows from them.
    ``workers`` and ``together`` as in ``predict``.
    ``oracle``: ``decode`` runs exact top-k beside every selective decode method, ``both`` also beside prefill methods
    (slow), ``none`` runs neither it nor, unless it is listed, dense. A dense run that scores below half of what is
    possible is noted at once.
    """
    if oracle not in ORACLES:
        raise RequestError(f"oracle={oracle!r} is unknown; known: {', '.join(ORACLES)}")
    parsed = [Policy.parse(text) for text in policies]
    queue = list(dict.fromkeys([*([] if oracle == "none" else [Policy()]), *parsed]))
    settings = [_setting(policy, protocol, history) for policy in queue]

    def run(setting: Setting) -> Path:
        note(f"{setting.policy.text} (protocol {setting.letter})")
        folder = predict(
            data,
            llm,
            model,
            setting,
            results,
            limit=limit,
            mix=mix,
            workers=workers,
            together=together,
            progress=_progress(note),
        )
        score_folder(folder, data, metrics)
        say_weak(folder, note)
        return folder

    folders = [run(setting) for setting in settings]
    if oracle != "none":
        twins = [
            twin for setting, folder in zip(settings, folders) if (twin := oracle_twin(setting, folder, parsed, oracle))
        ]
        folders += [run(twin) for twin in dict.fromkeys(twins) if twin not in settings]
    return folders


def say_weak(folder: Path, note: Note) -> None:
    """Note at once that dense attention scores too low for comparisons, if ``folder`` is dense's."""
    run = Run.load(folder)
    dense = dense_score(run) if run.policy == Policy().text else None
    if dense is not None and dense.warning is not None:
        note(f"warning: {dense.warning}")


def oracle_twin(setting: Setting, folder: Path, policies: Sequence[Policy], oracle: str) -> Setting | None:
    """The exact top-k at the density that ``folder`` measured, or None where there is nothing to compare.

    Baselines that choose by position or by chance have a twin only if no policy beside them selects.
    """
    policy = setting.policy
    compared = _selects(policy) or not any(map(_selects, policies))
    cell = Group([run := Run.load(folder)]).cell(run)
    decode, prefill = cell.density("decode"), cell.density("prefill")
    twin = Policy()
    if compared and decode and sparse_in("decode", policy) and not isinstance(policy.decode, TopK):
        twin = replace(twin, decode=_topk(decode, prefill=False))
    if oracle == "both" and prefill and sparse_in("prefill", policy) and not isinstance(policy.prefill, TopK):
        twin = replace(twin, prefill=_topk(prefill, prefill=True))
    return None if twin == Policy() else _setting(twin, setting.protocol, setting.history)


def _selects(policy: Policy) -> bool:
    return sparse_in("decode", policy) and not isinstance(policy.decode, (TopK, Streaming, RandomChoice))


def _topk(density: float, prefill: bool) -> TopK | DenseMethod:
    share = float(f"{density:.2g}")
    return TopK(k=share, prefill=prefill) if share < 1 else DenseMethod()


def _setting(policy: Policy, protocol: str, history: str) -> Setting:
    """Protocol B where it can hold."""
    return Setting(policy, "A" if sparse_in("prefill", policy) else protocol, history)


def _progress(note: Note) -> Callable[[int, int], None]:
    def say(done: int, whole: int) -> None:
        if done == whole or done % max(1, whole // 10) == 0:
            note(f"  {done}/{whole}")

    return say
