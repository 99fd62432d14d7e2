"""When dense attention itself scores low: then nothing can be told of what a sparse method loses."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.eval.summary import Run

HALF = 0.5  # of the possible score
WAY_OUT = (
    "Take a model that can do these tasks, or tasks that this one can do (--task; --task natural:facts at a shorter "
    "--length, say); saccade eval drift needs no task"
)


@dataclass(frozen=True)
class DenseScore:
    """What dense attention scored, 0 to 1, over all samples and by task, the lowest task first."""

    score: float
    tasks: dict[str, float]

    @property
    def low(self) -> dict[str, float]:
        """The tasks below half of the possible score."""
        return {task: score for task, score in self.tasks.items() if score < HALF}

    @property
    def warning(self) -> str | None:
        """What must be said beside every comparison with this dense run: None where it scores half or more."""
        if self.score >= HALF:
            return None
        return (
            f"Dense attention scores {_points(self.score)} of 100 here, below half, so these samples cannot tell what "
            f"a sparse method loses. Tasks below half: {self.listed}. {WAY_OUT}."
        )

    @property
    def listed(self) -> str:
        return ", ".join(f"{task} {_points(score)}" for task, score in self.low.items())


def dense_score(run: Run) -> DenseScore | None:
    """Of a dense run; None if no sample of it has a score."""
    scores: dict[str, list[float]] = {}
    for row in run.rows.values():
        if row["score"] is not None:
            scores.setdefault(row["task"], []).append(row["score"])
    if not scores:
        return None
    means = {task: sum(values) / len(values) for task, values in scores.items()}
    whole = [score for values in scores.values() for score in values]
    return DenseScore(sum(whole) / len(whole), dict(sorted(means.items(), key=lambda pair: pair[1])))


def _points(score: float) -> str:
    return f"{100 * score:.1f}"
