"""Triton's compiler: how long this process has waited for it, and kernels compiled in other processes beforehand.

Triton compiles a kernel when it is launched for the first time with such arguments, in half a second to some seconds,
and keeps what it made in a folder that outlives the process (``cache_folder``). A dry run launches nothing and writes
down what it would have launched (``collecting``); other processes compile that side by side (``compile_wanted``), and
the process that launches it finds it in the folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

_installed = importlib.util.find_spec("triton") is not None


@dataclass
class Compiled:
    """``kernels`` that this process has had to compile, in so many ``seconds``. Those that lay in the folder count
    nothing."""

    kernels: int = 0
    seconds: float = 0.0


compiled = Compiled()  # there is one compiler in a process


def watch() -> Compiled:
    """``compiled``, which counts from now on. Nothing is counted without Triton, or under its interpreter."""
    if _installed:
        from triton import knobs

        knobs.compilation.listener = _listen
    return compiled


def _listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compiled.kernels += 1
        compiled.seconds += times.total / 1e6


def cache_folder() -> Path | None:
    """Where compiled kernels are kept (``TRITON_CACHE_DIR``, else ``~/.triton/cache``); None without Triton."""
    if not _installed:
        return None
    from triton import knobs

    return Path(knobs.cache.dir)


def why_not_kept() -> str | None:
    """Why compiled kernels do not outlive this process; None where they do, and without Triton."""
    folder = cache_folder()
    there = folder
    while there is not None and not there.exists() and there != there.parent:
        there = there.parent
    if there is None or os.access(there, os.W_OK | os.X_OK):
        return None
    return f"kernels cannot be kept in {folder}, which cannot be written; set TRITON_CACHE_DIR to a folder that can"


class Wanted(NamedTuple):
    """A kernel with the arguments that it is compiled for, as Triton has them."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any


@contextmanager
def collecting(found: Callable[[bytes], None]) -> Iterator[None]:
    """Within the block kernels of Triton that this process has not launched before are not launched, on any thread;
    each goes to ``found`` once, pickled for :func:`compile_wanted`. What they would have written is zeros where torch
    makes empty tensors, so that indices among it are in range. Results mean nothing: a process that does so is good for
    nothing else."""
    from triton.runtime.jit import JITFunction

    seen: set[Any] = set()
    before, makers = JITFunction._do_compile, {name: getattr(torch, name) for name in ("empty", "empty_like")}
    new_empty = torch.Tensor.new_empty

    def wanted(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> None:
        once = (self.fn.__module__, self.fn.__qualname__, str(key))
        if once not in seen:
            seen.add(once)
            target = self.device_caches[device][2]
            found(_dumped(Wanted(self, signature, constexprs, attrs, dict(options.__dict__), target)))

    JITFunction._do_compile = wanted
    for name in makers:
        setattr(torch, name, lambda *args, make=makers[name], **options: _zeroed(make(*args, **options)))
    torch.Tensor.new_empty = lambda *args, **options: _zeroed(new_empty(*args, **options))  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction._do_compile = before
        for name, make in makers.items():
            setattr(torch, name, make)
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


def _zeroed(made: torch.Tensor) -> torch.Tensor:
    return made if made.is_meta else made.zero_()


def compile_wanted(data: bytes) -> tuple[str, float]:
    """Compile what :func:`collecting` found, on any machine: the kernel's name, and the seconds that it took. What
    Triton raises."""
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    began, wanted = time.perf_counter(), _Loading(io.BytesIO(data)).load()
    make = GluonASTSource if wanted.kernel.is_gluon() else ASTSource
    source = make(wanted.kernel, wanted.signature, wanted.constants, wanted.attributes)
    kernel = compile(source, target=wanted.target, options=wanted.options)
    _compile_launcher(source, kernel.metadata)
    return wanted.kernel.fn.__qualname__, time.perf_counter() - began


def _compile_launcher(source: Any, metadata: Any) -> None:
    """What hands a kernel its arguments, which Triton before 3.7 has a C compiler make for each signature."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher") and "compile_module_from_src" in driver.CudaLauncher.__init__.__code__.co_names:
        with suppress(Exception):  # no libcuda, no C compiler: who launches it says so
            driver.CudaLauncher(source, metadata)


class _Dumping(pickle.Pickler):
    """Kernels go by their names: what is behind these is the same in every process."""

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        from triton.runtime.jit import JITFunction

        return (obj.fn.__module__, obj.fn.__qualname__) if isinstance(obj, JITFunction) else None


class _Loading(pickle.Unpickler):
    def persistent_load(self, name: tuple[str, str]) -> Any:
        return getattr(importlib.import_module(name[0]), name[1])


def _dumped(wanted: Wanted) -> bytes:
    into = io.BytesIO()
    _Dumping(into).dump(wanted)
    return into.getvalue()
