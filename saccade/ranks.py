"""The processes of an engine's other ranks: started by the first, and what each of them does."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as distributed

from saccade.engine.attention import Watch
from saccade.engine.ranks.folder import counts_path, failed, ready, steps_path
from saccade.engine.ranks.link import (
    LoneLink,
    RankLink,
    gather_named,
    patience,
    send,
)
from saccade.engine.ranks.meeting import RankGroup
from saccade.engine.ranks.other import OtherRank
from saccade.engine.ranks.places import device_of
from saccade.engine.ranks.watch import SumCounts
from saccade.engine.rows.calls import Setting
from saccade.engine.settings.config import EngineConfig
from saccade.errors import brief
from saccade.kv import BlockManager
from saccade.models.calibration import Calibrations
from saccade.models.folders import checkpoint_folder
from saccade.models.head_order import HeadDensities
from saccade.models.loader import load_model
from saccade.models.shards import Share, release
from saccade.ops import fa4
from saccade.parent import on_lasting_thread
from saccade.pools import layout_of, make_pool

_ALONE: ContextVar[bool] = ContextVar("alone", default=False)
COMMAND: tuple[str, ...] = ("-m", "saccade.rank_process")  # what Python runs of a rank
END_SECONDS = 3.0  # that a rank takes to end by itself


class Start(NamedTuple):
    """What a rank is given first. ``blocks``: that its memory holds, tiers apart; ``length``: of the longest sequence;
    ``threads``: of torch; ``states``: slots for those of layers that keep one; ``densities``: by which KV heads are
    shared out."""

    config: EngineConfig
    rank: int
    store: str
    blocks: int
    length: int
    exact: bool
    threads: int
    states: int | None = None
    densities: HeadDensities | None = None


@contextmanager
def alone() -> Iterator[None]:
    """Within the block engines of several ranks begin with the first alone, whose answers mean nothing: it launches the
    kernels that each rank does (server/warming.py)."""
    before = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(before)


def make_link(ranks: int, device: torch.device) -> RankLink:
    """The first rank's hold on the others, before there are any."""
    return (LoneLink if _ALONE.get() else RankLink)(ranks, device)


def start_ranks(
    link: RankLink,
    config: EngineConfig,
    pool: BlockManager,
    length: int,
    exact: bool,
    densities: HeadDensities | None = None,
) -> None:
    """Start the other ranks of ``link`` and wait for them. RanksLost, which says why, where one does not come up."""
    if link.alone:
        return link.join()
    here = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}

    def begun() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *COMMAND],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is the first rank's to handle
        )

    for rank in range(1, link.ranks):
        process = on_lasting_thread(begun)
        link.processes.append(process)
        states = None if pool.states is None else pool.states.slots
        place = config, rank, str(link.store_path)
        start = Start(*place, pool.storage.num_blocks, length, exact, torch.get_num_threads(), states, densities)
        send(process, pickle.dumps(start))
    link.join()


def serve(start: Start, messages: Iterator[Any]) -> None:
    """Be a rank until the first one says no more."""
    config, rank, ranks = start.config, start.rank, start.config.tensor_parallel_size
    torch.set_num_threads(start.threads)
    device = device_of(config.device, rank, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched there
    store = distributed.FileStore(start.store, ranks)
    group: list[RankGroup] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first rank has said so
            folder = checkpoint_folder(config.model, config.revision)
            share = Share(rank, ranks, lambda: group[0], start.densities)
            model = load_model(folder, config.dtype, device, config.quantize, config.lora, config.layers, share)
        release(device)
        spec = model.spec
        memory = start.blocks * layout_of(config, model).block_bytes
        pool, _ = make_pool(replace(config, kv_memory=memory), model, start.length, start.states)
        if pool.states is not None and config.enable_prefix_caching:
            pool.states.block = pool.format.block_size  # as of the first rank's PrefixCache
        model.runner.turn_keys(pool.format.turned)
        part = replace(model.part, gather=lambda name, own: gather_named(group[0], name, own))
        calibrations = Calibrations(spec, model.path, part)
        by_fa4 = fa4.wanted(config.fa4, config.backend, device)
        setting = Setting(spec, calibrations, Watch(), config.backend, config.threads, by_fa4, part)
    except Exception as error:
        store.set(failed(rank), f"{type(error).__name__}: {brief(error)}")
        raise
    store.set(ready(rank), "")
    at = Path(start.store)
    counts, steps = SumCounts(counts_path(at), ranks), SumCounts(steps_path(at), ranks)
    group.append(RankGroup(store, rank, ranks, patience(device), counts, device, at.parent.name))
    other = OtherRank(group[0], pool, model.runner, setting, start.exact, config.cuda_graphs, steps)
    try:
        other.follow(messages)
    except Exception as error:
        if not group[0].broken:
            store.set(failed(rank), f"{type(error).__name__}: {brief(error)}")
        raise


def _end_with_the_first() -> None:
    """End this process soon after the first rank's engine, which closes its end of the pipe: what waits on a GPU for
    another rank waits for ever."""
    waiting = select.poll()
    waiting.register(sys.stdin.fileno(), 0)  # no more than that it is closed
    waiting.poll()
    time.sleep(END_SECONDS)
    os._exit(1)


def received(stream: IO[bytes]) -> Iterator[Any]:
    """What comes through a pipe until it is closed."""
    while True:
        try:
            yield pickle.load(stream)
        except EOFError:
            return


def main() -> None:
    """A rank as a process (rank_process.py): the first message is its :class:`Start`."""
    threading.Thread(target=_end_with_the_first, name="saccade-first", daemon=True).start()
    messages = received(sys.stdin.buffer)
    code = 0
    try:
        for start in messages:
            serve(start, messages)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # nothing is left to be written, and taking all modules down takes a second, in which others wait


if __name__ == "__main__":
    main()
