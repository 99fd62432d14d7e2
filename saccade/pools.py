"""The KV pool that settings ask for: how much memory, and what lies behind it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from saccade.engine.settings.config import PROFILE, EngineConfig
from saccade.errors import CapacityError, SaccadeError, shown
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.disk import DiskTier
from saccade.kv.groups import Groups
from saccade.kv.host import HostTier
from saccade.kv.host_disk import HostAndDisk
from saccade.kv.row_formats import RowFormat, format_called
from saccade.kv.sequence_states import EVERY
from saccade.kv.states import StatePool
from saccade.kv.tier import Tier
from saccade.machine import available_bytes, folder_and_size, parse_bytes, show_bytes
from saccade.models.loader import LoadedModel
from saccade.ops import cpu, debug
from saccade.ops.movers import row_mover
from saccade.profiling import MemoryProfile, profile

LEAST_STATES = 2  # of a request that runs: its own, and one to go back to or to copy it to


def make_pool(
    config: EngineConfig, model: LoadedModel, max_model_len: int, states: int | None = None
) -> tuple[BlockManager, MemoryProfile | None]:
    """The KV pool that the settings ask for, and what a profiling run found if they ask for one. CapacityError where it
    would not hold a block a layer, SaccadeError where nothing here reads rows of ``kv_dtype``. ``states``: how many
    slots there are for states of layers that keep one, beside ``kv_memory``."""
    spec, layout = model.spec, layout_of(config, model)
    groups = Groups.of(layout, spec.reads or tuple(range(spec.layers)), spec.shapes)
    if len(groups) > 1:
        _check_grouped(config, spec.family)
    found = None
    if isinstance(config.kv_memory, str) and config.kv_memory == PROFILE:
        found = profile(config, model, groups, max_model_len)
        memory = found.kv
    elif config.kv_memory is None:
        on_gpu = model.device.type == "cuda"
        free = 0.85 * torch.cuda.mem_get_info(model.device)[0] if on_gpu else 0.4 * available_bytes()
        memory = int(free)
    else:
        memory = parse_bytes(config.kv_memory)
    kept = None
    if spec.states is not None and states is not None:
        kept = StatePool(spec.states, states, model.device)
    elif spec.states is not None:
        kept = _state_pool(config, model, memory, max_model_len)
        memory -= kept.nbytes
    slots = groups.slots(memory)
    if found is not None or config.kv_memory is None:
        useful = config.max_requests * layout.blocks(max_model_len)
        slots = [min(useful * layers, own) for layers, own in zip(groups.layers, slots)]
    if any(own < layers for layers, own in zip(groups.layers, slots)):
        one = f"{layout.block_bytes} bytes" if len(groups) == 1 else f"{groups.block_bytes} bytes in all layers"
        raise CapacityError(
            f"kv_memory={shown(config.kv_memory)} holds {sum(slots)} KV blocks of {one}, but {spec.stored} layers "
            f"need one each; give at least {groups.block_bytes} bytes"
        )
    storages = [KVStorage(one, own, model.device, row_mover(model.device)) for one, own in zip(groups.layouts, slots)]
    if len(groups) == 1:
        apart = config.kv_unit == "head" and spec.kv_heads > 1
        tier = _tier(config, storages[0], 1.0, apart)
        if tier is None:
            return BlockManager(storages[0], spec.stored, states=kept, reads=spec.reads), found
        given = {"heads_apart": apart, "tier": tier, "states": kept, "reads": spec.reads, **_options(config)}
        return BlockManager(storages[0], spec.stored, **given), found
    tiers = [_tier(config, one, share) for one, share in zip(storages, groups.shares)]
    return groups.pool(storages, tiers, **_options(config)), found


def _options(config: EngineConfig) -> dict[str, Any]:
    """How parts move between memory and tiers."""
    return {
        "replacement": config.kv_replacement,
        "debug": debug.ON,
        "layers_apart": config.kv_pool == "per_layer",
    }


def _tier(config: EngineConfig, storage: KVStorage, share: float, apart: bool = False) -> Tier | None:
    """The tier behind a pool, with its ``share`` of what the settings give; None where they give none."""
    compute = config.kv_compute
    if config.kv_host is not None and config.kv_disk is not None:
        folder, most = folder_and_size(config.kv_disk, "kv_disk")
        size = int(parse_bytes(config.kv_host, "kv_host") * share)
        return HostAndDisk(size, storage, folder.expanduser(), int(most * share), compute=compute)
    if config.kv_host is not None:
        return HostTier(int(parse_bytes(config.kv_host, "kv_host") * share), storage, apart, compute)
    if config.kv_disk is not None:
        folder, most = folder_and_size(config.kv_disk, "kv_disk")
        return DiskTier(folder.expanduser(), int(most * share), storage)
    return None


def _check_grouped(config: EngineConfig, family: str) -> None:
    """SaccadeError for settings that know one size of heads alone."""
    which = f"layers of {family} have heads of more than one size"
    if config.kv_unit == "head":
        raise SaccadeError(f"kv_unit='head': {which}, and parts of single KV heads are of one; leave it out")
    if config.kv_compute != "device":
        raise SaccadeError(
            f"kv_compute={config.kv_compute!r}: {which}, and what the CPU attends in host memory is of one; give "
            "kv_compute='device'"
        )


def layout_of(config: EngineConfig, model: LoadedModel) -> KVFormat:
    """How keys and values of ``model``, or of a rank's part, lie. SaccadeError where nothing reads ``kv_dtype``."""
    spec = model.spec
    reader = _reader(config.backend, model.device)
    rows = format_called(config.kv_dtype, spec.dtype, reader)
    if rows.coded and reader == "triton" and spec.value_dim is not None:
        raise SaccadeError(
            f"kv_dtype={config.kv_dtype!r}: {spec.family} stores latents, which a GPU's kernels read in the model's "
            "dtype alone; leave kv_dtype at 'auto'"
        )
    turned = _turns(config, rows, model)
    balanced = turned and model.balances_modules
    sizes = spec.dtype, spec.kv_heads, spec.head_dim, config.block_size
    return KVFormat(*sizes, rows, rows, turned, balanced, spec.value_dim)


def _reader(backend: str, device: torch.device) -> str:
    """What reads stored rows on ``device``, of row_formats.READERS."""
    if device.type != "cpu" or backend == "triton":
        return "triton"
    return "reference" if backend == "reference" or not cpu.available() else "cpu"


def _turns(config: EngineConfig, rows: RowFormat, model: LoadedModel) -> bool:
    """Whether keys are stored in the basis of ``kv_rotate``."""
    if model.spec.value_dim is not None:
        if config.kv_rotate:
            raise SaccadeError(
                f"kv_rotate=True: {model.spec.family} stores latents, which are keys and values in one, and values are "
                "not turned; leave kv_rotate out"
            )
        return False
    return rows.turned if config.kv_rotate is None else config.kv_rotate


def _state_pool(config: EngineConfig, model: LoadedModel, memory: int, max_model_len: int) -> StatePool:
    """The states of layers that keep one, in at most a quarter of ``memory``, and no more than sequences of full length
    take with all their snapshots. CapacityError where that does not hold what a request takes."""
    format = model.spec.states
    assert format is not None, "no layer keeps a state"
    useful = config.max_requests * (3 + max_model_len // EVERY) + 1
    slots = min(useful, memory // 4 // format.nbytes)
    if slots < LEAST_STATES:
        raise CapacityError(
            f"kv_memory={shown(config.kv_memory)}: a quarter of it holds {slots} states of {format.nbytes} bytes, "
            f"which layers that keep one take; give at least {4 * LEAST_STATES * format.nbytes} bytes"
        )
    if slots <= config.max_requests:
        warnings.warn(
            f"max_requests={config.max_requests} is lowered to {slots - 1}: each request that runs has a state of "
            f"{show_bytes(format.nbytes)}, and all of them a quarter of kv_memory; raise that",
            stacklevel=3,
        )
    return StatePool(format, slots, model.device)
