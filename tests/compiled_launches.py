"""Compile what calls of attention launch on a Hopper GPU, on any machine, with the tiles that they choose:
python tests/compiled_launches.py [head_dim ...]

``compiled_kernels.py`` is told its tiles; here calls are made, and what they would have launched is compiled. Prints
the shared memory of each kernel in bytes, its registers, and what of them does not fit and goes to memory; without
arguments of some calls over the widest heads.
"""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from compiled_kernels import SHARED, hopper
from helpers import generator, random_selection
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import target_info

from saccade.kv import KVFormat, KVStorage, KVView
from saccade.kv.paged import Paged
from saccade.kv.row_formats import AUTO, FP8, INT8, RowFormat
from saccade.ops import compiling
from saccade.ops.triton import dispatch
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_decode import append_rows
from saccade.ops.triton.block_summaries import summarize
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.few_rows import attend_rows
from saccade.selection import Dense, Ranking, Shape, Windowed
from saccade.selection.window import Cone

READERS = "_decode", "_prefill", "_lines", "_read", "_covered"
OPTIONS = "num_warps", "num_stages", "maxnreg"
UNIMPORTANT = {"HEADS", "KV_HEADS", "UNITS", "PER", "PAGE", "MANY", "SPACED", "COUNTED", "LOG_SIZE", "LN2"}
LENGTH = 16_640  # from where on a few last rows go in groups


@contextmanager
def offline() -> Iterator[None]:
    """Kernels take tensors of a CPU for those of a Hopper GPU."""
    device = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=hopper
    )
    triton.runtime.driver.set_active(device)
    target_info.current_target = hopper  # type: ignore[assignment]
    known = {"is_hopper": lambda device: True, "processors": lambda device: 132, "runs_on": lambda tensor: True}
    before = []
    for module in [one for name, one in sys.modules.items() if name.startswith("saccade.")]:
        for name, answer in known.items():
            if hasattr(module, name) and getattr(module, name) is not answer:
                before.append((module, name, getattr(module, name)))
                setattr(module, name, answer)
    try:
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def view(dtype: torch.dtype, head_dim: int, rows: RowFormat, block_size: int, kv_heads: int, length: int) -> KVView:
    """A pool that no kernel reads."""
    form = KVFormat(dtype, kv_heads, head_dim, block_size, rows, rows)
    blocks = form.blocks(length)
    storage = KVStorage(form, blocks)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    return KVView(Paged(storage.k, storage.v, table, length, form))


def calls(dtype: torch.dtype, head_dim: int, rows: RowFormat, block_size: int, heads: int, kv_heads: int) -> None:
    """Attention of all kinds over such a pool: one row, a few, some and many, early in a text and late in it."""
    for length, counts in ((LENGTH, (1, 3, 8, 9, 100)), (5000, (150, 2500, 4500))):
        kv = view(dtype, head_dim, rows, block_size, kv_heads, length)
        for count in counts:
            q = torch.zeros(heads, count, head_dim, dtype=dtype)
            for selection in selections(Shape.suffix(heads, kv_heads, count, length), block_size):
                if dispatch.serves(q, kv, selection) is None:
                    attend = dispatch.attend_ranking if isinstance(selection, Ranking) else dispatch.attend
                    attend(q, kv, selection, scale=0.1)
    kv = view(dtype, head_dim, rows, block_size, kv_heads, 4096)
    for kind in ("minmax", "cuboid", "mean", "mean_value", "moments"):
        summarize(kv.paged(), kind, block_size, 0, 4)
    for batch in (1, 8):
        decode(kv.paged(), batch, heads)


def selections(shape: Shape, block_size: int) -> Iterator[Any]:
    rng = generator(0)
    yield Dense(shape)
    yield random_selection("band", shape, shape.kv_heads, rng)
    yield random_selection("lines", shape, shape.kv_heads, rng)
    yield Windowed(Dense(shape), Cone(0.5, 64))
    for size in (16, 32, 64, 128):
        yield random_selection("blocks", shape, shape.kv_heads, rng, size)
    if shape.q_len == 1:
        yield random_selection("tokens", shape, shape.kv_heads, rng)
        yield random_selection("ranking", shape, shape.kv_heads, rng)


def decode(paged: Paged, batch: int, heads: int) -> None:
    """Batches of one row each and of several, over everything, blocks and tokens; what is stored before."""
    dtype, head_dim, kv_heads = paged.format.dtype, paged.format.head_dim, paged.format.kv_heads
    tables, lengths = paged.block_table[None].expand(batch, -1, -1).contiguous(), torch.full((batch,), 4000).int()
    here = Pages(paged.k, paged.v, tables, lengths, 4096)
    away = Pages(paged.k, paged.v, tables, lengths, 4096, host=(paged.k, paged.v))
    q = torch.zeros(batch, heads, head_dim, dtype=dtype)
    for pages in (here, away):
        attend_decode(q, pages, None, scale=0.1)
        for size in (1, 16, 32, 64, 128):
            for units in (kv_heads, heads):
                counts = torch.full((batch * units,), 8).int()
                lists = KeyLists(None, counts, torch.zeros(batch * units, 16).int(), units, size, 16)
                attend_decode(q, pages, lists, scale=0.1)
    for each, window in ((2, None), (4, None), (8, None), (16, None), (4, 512), (16, 512)):
        q = torch.zeros(batch * each, heads, head_dim, dtype=dtype)
        attend_rows(q, here, torch.full((batch * each,), 3999).int(), scale=0.1, window=window)
    new = torch.zeros(batch, kv_heads, head_dim, dtype=dtype)
    append_rows(new, new, here)


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its memory that they did not hold."""
    program = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def compile_launch(wanted: compiling.Wanted) -> Any:
    make = GluonASTSource if wanted.kernel.is_gluon() else ASTSource
    source = make(wanted.kernel, wanted.signature, wanted.constants, wanted.attributes)
    return triton.compile(source, target=wanted.target, options=wanted.options)


def launches(make: Callable[[], None]) -> list[compiling.Wanted]:
    """What ``make`` would launch, each once."""
    found: list[bytes] = []
    with compiling.collecting(found.append):
        make()
    return [compiling._Loading(io.BytesIO(data)).load() for data in found]


def named(wanted: compiling.Wanted, *names: str) -> str:
    """Its constants of these names."""
    at = wanted.kernel.arg_names
    held = {at[key[0]] if isinstance(key, tuple) else key: value for key, value in wanted.constants.items()}
    return " ".join(f"{name}={held[name]}" for name in names if name in held)


def too_large(
    widths: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    formats: tuple[RowFormat, ...],
    block_sizes: tuple[int, ...],
    report: Callable[[str], None],
) -> int:
    """How many launches of heads of ``widths`` a Hopper GPU would refuse; each is reported. ``heads``: of queries, and
    of keys."""
    failed, done = 0, set()
    for head_dim, dtype, rows in itertools.product(widths, (torch.bfloat16, torch.float32), formats):
        for block_size, (of_queries, of_keys) in itertools.product(block_sizes, heads):
            what = dtype, head_dim, rows, block_size, of_queries, of_keys
            for wanted in launches(lambda what=what: calls(*what)):
                key = cut_of(wanted)
                if wanted.kernel.fn.__qualname__ in READERS and key not in done:
                    done.add(key)
                    failed += not fits(wanted, f"{head_dim} {str(dtype)[6:]} {rows.name}", report)
    return failed


def cut_of(wanted: compiling.Wanted) -> str:
    """What shared memory and registers hang on, of a launch: not how many heads there are, nor how long a list is."""
    at = wanted.kernel.arg_names
    constants = {at[key[0]] if isinstance(key, tuple) else key: value for key, value in wanted.constants.items()}
    tile = {name: value for name, value in constants.items() if name.isupper() and name not in UNIMPORTANT}
    if wanted.kernel.fn.__qualname__ == "_decode":
        tile["SIZE"] = min(tile["SIZE"], 2)
    stored = [wanted.signature.get(name) for name in ("q_ptr", "k_pool")]
    options = [wanted.options.get(name) for name in OPTIONS]
    return str((wanted.kernel.fn.__qualname__, stored, sorted(tile.items(), key=str), options))


def fits(wanted: compiling.Wanted, what: str, report: Callable[[str], None]) -> bool:
    options = {name: wanted.options.get(name) for name in OPTIONS}
    what = f"{wanted.kernel.fn.__qualname__} of {what} {options} " + named(
        wanted, "ROWS", "KEYS", "PER_PAD", "SIZE", "MODE", "STAGES", "COPIED", "FAR", "RUN"
    )
    try:
        made = compile_launch(wanted)
    except Exception as error:
        report(f"FAILED {what}: {type(error).__name__}: {str(error)[-300:]}")
        return False
    registers, stack = usage(made.asm["cubin"])
    good = made.metadata.shared <= SHARED
    report(f"{'' if good else 'FAILED '}{what}: {made.metadata.shared} bytes, {registers} registers, {stack} spilt")
    return good


def main(arguments: list[str]) -> int:
    """Some of the widest, or, of those that are given, everything."""
    widths = tuple(map(int, arguments))
    everything = ((8, 2), (1, 1), (32, 2), (14, 2)), (AUTO, INT8, FP8), (16, 32, 128)
    heads, formats, block_sizes = everything if widths else (((32, 2),), (AUTO, INT8), (32,))
    with offline():
        return too_large(widths or (256,), heads, formats, block_sizes, lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
