"""When an engine's steps run and when its tokens are there: for benchmarks that ask what lies between two steps.

As a program it is ``saccade`` whose ``serve`` notes its engine's steps in the file that ENGINE_CLOCK names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade import LLM

MARK = 8  # first tokens of a prompt, by which it is known


@dataclass
class Clock:
    """Of one engine, by time.perf_counter, which all processes of a machine share.

    ``steps``: of each, when it began and ended, when its outputs were with their readers, how many rows decoded and how
    many requests' prompts it computed rows of. ``tokens``: when each token's step ended, by the beginning of its
    request's prompt.
    """

    steps: list[tuple[float, float, float, int, int]] = field(default_factory=list)
    tokens: dict[str, list[float]] = field(default_factory=dict)

    def watch(self, llm: LLM) -> None:
        """Note what the engine of ``llm`` does from now on, once all else is told of its outputs."""
        engine, step, run = llm.engine, llm.engine.step, llm.engine.worker.run
        names: dict[int, str] = {}
        rows = [0, 0]
        open_step: list[Any] = []

        def counted(given: Any, *more: Any, **options: Any) -> Any:
            phases = [one.phase for one in given.scheduled]
            rows[:] = phases.count("decode"), phases.count("prefill")
            return run(given, *more, **options)

        def timed() -> Any:
            rows[:] = 0, 0
            began = time.perf_counter()
            outputs = step()
            ended = time.perf_counter()
            open_step[:] = began, ended, *rows
            for output in outputs:
                if output.request_id not in names:
                    running = {one.id: one.prompt for one in engine.scheduler.running}
                    ends = output.outcome
                    names[output.request_id] = mark(running[output.request_id] if ends is None else ends.prompt)
                self.tokens.setdefault(names[output.request_id], []).extend([ended] * len(output.new_tokens))
            return outputs

        def delivered() -> None:
            if open_step:
                began, ended, *counts = open_step
                self.steps.append((began, ended, time.perf_counter(), *counts))
                open_step.clear()

        engine.step, engine.worker.run = timed, counted
        llm.loop.after_steps(delivered)

    def between(self, first: float, last: float) -> Clock:
        """What lies between two times."""
        steps = [one for one in self.steps if first <= one[0] and one[1] <= last]
        tokens = {name: [one for one in times if first <= one <= last] for name, times in self.tokens.items()}
        return Clock(steps, tokens)


def mark(prompt: Sequence[int]) -> str:
    return " ".join(map(str, prompt[:MARK]))


def load(file: Path) -> Clock:
    found = json.loads(file.read_text())
    return Clock([tuple(one) for one in found["steps"]], found["tokens"])


def _as_engine(descriptor: int) -> None:
    """The engine of a server, whose steps are noted."""
    from saccade.server import engine_process

    clock = Clock()

    class Watched(engine_process.EngineServer):
        def __init__(self, llm: LLM, outbox: engine_process.Outbox) -> None:
            super().__init__(llm, outbox)
            clock.watch(llm)

        def close(self) -> None:
            Path(os.environ["ENGINE_CLOCK"]).write_text(json.dumps(asdict(clock)))
            super().close()

    engine_process.EngineServer = Watched  # type: ignore[misc]
    engine_process.main(descriptor)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        _as_engine(int(sys.argv[1]))
    else:
        from saccade.cli.main import main
        from saccade.server import engine_launch

        engine_launch.PROGRAM = (sys.executable, __file__)
        main()
