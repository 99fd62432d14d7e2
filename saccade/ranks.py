"""The processes of an engine's other ranks: started by the first, and what each of them does."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as distributed

from saccade.engine.attention import Watch
from saccade.engine.ranks.link import ANSWER_SECONDS, RankGroup, RankLink, counts_path, failed, ready, send
from saccade.engine.ranks.watch import SumCounts
from saccade.engine.ranks.worker import OtherRank
from saccade.engine.rows.calls import Setting
from saccade.engine.settings.config import EngineConfig
from saccade.errors import brief
from saccade.kv import BlockManager
from saccade.models.calibration import Calibrations
from saccade.models.folders import checkpoint_folder
from saccade.models.loader import load_model
from saccade.models.shards import shard_model
from saccade.pools import layout_of, make_pool


class Start(NamedTuple):
    """What a rank is given first. ``blocks``: of its KV pool; ``length``: of the longest sequence; ``threads``: of
    torch."""

    config: EngineConfig
    rank: int
    store: str
    blocks: int
    length: int
    exact: bool
    threads: int


def start_ranks(link: RankLink, config: EngineConfig, pool: BlockManager, length: int, exact: bool) -> None:
    """Start the other ranks of ``link`` and wait for them. RanksLost, which says why, where one does not come up."""
    here = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    for rank in range(1, link.ranks):
        process = subprocess.Popen(
            [sys.executable, "-m", "saccade.ranks"],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is the first rank's to handle
        )
        link.processes.append(process)
        start = Start(config, rank, str(link.store_path), pool.num_blocks, length, exact, torch.get_num_threads())
        send(process, pickle.dumps(start))
    link.join()


def serve(start: Start, messages: Iterator[Any]) -> None:
    """Be a rank until the first one says no more."""
    config, rank, ranks = start.config, start.rank, start.config.tensor_parallel_size
    torch.set_num_threads(start.threads)
    store = distributed.FileStore(start.store, ranks)
    group: list[RankGroup] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first rank has said so
            folder = checkpoint_folder(config.model, config.revision)
            whole = load_model(folder, config.dtype, config.device, config.quantize, config.lora, config.layers)
        model = shard_model(whole, rank, ranks, lambda: group[0])
        spec = model.spec
        memory = start.blocks * layout_of(config, model).block_bytes
        pool, _ = make_pool(replace(config, kv_memory=memory), model, start.length)
        model.runner.turn_keys(pool.format.turned)
        setting = Setting(spec, Calibrations(spec, model.path, rank, ranks), Watch(), config.backend, config.threads)
    except Exception as error:
        store.set(failed(rank), f"{type(error).__name__}: {brief(error)}")
        raise
    store.set(ready(rank), "")
    counts = SumCounts(counts_path(Path(start.store)), ranks)
    group.append(RankGroup(store, rank, ranks, ANSWER_SECONDS, counts))
    OtherRank(group[0], pool, model.runner, setting, start.exact).follow(messages)


def received(stream: IO[bytes]) -> Iterator[Any]:
    """What comes through a pipe until it is closed."""
    while True:
        try:
            yield pickle.load(stream)
        except EOFError:
            return


def main() -> None:
    """A rank as a process: the first message is its :class:`Start`."""
    messages = received(sys.stdin.buffer)
    for start in messages:
        serve(start, messages)
    os._exit(0)  # nothing is left to be written, and taking all modules down takes a second


if __name__ == "__main__":
    main()
