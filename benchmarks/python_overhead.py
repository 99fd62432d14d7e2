"""How much of the package's own Python a decode step runs: calls per request, kernels, and the way to a kernel.

    python benchmarks/python_overhead.py [--policies "dense;psa;lfps(k=64)"] [--batches 1,16] [--exact] [--chains]

Decodes on a tiny Llama of four layers and counts, in every ``Engine.step``, the calls of functions of this package
(comprehensions and resumed generators count as calls), and at each kernel the own frames on the stack, ``Engine.step``
the first. A kernel is a function of ``saccade._kernels``; on a GPU also a launch by Triton, or the replay of a recorded
graph. The numbers are medians over the last steps, in which all requests decode. The order of events is the
interpreter's own, so they are the same on any machine and at any load.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from tiny_models import make_checkpoint, random_ids

import saccade
from saccade import LLM, SamplingParams
from saccade.ops import cpu

OWN = str(Path(saccade.__file__).parent)
LAYERS = 4
PROMPT, TOKENS = 600, 12
QUERIES = ("isas",)  # functions of saccade._kernels that compute nothing
COUNTED = slice(-7, -1)  # of the steps: those in which all decode, without the one that ends them


@dataclass
class Step:
    """What one ``Engine.step`` did: own calls, kernels, and the longest chain of own frames to a kernel."""

    calls: int = 0
    kernels: int = 0
    chain: list[str] = field(default_factory=list)
    kernel: str = ""


class Counter:
    """Counts steps of whatever thread runs them, from :meth:`install` on."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.open: FrameType | None = None

    def install(self) -> None:
        threading.setprofile(self.event)
        sys.setprofile(self.event)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def event(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            if self.open is None and is_step(frame):
                self.open = frame
                self.steps.append(Step())
            if self.open is not None and own(frame):
                self.steps[-1].calls += 1
        elif event == "return" and frame is self.open:
            self.open = None

    def kernel(self, name: str) -> None:
        """Note that a kernel is being called from the frame above the caller's."""
        if self.open is None:
            return
        chain: list[str] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if own(frame):
                chain.append(frame.f_code.co_qualname)
            if frame is self.open:
                break
            frame = frame.f_back
        else:
            return  # of another thread
        step = self.steps[-1]
        step.kernels += 1
        if len(chain) > len(step.chain):
            step.chain, step.kernel = chain[::-1], name


def own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OWN)


def is_step(frame: FrameType) -> bool:
    return frame.f_code.co_qualname == "Engine.step" and own(frame)


def watched(counter: Counter, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        counter.kernel(name)
        return function(*args, **options)

    return call


class WatchedKernels:
    """A kernel set whose kernels are noted."""

    def __init__(self, counter: Counter, kernels: Any) -> None:
        self._counter, self._kernels = counter, kernels

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        return watched(self._counter, value, name) if callable(value) else value


def watch_kernels(counter: Counter) -> None:
    """Put a note before each kernel. Functions that a module took out of ``saccade._kernels`` by name are replaced
    there too."""
    from saccade import _kernels

    originals = {}
    for name, value in list(vars(_kernels).items()):
        if type(value).__name__ == "nb_func" and name not in QUERIES:
            originals[id(value)] = watched(counter, value, name)
            setattr(_kernels, name, originals[id(value)])
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("saccade"):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, name, originals[id(value)])
    cpu._chosen = WatchedKernels(counter, cpu.kernels())
    if torch.cuda.is_available():
        from triton.runtime.jit import JITFunction

        torch.cuda.CUDAGraph.replay = watched(counter, torch.cuda.CUDAGraph.replay, "replay")
        JITFunction.run = watched(counter, JITFunction.run, "launch")


def decode(counter: Counter, folder: Path, policy: str, batch: int, exact: bool, device: str) -> tuple[Step, float]:
    """The step with the longest chain among those that count, and the median of their own calls."""
    counter.steps.clear()
    counter.install()  # before an engine starts a thread of its own
    try:
        llm = LLM(
            folder,
            dtype="float32",
            kv_memory="64MiB",
            exact=exact,
            threads=1,
            device=device,
            enable_prefix_caching=False,
        )
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        outputs = llm.generate([random_ids(PROMPT, seed=i) for i in range(batch)], params, policy=policy)
    finally:
        counter.remove()
    if failed := [output.error for output in outputs if output.error is not None]:
        raise SystemExit(f"{policy}: {failed[0]}")
    steps = counter.steps[COUNTED]
    return max(steps, key=lambda step: len(step.chain)), statistics.median(step.calls for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="dense;psa(epsilon=0.7);lfps(k=64, blocks=8)")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--exact", action="store_true", help="each request's rows by themselves")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chains", action="store_true", help="print the longest chain of each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counter = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(
            "llama", Path(scratch, "model"), num_hidden_layers=LAYERS, hidden_size=64, max_position_embeddings=2048
        )
        LLM(folder, dtype="float32", kv_memory="64MiB", device=options.device, enable_prefix_caching=False).generate(
            [1, 2, 3]
        )  # imports the rest
        watch_kernels(counter)
        print("policy                     batch  calls a step  a request  kernels  frames to a kernel")
        for policy in options.policies.split(";"):
            for batch in map(int, options.batches.split(",")):
                step, calls = decode(counter, folder, policy, batch, options.exact, options.device)
                share = calls / batch
                deepest = f"{len(step.chain)} ({step.kernel})"
                print(f"{policy:26} {batch:5}  {calls:12.0f}  {share:9.1f}  {step.kernels:7}  {deepest}")
                if options.chains:
                    print("  " + " > ".join([*step.chain, step.kernel]))


if __name__ == "__main__":
    main()
