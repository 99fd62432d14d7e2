"""How deep a kernel lies below ``Engine.step``: the package's own frames on the way, for every policy.

    python benchmarks/frames.py [--tokens 88,2000] [--answer 24] [--policies "dense;lfps"] [--chains]

A kernel is a function of ``saccade._kernels`` or a torch operation that reads or writes numbers (views, and tensors
made without any, are none). Frames are those of files of this package, ``Engine.step`` the first. Each policy of the
registry and each preset serves one request of a tiny random Llama of four layers twice; the deepest kernel counts, over
all prefill steps of the second and over its decode steps without the first two and the last (what a request does once
is no step's work). Counts, so they are the same on any machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from python_overhead import own, watch_kernels
from short_context import every_policy, params
from tiny_models import make_checkpoint, random_ids
from torch.utils._python_dispatch import TorchDispatchMode

from saccade import LLM
from saccade.engine.core import Engine
from saccade.engine.steps.step import StepInput

NO_WORK = ("empty", "detach", "alias", "lift_fresh", "new_empty", "set_", "_local_scalar_dense", "resize_")


@dataclass
class Deepest:
    """The longest way to a kernel in one step: own frames, outermost first, and the kernel."""

    decodes: bool = False
    chain: list[str] = field(default_factory=list)
    kernel: str = ""


class Frames(TorchDispatchMode):
    """Notes of each step of whatever engine the deepest kernel, while it is entered by :func:`watched`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Deepest] = []
        self.open = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not view and not name.startswith(NO_WORK):
            self.kernel(name)
        return func(*args, **(kwargs or {}))

    def kernel(self, name: str) -> None:
        """Note that a kernel is being called."""
        if not self.open:
            return
        chain: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if own(frame):
                chain.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}")
                if frame.f_code.co_qualname == "Engine.step":
                    break
            frame = frame.f_back
        else:
            return
        if len(chain) > len(self.steps[-1].chain):
            self.steps[-1].chain, self.steps[-1].kernel = chain[::-1], name


def watch() -> Frames:
    """Have all engines of the process note the deepest kernel of each step, from now on."""
    from saccade.engine import core

    frames, step, step_input = Frames(), Engine.step, core.step_input
    watch_kernels(frames)  # type: ignore[arg-type]

    def watched(engine: Engine) -> Any:
        frames.steps.append(Deepest())
        frames.open = True
        try:
            with frames:
                return step(engine)
        finally:
            frames.open = False

    def noted(batch: Any) -> StepInput:
        made = step_input(batch)
        frames.steps[-1].decodes = all(one.phase == "decode" for one in made.scheduled)
        return made

    Engine.step = watched  # type: ignore[method-assign]
    core.step_input = noted
    return frames


def deepest(frames: Frames, llm: LLM, policy: str, tokens: int, answer: int) -> tuple[Deepest, Deepest]:
    """The deepest of prefill and of decode of a request of ``tokens`` with an ``answer`` of so many, the second under
    its policy."""
    for seed in (0, 1):
        frames.steps.clear()
        (output,) = llm.generate([random_ids(tokens, seed=seed)], params(answer), policy=policy)
        if output.error is not None:
            raise SystemExit(f"{policy}: {output.error}")
    return of(step for step in frames.steps if not step.decodes), of(
        [step for step in frames.steps if step.decodes][2:-1]
    )


def of(steps: Iterable[Deepest]) -> Deepest:
    return max(steps, key=lambda step: len(step.chain))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="88,2000", help="of the prompts")
    parser.add_argument("--answer", type=int, default=24, help="tokens of the answers")
    parser.add_argument("--policies", help="separated by semicolons; else all")
    parser.add_argument("--chains", action="store_true", help="print the ways")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [int(one) for one in options.tokens.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_checkpoint(
            "llama", Path(scratch, "model"), num_hidden_layers=4, hidden_size=64, max_position_embeddings=4096
        )
        llm = LLM(model, kv_memory="256MiB", threads=1, enable_prefix_caching=False)
        frames = watch()
        llm.generate([[1, 2, 3]], params(4))
        print(
            f"{'policy':32}", *(f"{f'{phase} {length}':>13}" for length in lengths for phase in ("prefill", "decode"))
        )
        for policy in options.policies.split(";") if options.policies else every_policy():
            found = [one for length in lengths for one in deepest(frames, llm, policy, length, options.answer)]
            print(f"{policy:32}", *(f"{len(one.chain):13}" for one in found), flush=True)
            if options.chains:
                for one in found:
                    print("    " + " > ".join([*one.chain, one.kernel]))


if __name__ == "__main__":
    main()
