"""Load for any OpenAI server: requests that arrive when they arrive, and how long their clients waited."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.bench.serve_client import Sample, Target, complete
from saccade.errors import SaccadeError, shown

MIXES = ("chat", "documents", "sessions", "longbench")
# PSA's eight sets (its section 5.1): the mean words of a prompt and the most tokens of an answer in LongBench.
LONGBENCH = {
    "hotpotqa": (9151, 32),
    "2wikimqa": (4887, 32),
    "multifieldqa_en": (4559, 64),
    "qasper": (3619, 128),
    "gov_report": (8734, 512),
    "qmsum": (10614, 512),
    "multi_news": (2113, 512),
    "samsum": (6258, 128),
}
SPREAD = 0.4  # of their prompts' lengths
TURNS = 4  # of a session
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """``mix``: ``chat``, short prompts and answers whose lengths are log-normal, as in ShareGPT; ``documents``, long
    texts with a question and a short answer; ``sessions``, conversations of four turns over a document; ``longbench``,
    prompts and answers as long as those of the eight sets of LongBench that PSA combines in one trace. ``rate``:
    arrivals a second, Poisson; None sends all at once. ``concurrency``: most requests at work. ``scale`` multiplies
    lengths. ``trace``: lines of JSON with ``at`` (seconds), ``prompt_words`` and ``max_tokens`` in place of the mix."""

    mix: str = "chat"
    requests: int = 100
    rate: float | None = None
    concurrency: int = 32
    scale: float = 1.0
    seed: int = 0
    limit: float = 600.0
    trace: Path | None = None


@dataclass(frozen=True)
class Planned:
    """``turns``: what a client asks one after the other; each has its words and most tokens of its answer."""

    at: float
    turns: list[tuple[int, int]]
    number: int


def plan(load: Load) -> list[Planned]:
    """Who comes when, and asks what; the same for the same seed."""
    if load.trace is not None:
        return _traced(load.trace)
    rng, at, planned = random.Random(load.seed), 0.0, []
    turns = TURNS if load.mix == "sessions" else 1
    for number in range(math.ceil(load.requests / turns)):
        if load.mix == "chat":
            asked = [(_lognormal(rng, 160, 1.0, load.scale), _lognormal(rng, 150, 0.8, load.scale))]
        elif load.mix == "longbench":
            mean, most = rng.choice(list(LONGBENCH.values()))
            median = mean * math.exp(-(SPREAD**2) / 2)
            asked = [(_lognormal(rng, median, SPREAD, load.scale), max(4, round(load.scale * most)))]
        else:
            asked = [(_lognormal(rng, 6000, 0.6, load.scale), _lognormal(rng, 60, 0.5, load.scale))]
            asked += [(_lognormal(rng, 30, 0.5, load.scale), asked[0][1]) for _ in range(turns - 1)]
        planned.append(Planned(at, asked, number))
        at += 0.0 if load.rate is None else rng.expovariate(load.rate / turns)
    return planned


def _lognormal(rng: random.Random, median: float, spread: float, scale: float) -> int:
    return max(4, round(scale * median * math.exp(rng.gauss(0.0, spread))))


def _traced(path: Path) -> list[Planned]:
    planned = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            planned.append(Planned(float(row["at"]), [(int(row["prompt_words"]), int(row["max_tokens"]))], number))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SaccadeError(
            f"trace={shown(str(path))} must have lines of JSON with at, prompt_words and max_tokens: {error}"
        ) from error
    return planned


def words(count: int, seed: int) -> str:
    """Seeded text without sense, each client's its own, so that no two share a prefix by chance."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "il", "os")]
    return " ".join("".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3)))) for _ in range(count))


async def run(target: Target, load: Load) -> tuple[list[Sample], float]:
    """Put the load on a server: a sample for each request, and the seconds from the first arrival to the last end."""
    gate, began = asyncio.Semaphore(load.concurrency), time.perf_counter()

    async def client(one: Planned) -> list[Sample]:
        await asyncio.sleep(max(0.0, began + one.at - time.perf_counter()))
        messages: list[dict[str, str]] = []
        samples: list[Sample] = []
        for turn, (count, most) in enumerate(one.turns):
            text = words(count, load.seed * 1_000_003 + one.number * 101 + turn)
            messages.append({"role": "user", "content": f"{text}\nWhat is this about?"})
            body: dict[str, Any] = {"messages": messages, "max_tokens": most}
            if len(one.turns) > 1 and "session_id" in target.fields:
                body["session_id"] = f"{target.fields['session_id']}-{one.number}"
            async with gate:
                fields = {name: value for name, value in target.fields.items() if name != "session_id"}
                served = Target(target.url, target.model, target.api_key, fields)
                samples.append(await complete(served, body, began, load.limit))
            if samples[-1].error is not None:
                break
            messages.append({"role": "assistant", "content": samples[-1].text})
        return samples

    found = await asyncio.gather(*[client(one) for one in plan(load)])
    return [sample for samples in found for sample in samples], time.perf_counter() - began


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """``p50``, ``p90``, ``p99`` by nearest rank; null without values."""
    ranked = sorted(values)
    return {
        f"p{share}": ranked[max(0, math.ceil(share / 100 * len(ranked)) - 1)] if ranked else None
        for share in _PERCENTILES
    }


def summary(samples: Sequence[Sample], seconds: float, first_limit: float, gap_limit: float) -> dict[str, Any]:
    """What clients saw. ``goodput``: requests a second whose first token came within ``first_limit`` seconds and whose
    later ones came ``gap_limit`` seconds apart on average."""
    good = [one for one in samples if one.error is None]

    def met(one: Sample) -> bool:
        return one.first is not None and one.first <= first_limit and (not one.gaps or fmean(one.gaps) <= gap_limit)

    densities = {
        phase: [value for one in good if (value := one.density.get(phase)) is not None]
        for phase in ("prefill", "decode")
    }
    return {
        "requests": len(samples),
        "completed": len(good),
        "rejected": sum(one.status == 429 for one in samples),
        "failed": sum(one.error is not None and one.status != 429 for one in samples),
        "errors": sorted({one.error for one in samples if one.error is not None})[:5],
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": sum(one.output_tokens for one in good) / seconds,
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "cached_tokens": sum(one.cached_tokens for one in good),
        "first_token_seconds": percentiles([one.first for one in good if one.first is not None]),
        "inter_token_seconds": percentiles([gap for one in good for gap in one.gaps]),
        "total_seconds": percentiles([one.total for one in good]),
        "goodput": sum(map(met, good)) / seconds,
        "limits": {"first_token_seconds": first_limit, "inter_token_seconds": gap_limit},
        "density": {phase: fmean(values) if values else None for phase, values in densities.items()},
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A summary for people."""
    for name in ("requests", "completed", "rejected", "failed", "prompt_tokens", "cached_tokens"):
        yield name.replace("_", " "), f"{found[name]:,}"
    for name in ("seconds", "requests_per_second", "goodput", "output_tokens_per_second"):
        yield name.replace("_", " "), f"{found[name]:.2f}"
    for name in ("first_token_seconds", "inter_token_seconds", "total_seconds"):
        told = [f"{share} {value:.4f}" for share, value in found[name].items() if value is not None]
        yield name.replace("_", " "), ", ".join(told) or "none"
    for phase, value in found["density"].items():
        if value is not None:
            yield f"{phase} density", f"{value:.3f}"
    for error in found["errors"]:
        yield "error", error


def as_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Samples without their text."""
    return [{name: value for name, value in asdict(one).items() if name != "text"} for one in samples]
