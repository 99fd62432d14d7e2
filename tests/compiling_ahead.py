"""Kernels compiled for a GPU that is not there, as ``test_compiling.py`` has it done: python compiling_ahead.py

A process of its own: Triton reads its environment once, and forks are to have no threads.
"""

from __future__ import annotations

import io
from contextlib import suppress
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from saccade.engine.settings.config import EngineConfig
from saccade.methods.policy import Policy
from saccade.ops import compiling
from saccade.ops.tile_weights import FORMATS
from saccade.ops.triton import common, tile_rows
from saccade.ops.triton.block_rows import block_rows
from saccade.selection import Blocks, Shape
from saccade.server import warming


def lists(units: int) -> Blocks:
    mask = torch.ones(units, 2, 2, dtype=torch.bool).tril()
    return Blocks.from_block_mask(Shape.suffix(4, 2, 256, 256), 128, mask)


def launch(units: int) -> None:
    """As far as it gets without a GPU: the kernel is compiled, and nothing can launch it."""
    with suppress(AttributeError):
        block_rows(lists(units))


def collected() -> list[bytes]:
    found: list[bytes] = []
    with compiling.collecting(found.append):
        assert not block_rows(lists(4)).rows.any()
        block_rows(lists(4))
        assert not torch.empty(4096).any()
        assert not torch.ones(9).new_empty(4096).any()
        block_rows(lists(2))
    assert torch.empty is EMPTY
    return found


def one_process() -> None:
    found = collected()
    assert len(found) == 2, len(found)  # of one head a unit, and of two, each once
    for data in found:
        name, seconds = compiling.compile_wanted(data)
        assert (name, seconds > 0) == ("_split", True)
    counted = compiling.watch()
    launch(4)
    assert (counted.kernels, counted.seconds) == (0, 0.0), counted  # it was compiled, by another launch
    found.clear()
    with compiling.collecting(found.append):
        block_rows(
            Blocks.from_block_mask(Shape.suffix(8, 2, 256, 256), 128, torch.ones(2, 2, 2, dtype=torch.bool).tril())
        )
    assert len(found) == 1
    compiling.compile_wanted(found[0])
    assert counted.kernels == 1, counted
    assert 0 < counted.seconds < 100, counted


def dry(config: EngineConfig, policies: list[Policy], found: object, descriptors: list[int]) -> None:
    for data in collected():
        found.send(("kernel", data))  # type: ignore[attr-defined]
    found.send(("kernel", b"nothing"))  # type: ignore[attr-defined]
    found.send(("trouble", "the dry run broke off"))  # type: ignore[attr-defined]


def several_processes() -> None:
    warming._dry = dry  # type: ignore[assignment]
    ahead = warming.KernelsAhead(EngineConfig(), [Policy.parse("dense")])
    ahead.collect()
    assert ahead.trouble == "the dry run broke off"
    said = ahead.settle()
    assert (said["kernels"], said["processes"] >= 1) == (2, True), said
    assert said["compiler_seconds"] > 0
    assert ahead.trouble is not None
    assert ahead.trouble.startswith("the dry run broke off; ")
    assert "1 kernels were not compiled: UnpicklingError" in ahead.trouble, ahead.trouble


def constants_pass() -> None:
    """Layouts of Gluon and kernels among constants come to another process as they are."""
    constants = tile_rows.constants(torch.bfloat16, next(iter(FORMATS.values())).layout.kind)
    wanted = compiling.Wanted(common.begin, {"a": "*bf16"}, {**constants, "CALLS": common.also}, {}, {}, None)
    back = compiling._Loading(io.BytesIO(compiling._dumped(wanted))).load()
    assert back.kernel is common.begin
    assert back.constants.pop("CALLS") is common.also
    assert {name: str(one) for name, one in back.constants.items()} == {
        name: str(constants[name]) for name in constants
    }


def silent() -> None:
    """A dry run that never ends is given up."""
    import time

    warming._dry = lambda *_: time.sleep(600)  # type: ignore[assignment]
    warming.SECONDS = 0.5
    ahead = warming.KernelsAhead(EngineConfig(), [Policy.parse("dense")])
    ahead.collect()
    assert ahead.trouble == "the dry run took more than 0.5 s", ahead.trouble
    assert ahead.settle()["kernels"] == 0


EMPTY = torch.empty
triton.runtime.driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
)
if __name__ == "__main__":
    several_processes()  # first, while there are no threads
    silent()
    one_process()
    constants_pass()
    print("done")
