"""What a piece of work asks a GPU to start, counted on a CPU: Triton's launches under its interpreter, and torch's ops
that would be kernels of their own there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import triton.runtime.interpreter as interpreter
from torch.utils._python_dispatch import TorchDispatchMode

NOTHING = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "detach", "lift_fresh"}


class Launches(TorchDispatchMode):
    """Within it, ``torch`` counts ops that compute or move something, by name, and ``triton`` launches by kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()
        self.triton: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.torch.total() + self.triton.total()

    def __enter__(self) -> Launches:
        run, self._run, counts = interpreter.GridExecutor.__call__, interpreter.GridExecutor.__call__, self

        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            counts.triton[executor.fn.__name__] += 1
            mode = counts._stop()
            try:
                run(executor, *args, **kwargs)
            finally:
                counts._go_on(mode)

        interpreter.GridExecutor.__call__ = counted
        self._paused = False
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        interpreter.GridExecutor.__call__ = self._run

    def _stop(self) -> bool:
        before, self._paused = self._paused, True
        return before

    def _go_on(self, before: bool) -> None:
        self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._paused and not func.is_view and name not in NOTHING:
            self.torch[name] += 1
        return func(*args, **(kwargs or {}))
