"""Trains the reference model: ``python -m train.reference --size S --out DIR``. Seeded and resumable.

The curriculum goes from short to long contexts; every stage keeps some of the shorter ones. Data are made while
training, by worker processes, as a function of the seed, the step and the task mix, which moves towards what is not
mastered yet. Learning rate: linear warm-up, constant, linear decay over the last part (WSD), so that a run can be
prolonged from any checkpoint before the decay. With ``--paced`` stages and decay follow the clock in place of tokens:
the run is whole after ``--minutes`` on any machine, but two runs are not the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from saccade.eval.suite.rng import Rng
from train import data, hybrid
from train.export import export
from train.hybrid import Hybrid
from train.model import SIZES, Model


@dataclass(frozen=True)
class Stage:
    """``tokens`` (in millions) of rows whose length is drawn from ``lengths``; positions skip up to ``span``."""

    lengths: tuple[tuple[int, float], ...]
    tokens: float
    span: int = 0


CURRICULUM = (
    Stage(((256, 1.0),), 250),
    Stage(((256, 0.2), (512, 0.2), (1024, 0.6)), 350),
    Stage(((512, 0.2), (1024, 0.2), (2048, 0.6)), 550, 32_768),
    Stage(((512, 0.1), (2048, 0.2), (8192, 0.7)), 450, 32_768),
    Stage(((1024, 0.1), (4096, 0.15), (8192, 0.15), (32_768, 0.6)), 250),
)
FLOOR = 0.95  # a task below this gets more of the mix
DELAY = 256  # steps until a new mix holds: more than are made ahead, so that a resumed run sees the same batches
VALIDATE = (256, 1024, 2048, 4096, 8192, 16_384, 32_768)


class Batches:
    """Batches in order of their step, made ahead by worker processes."""

    def __init__(self, workers: int, ahead: int) -> None:
        context = multiprocessing.get_context("forkserver")  # a plain fork may hang once torch has its threads
        context.set_forkserver_preload(["train.data"])
        self.pool = ProcessPoolExecutor(workers, mp_context=context)
        self.queue: deque[tuple[int, Future]] = deque()
        self.ahead = ahead

    def get(self, step: int, order) -> dict[str, np.ndarray]:
        """The batch of ``step``; ``order(step)`` gives make_batch's arguments."""
        while self.queue and self.queue[0][0] < step:
            self.queue.popleft()
        while len(self.queue) < self.ahead:
            following = self.queue[-1][0] + 1 if self.queue else step
            arguments = order(following)
            if arguments is None:
                break
            self.queue.append((following, self.pool.submit(data.make_batch, *arguments)))
        return self.queue.popleft()[1].result()


def tensors(batch: dict, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, positions, targets (shifted by one) and weights, [rows, length]."""
    ids = torch.from_numpy(batch["ids"].astype(np.int32)).to(device, non_blocking=True).long()
    positions = torch.from_numpy(batch["positions"]).to(device, non_blocking=True).long()
    answers = (batch["kinds"] == 2).sum(1, keepdims=True)
    scale = np.clip((48 / np.maximum(answers, 1)) ** 0.5, 0.4, 4.0)  # short answers must not drown in long ones
    weights = data.WEIGHTS[batch["kinds"]] * np.where(batch["kinds"] == 2, scale, 1.0)
    weights = torch.from_numpy(weights.astype(np.float32)).to(device, non_blocking=True)
    targets = torch.roll(ids, -1, 1)
    shifted = torch.roll(weights, -1, 1)
    shifted[:, -1] = 0.0
    return ids, positions, targets, shifted


def right_answers(batch: dict, best: np.ndarray) -> dict[str, list[int]]:
    """Per task: answers (runs of taught tokens) foretold whole, and how many there were."""
    found: dict[str, list[int]] = {}
    correct = np.zeros_like(batch["ids"], dtype=bool)
    correct[:, 1:] = best[:, :-1] == batch["ids"][:, 1:]
    for row, task in enumerate(batch["tasks"]):
        marks = np.concatenate(([0], (batch["kinds"][row] == 2).astype(np.int8), [0]))
        starts, stops = np.flatnonzero(np.diff(marks) == 1), np.flatnonzero(np.diff(marks) == -1)
        counts = found.setdefault(task, [0, 0])
        for start, stop in zip(starts, stops):
            if stop - start > 1:  # single tokens are the legend's codes in its lines
                counts[0] += int(correct[row, start:stop].all())
                counts[1] += 1
    return found


class Run:
    """A training run in a folder: ``state.pt`` to resume from, ``log.jsonl``, and the exported checkpoint."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(options.seed)
        made = Hybrid if options.hybrid else Model
        self.model = made(SIZES[options.size], compiled=self.device == "cuda").to(self.device)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        fused = self.device == "cuda"
        self.peak = options.rate
        if options.optimizer == "muon":
            self.optimizers = [
                torch.optim.Muon(matrices, lr=self.peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(others, lr=self.peak, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
            ]
        else:
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            self.optimizers = [torch.optim.AdamW(groups, lr=self.peak, betas=(0.9, 0.95), fused=fused)]
        self.mixes = [(0, {task: float(weight) for task, weight in data.MIX.items()})]  # from which step each holds
        self.step, self.seconds = 0, 0.0  # seconds: of the clock, in runs before this one
        self.began = time.monotonic()
        self.steps = [round(stage.tokens * options.scale * 1e6 / options.batch) for stage in CURRICULUM]
        self.total = sum(self.steps)
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        if (self.out / "state.pt").exists():
            state = torch.load(self.out / "state.pt", map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)
            self.mixes, self.step, self.seconds = state["mixes"], state["step"], state["seconds"]
        self.batches = Batches(options.workers, min(4 * options.workers, DELAY))
        self.validation: dict[int, list[dict]] = {}

    def order(self, step: int) -> tuple | None:
        if step >= self.total and not self.options.paced:
            return None
        stage = self._stage(step)
        rng = data.Rng("length", self.options.seed, step)
        length = stage.lengths[weighted(rng, [share for _, share in stage.lengths])][0]
        rows = max(1, self.options.batch // length)
        mix = [held for start, held in self.mixes if start <= step][-1]
        names, weights = list(mix), list(mix.values())
        tasks = [names[weighted(rng, weights)] for _ in range(rows)]
        return ("train", self.options.seed, step), length, tasks, stage.span

    def rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 200)
        return self.peak * min(warm, (1.0 - self.progress(self.step)) / self.options.decay, 1.0)

    def clock(self) -> float:
        return self.seconds + time.monotonic() - self.began

    def progress(self, step: int) -> float:
        """Share of the run that lies before ``step``."""
        if self.options.paced:
            return min(1.0, self.clock() / (60 * self.options.minutes))
        return step / self.total

    def validate(self, longest: int, passes: int) -> dict[int, dict[str, float]]:
        """Per length and task: share of answers foretold whole (each token from the true ones before it, which for a
        whole answer is what greedy decoding gives). At least ``passes`` rows a task."""
        result: dict[int, dict[str, float]] = {}
        names = list(data.MIX)
        for length in VALIDATE:
            if length > longest:
                break
            if length not in self.validation:
                rows = max(1, self.options.batch // length)
                jobs = []
                for i in range(-(-passes * len(names) // rows)):
                    tasks = [names[(i * rows + r) % len(names)] for r in range(rows)]
                    jobs.append(self.batches.pool.submit(data.make_batch, ("val", length, i), length, tasks))
                self.validation[length] = [job.result() for job in jobs]
            scores: dict[str, list[int]] = {}
            for batch in self.validation[length]:
                with torch.no_grad():
                    _, best = self.model.forward(*tensors(batch, self.device))
                for task, (right, count) in right_answers(batch, best.cpu().numpy()).items():
                    total = scores.setdefault(task, [0, 0])
                    total[0] += right
                    total[1] += count
            result[length] = {
                task: round(scores[task][0] / max(1, scores[task][1]), 4) for task in names if task in scores
            }
        return result

    def shift_mix(self, scores: dict[str, float]) -> None:
        """A fifth of the mix goes to the tasks below the floor, by how far below they are."""
        lacking = {task: FLOOR - scores[task] for task in data.MIX if scores.get(task, 1.0) < FLOOR}
        base, total = sum(data.MIX.values()), sum(lacking.values())
        extra = {task: 0.25 * base * lack / total for task, lack in lacking.items()}
        mix = {task: round(weight + extra.get(task, 0.0), 4) for task, weight in data.MIX.items()}
        self.mixes = [*self.mixes, (self.step + DELAY, mix)]

    def log(self, **record) -> None:
        record = {"step": self.step, **record}
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "mixes": self.mixes,
            "step": self.step,
            "seconds": self.clock(),
        }
        torch.save(state, self.out / "state.part")
        os.replace(self.out / "state.part", self.out / "state.pt")
        written = hybrid.export if self.options.hybrid else export
        written(self.model.state_dict(), self.model.shape, self.out / "checkpoint")

    def compile(self) -> None:
        """Compiles what the run needs, so that a paced run's clock does not count it."""
        batch = tensors(data.make_batch(("compile",), 256, ["vt"] * (self.options.batch // 256)), self.device)
        self.model.forward(*batch)[0].backward()
        with torch.no_grad():
            self.model.forward(*batch)
        self.model.zero_grad(set_to_none=True)

    def train(self) -> None:
        if self.options.paced:
            self.compile()
        self.began = began = time.monotonic()
        seen, mean = 0, 0.0
        limit = 60 * self.options.minutes - (self.seconds if self.options.paced else 0.0)
        while (self.options.paced or self.step < self.total) and time.monotonic() - began < limit:
            batch = self.batches.get(self.step, self.order)
            rate = self.rate()
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            loss, _ = self.model.forward(*tensors(batch, self.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step += 1
            seen += batch["ids"].size
            if self.step % 100 == 0:
                mean = loss.item()
                self.log(
                    loss=round(mean, 4), length=batch["ids"].shape[1], rate=round(rate, 6),
                    speed=round(seen / (time.monotonic() - began) / 1e6, 3), seconds=round(time.monotonic() - began),
                )  # fmt: skip
            if self.step % self.options.every == 0:
                longest = max(length for length, _ in self._stage(self.step).lengths)
                scores = self.validate(max(longest, 256), 4 if self.device == "cuda" else 1)
                self.log(scores=scores)
                self.shift_mix(scores[max(scores)])
                self.save()
        self.log(scores=self.validate(self.options.longest, 8 if self.device == "cuda" else 1))
        self.save()
        self.batches.pool.shutdown(cancel_futures=True)

    def _stage(self, step: int) -> Stage:
        if self.options.paced:
            ends = np.cumsum([stage.tokens for stage in CURRICULUM])
            index = int(np.searchsorted(ends, self.progress(step) * ends[-1], side="right"))
        else:
            index = int(np.searchsorted(np.cumsum(self.steps), step, side="right"))
        return CURRICULUM[min(index, len(CURRICULUM) - 1)]


def weighted(rng: Rng, weights: Sequence[float]) -> int:
    """Index i with probability weights[i] / sum."""
    left = rng.random() * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="S")
    parser.add_argument("--hybrid", action="store_true", help="LFM2's layers in place of Llama's")
    parser.add_argument("--out", required=True, help="folder of the run; one that exists is resumed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--scale", type=float, default=1.0, help="tokens of every stage, as a multiple of the recipe's")
    parser.add_argument("--decay", type=float, default=0.25, help="share of the run over which the rate falls to zero")
    parser.add_argument("--every", type=int, default=500, help="steps between validations")
    parser.add_argument("--longest", type=int, default=32_768, help="longest context of the last validation")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop (and save) after so many")
    parser.add_argument("--paced", action="store_true", help="fit the recipe into --minutes on any machine")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default=None)
    torch.set_float32_matmul_precision("high")
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
