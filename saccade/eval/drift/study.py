"""The whole measurement: dense, the policies, the rounding of bfloat16; a line a row as it is done, and resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.engine.settings.config import EngineConfig
from saccade.eval.drift.measure import compared, run
from saccade.eval.drift.page import page
from saccade.eval.drift.recommend import BOUND, Advice, recommend
from saccade.eval.drift.rows import DENSE, ROUNDING, Row, rows_of
from saccade.eval.predict import described_model
from saccade.eval.results import Log, check_environment, environment, open_folder
from saccade.eval.setting import load
from saccade.files import write_text
from saccade.llm import LLM
from saccade.methods.policy import Policy
from saccade.passage import Passage

RECORDS, REPORT = "rows.jsonl", "report.md"
EXACT, ROUNDED = torch.float32, torch.bfloat16

Source = Callable[[LLM], tuple[str, Passage]]  # the text's name, and its tokens for a model
Say = Callable[[str], None]


def measure_drift(
    config: EngineConfig,
    source: Source,
    policies: Sequence[Policy],
    out: Path,
    *,
    seed: int = 0,
    bound: float = BOUND,
    rounding: bool = True,
    weights: bool = True,
    mix: bool = False,
    note: Say = lambda text: None,
    started: Callable[[LLM], Any] = lambda llm: None,
) -> tuple[dict[str, Any], list[Row], Advice]:
    """Measure what is missing in the folder ``out`` and write its report. Returns its config, the rows asked for, and
    what they recommend.

    Rows that the folder holds are not run again; it may hold those of other policies too. ``rounding``: measure dense
    in bfloat16 beside float32 too, which loads the model a second time, after the first is gone. ``weights``: measure
    the true weight kept. ``mix``: continue a folder that other versions or machines began. RequestError for a folder of
    another setting; SaccadeError as for any run."""
    names = list(dict.fromkeys(policy.text for policy in policies if policy != Policy()))
    config = replace(config, enable_prefix_caching=True)  # policies that prefill alike share one prefill
    with load(config) as llm:
        started(llm)
        for name in names:
            llm.engine.checks.policy(Policy.parse(name))
        text, passage = source(llm)
        llm.engine.checks.prompt(list(passage.ids[:-1]))
        setting = _setting(llm, config, text, passage, seed, weights)
        rounding = rounding and _has_rounding(llm, config, note)
        open_folder(out, setting)
        with Log(out / RECORDS) as log:
            missing = [name for name in (DENSE, *names) if name not in _done(log)]
            late = rounding and ROUNDING not in _done(log)
            dense: Tensor | None = None
            if missing or late:
                if log.records:
                    check_environment(out, setting, mix)
                dense = _policies(llm, passage, missing, log, seed, weights, note)
    if late:
        assert dense is not None, "dense ran, as a row is missing"
        with Log(out / RECORDS) as log:
            log.append(_rounded(config, dense, passage, setting["model"]["dtype"]))
            note(f"{ROUNDING}: done")
    with Log(out / RECORDS) as log:
        by_id = {record["id"]: record for record in log.records}
    wanted = [DENSE, *([ROUNDING] if ROUNDING in by_id and rounding else []), *names]
    rows = rows_of([by_id[name] for name in wanted], seed)
    advice = recommend(rows, bound)
    write_text(out / REPORT, page(setting, rows, advice))
    return setting, rows, advice


def _policies(
    llm: LLM, passage: Passage, missing: Sequence[str], log: Log, seed: int, weights: bool, note: Say
) -> Tensor:
    """Run dense and the ``missing`` rows; returns dense's logits [steps, vocab]."""
    dense, ran = run(llm, passage, Policy(), seed=seed, weights=weights)
    for number, name in enumerate(missing, 1):
        own = dense
        if name != DENSE:
            own, ran = run(llm, passage, Policy.parse(name), seed=seed, weights=weights)
        found = compared(own, dense, passage)
        log.append({"id": name, **found, **ran})
        note(f"{name}: KL {sum(found['kl']) / passage.steps:.4f} ({number}/{len(missing)})")
    return dense


def _rounded(config: EngineConfig, dense: Tensor, passage: Passage, dtype: str) -> dict[str, Any]:
    """The record of dense in bfloat16 beside dense in float32, of which ``dense`` is one."""
    other = ROUNDED if dtype == "float32" else EXACT
    with load(replace(config, dtype=other)) as llm:
        logits, _ = run(llm, passage, Policy(), weights=False)
    exact, rounded = (dense, logits) if other == ROUNDED else (logits, dense)
    own = compared(rounded, exact, passage)
    return {"id": ROUNDING, **own, "nll_exact": compared(exact, exact, passage)["nll"]}


def _has_rounding(llm: LLM, config: EngineConfig, note: Say) -> bool:
    if config.quantize is None and llm.model.spec.dtype in (EXACT, ROUNDED):
        return True
    what = config.quantize or str(llm.model.spec.dtype).removeprefix("torch.")
    note(f"the rounding of bfloat16 is left out: it is measured beside float32 and bfloat16, not {what}")
    return False


def _setting(llm: LLM, config: EngineConfig, text: str, passage: Passage, seed: int, weights: bool) -> dict[str, Any]:
    """Everything a row depends on but its policy, as plain data."""
    ids = json.dumps(list(passage.ids)).encode()
    return {
        "model": described_model(llm, config),
        "text": {
            "name": text,
            "tokens_sha256": hashlib.sha256(ids).hexdigest(),
            "context": passage.context,
            "tokens": passage.steps,
        },
        "seed": seed,
        "weights": weights,
        **environment(str(llm.model.device)),
    }


def _done(log: Log) -> set[str]:
    return {record["id"] for record in log.records}
