"""The settings of an engine, stated once for the Python face, the command line, the evaluation and the benchmarks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch

from saccade.engine.settings import rank_limits
from saccade.errors import SaccadeError, check_share, finite_number, shown, whole_number
from saccade.files import is_folder
from saccade.kv import BLOCK_SIZES
from saccade.kv.compute import MODES
from saccade.kv.replacement import POLICIES as REPLACEMENTS
from saccade.kv.row_formats import check_name
from saccade.machine import best_device, check_threads, folder_and_size, gpu_bytes, parse_bytes
from saccade.methods.policy import Policy, PolicyLike
from saccade.ops.attend import BACKENDS
from saccade.ops.group_rounding import QUANTIZATIONS

UNITS = "block", "head"  # of what moves between a device and host memory
PROFILE = "profile"  # the kv_memory that a profiling run finds (profiling.py)
POOLS = "unified", "per_layer"  # of slots
SESSIONS = "16GiB"  # of a session_dir that names no size
CHUNK = 4096  # rows of a prefill's step by default
CHUNK_ON_GPU = 8192  # of a dense one on a large GPU, which is not busy with fewer
ROOMY = 32 << 30  # bytes of a GPU that has room for what so many rows of a large model take


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run.

    ``model``: a checkpoint folder, a GGUF file, a hub name such as ``"Qwen/Qwen3-8B"`` or ``"Qwen/Qwen3-8B@main"``, a
    model that ``saccade fetch`` brought (docs/models.md), or one that is built in: ``"retriever"`` or ``"reference"``.
    ``revision``: of a hub's model: a branch, tag or commit.
    ``policy``: the default for requests that name none (text, mapping or Policy). ``dtype``: ``auto``, ``float32``,
    ``bfloat16`` or ``float16``. ``quantize``, for weights of 16 or 32 bits (docs/models.md): ``int4`` or ``int8``:
    all matrices rounded to integers by groups of channels as they are loaded, embedding and head to 8 bits; ``fp8``:
    weights of the layers held, and their products run, in 8-bit floats on a GPU that has such products;
    ``fp8_reference``: the same numbers by slow torch operations, anywhere. ``lora``: a folder of a LoRA adapter that is
    added to the weights as they load (docs/models.md). ``max_model_len``: most tokens of one
    sequence, the model's own limit by default.
    ``kv_memory``: bytes or text such as ``"4GiB"`` for keys and values, at most a quarter of it for states of layers
    that keep one (docs/models.md); by default 40 % of the free memory (85 % on a GPU), at most what ``max_requests``
    full-length sequences need; ``"profile"``: what a profiling run leaves (profiling.py).
    ``kv_host``: bytes of host memory where keys and
    values go that ``kv_memory`` has no room for (kv/tiers.py), pinned for a GPU; ``kv_disk``: a folder and a size such
    as ``"~/kv:100GiB"`` for the same on a CPU. ``kv_dtype``: how keys and values are stored (docs/tiers.md): ``auto``,
    in the model's dtype; ``bf16``; ``int8``: in 8 bits and a scale for each token, KV head and 64 channels;
    ``fp8``: in e4m3 and a scale for each token and KV head, for comparisons. ``kv_rotate``: whether queries
    and keys are turned by Hadamard products before keys are stored, so that fewer of their digits are lost
    (models/key_turns.py); by default where ``kv_dtype`` is ``int8``.
    ``kv_replacement``: which of them leave memory first: ``clock``, ``lru``, ``fifo``, ``random`` or ``cycle``.
    ``kv_pool``: one ``unified`` pool of slots for all layers, or ``per_layer`` an equal share for each, for comparison.
    ``kv_unit``: what moves to ``kv_host`` and back: a ``block`` of all KV heads, or that of the one ``head`` that reads
    it.
    ``kv_compute``: where decode rows on the row path attend what lies there: on the ``device``, which fetches it; on
    the ``host``, where it lies, and where requests that decode by ``lfps`` then live (engine/rows/hosted.py); or
    ``auto``, by what either was measured to take (kv/compute.py).
    ``prefill_chunk``: most prompt tokens of one request in one step; by default 4,096, and 8,192 of a dense prefill on
    a GPU of 32 GiB or more. What a sparse prefill selects hangs on it. ``max_requests``: most requests that
    run at once. ``max_token_gap``: seconds between two tokens of a request that the prefills of others keep to
    (engine/scheduling/token_gap.py); None, the default, 0 or ``"none"`` for no bound. ``max_waiting``: most requests
    that queue behind them; a caller that adds more waits until there is room. ``block_size``: tokens of a KV block.
    ``backend``:
    ``auto``, ``cpu`` (C++ kernels or an error), ``triton`` (GPU kernels or an error) or ``reference``. ``fa4``:
    FlashAttention-4's kernels run the prefill calls that they serve (the extra of that name, ops/fa4.py); by default
    where it is installed and ``backend`` is ``auto``.
    ``threads``: of attention on a CPU, torch's by default. ``exact`` makes a result independent of its batch to the
    last bit, at the price of one pass over the weights per request, and per drafted row; by default yes in float32 and
    no otherwise. ``device``: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: the GPU where torch sees one, and from then on
    its name. ``cuda_graphs`` records batched decode steps on a GPU and replays them; without it their kernels are
    launched one by one. ``generation_config``: where requests without sampling parameters take theirs from:
    ``auto`` (the checkpoint's generation_config.json), ``none`` or another folder that holds such a file.
    ``grammar_seconds``: most seconds that following one answer's grammar may take (engine/sampling/masks.py).
    ``enable_prefix_caching``: requests and sessions that begin with the same tokens, computed the same way, share
    their blocks (engine/scheduling/prefixes.py); what ended requests leave is kept until the room is needed
    (``LLM.reset_prefix_cache`` gives it up). As in vLLM this is the default.
    ``session_dir``: a folder, or ``"folder:SIZE"`` with the most bytes of it (``"~/sessions:20GiB"``; 16 GiB by
    default), where sessions that have a name survive (durable.py); without it, ``sessions`` in the folder of
    ``kv_disk``. ``session_shared``: several processes have that folder at once, each with so many bytes of it
    (shared_store.py).

    ``audit``, ``audit_steps``, ``target``: of requests that name none (docs/audit.md).
    ``tensor_parallel_size``: processes that share out the model's KV heads, on one CPU or on as many GPUs of a machine,
    from ``device`` on (docs/scale-out.md; experimental). ``kv_memory`` and ``threads`` are each one's.
    ``layers``: the model's first so many layers alone, whose answers mean nothing: for measuring, and for dry runs.

    Raises SaccadeError, or a subclass of it, that names the value, what is allowed and the way out.
    """

    model: str | Path = "retriever"
    policy: PolicyLike = "dense"
    dtype: str | torch.dtype = "auto"
    quantize: str | None = None
    lora: str | Path | None = None
    max_model_len: int | None = None
    kv_memory: int | float | str | None = None
    kv_host: int | float | str | None = None
    kv_disk: str | None = None
    kv_dtype: str = "auto"
    kv_rotate: bool | None = None
    kv_replacement: str = "clock"
    kv_pool: str = "unified"
    kv_unit: str = "block"
    kv_compute: str = "device"
    prefill_chunk: int | None = None
    max_requests: int = 64
    max_token_gap: float | str | None = None
    max_waiting: int = 1024
    block_size: int = 32
    backend: str = "auto"
    fa4: bool | None = None
    threads: int | None = None
    exact: bool | None = None
    device: str = "auto"
    cuda_graphs: bool = True
    generation_config: str | Path = "auto"
    revision: str | None = None
    grammar_seconds: float = 30.0
    enable_prefix_caching: bool = True
    session_dir: str | Path | None = None
    session_shared: bool = False
    audit: float = 0.0
    audit_steps: float = 0.0
    target: float | None = None
    tensor_parallel_size: int = 1
    layers: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", Policy.parse(self.policy))
        for name in ("prefill_chunk", "max_requests", "max_waiting", "tensor_parallel_size"):
            value, by_device = getattr(self, name), name == "prefill_chunk"
            if not whole_number(value, 1) and not (by_device and value is None):
                allowed = "an integer >= 1, or None for the device's default" if by_device else "an integer >= 1"
                raise SaccadeError(f"{name}={shown(value)} must be {allowed}")
        if self.layers is not None and not whole_number(self.layers, 1):
            raise SaccadeError(f"layers={shown(self.layers)} must be an integer >= 1, or None for all")
        object.__setattr__(self, "max_token_gap", _gap(self.max_token_gap))
        if not finite_number(self.grammar_seconds) or not 0.01 <= self.grammar_seconds <= 86400:
            raise SaccadeError(
                f"grammar_seconds={shown(self.grammar_seconds)} must be a number of seconds from 0.01 to 86400"
            )
        source = self.generation_config
        if isinstance(source, str) and source == "vllm":  # its spelling of "none"
            object.__setattr__(self, "generation_config", "none")
        elif not isinstance(source, str | Path) or (source not in ("auto", "none") and not is_folder(source)):
            raise SaccadeError(
                f"generation_config={shown(source)} must be 'auto', 'none' or a folder that holds "
                "generation_config.json"
            )
        if self.quantize is not None and (not isinstance(self.quantize, str) or self.quantize not in QUANTIZATIONS):
            raise SaccadeError(
                f"quantize={shown(self.quantize)} is unknown; known: {', '.join(QUANTIZATIONS)}, or None for none"
            )
        if self.lora is not None and not (isinstance(self.lora, (str, Path)) and str(self.lora)):
            raise SaccadeError(f"lora={shown(self.lora)} must be a folder that holds an adapter, or None for none")
        if isinstance(self.device, str) and self.device == "auto":
            object.__setattr__(self, "device", best_device())
        if not isinstance(self.block_size, int) or self.block_size not in BLOCK_SIZES:
            raise SaccadeError(f"block_size={shown(self.block_size)} is not one of {BLOCK_SIZES}")
        if self.kv_host is not None:
            parse_bytes(self.kv_host, "kv_host")
        if self.kv_disk is not None:
            folder_and_size(self.kv_disk, "kv_disk")
            if self.device != "cpu" and self.kv_host is None:
                raise SaccadeError(
                    f"kv_disk={shown(self.kv_disk)} needs host memory before it on device "
                    f"{shown(self.device)}; give kv_host, too, or device='cpu'"
                )
            if self.kv_unit == "head":
                raise SaccadeError("kv_unit='head' goes with kv_host alone; leave kv_disk out, or kv_unit")
            if self.kv_compute != "device":
                raise SaccadeError(
                    f"kv_compute={shown(self.kv_compute)} goes with kv_host alone; leave kv_disk out, or kv_compute"
                )
        if not isinstance(self.kv_replacement, str) or self.kv_replacement not in REPLACEMENTS:
            raise SaccadeError(
                f"kv_replacement={shown(self.kv_replacement)} is unknown; known: {', '.join(REPLACEMENTS)}"
            )
        check_name(self.kv_dtype)
        if not isinstance(self.kv_pool, str) or self.kv_pool not in POOLS:
            raise SaccadeError(f"kv_pool={shown(self.kv_pool)} is unknown; known: {', '.join(POOLS)}")
        if self.kv_pool == "per_layer" and self.kv_host is None and self.kv_disk is None:
            raise SaccadeError(
                "kv_pool='per_layer' shares out memory between layers whose KV moves; give kv_host or kv_disk, too"
            )
        if not isinstance(self.kv_unit, str) or self.kv_unit not in UNITS:
            raise SaccadeError(f"kv_unit={shown(self.kv_unit)} is unknown; known: {', '.join(UNITS)}")
        if self.kv_unit == "head" and self.kv_host is None:
            raise SaccadeError("kv_unit='head' is for KV that moves to host memory and back; give kv_host, too")
        if not isinstance(self.kv_compute, str) or self.kv_compute not in MODES:
            raise SaccadeError(f"kv_compute={shown(self.kv_compute)} is unknown; known: {', '.join(MODES)}")
        if self.kv_compute != "device" and self.kv_host is None:
            raise SaccadeError(
                f"kv_compute={self.kv_compute!r} attends KV in host memory where it lies; give kv_host, too"
            )
        for name in ("exact", "fa4", "kv_rotate", "cuda_graphs", "enable_prefix_caching", "session_shared"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name in ("exact", "fa4", "kv_rotate") and value is None):
                raise SaccadeError(f"{name}={shown(value)} must be True or False")
        for name in ("audit", "audit_steps", "target"):
            if name != "target" or self.target is not None:
                check_share(name, getattr(self, name), SaccadeError)
        if self.session_dir is not None:
            folder_and_size(self.session_dir, "session_dir", SESSIONS)
        elif self.session_shared and self.kv_disk is None:
            raise SaccadeError("session_shared=True shares a folder for sessions; give session_dir or kv_disk, too")
        if self.threads is not None:
            check_threads(self.threads)
        if not isinstance(self.backend, str) or self.backend not in BACKENDS:
            raise SaccadeError(f"backend={shown(self.backend)} is unknown; known: {', '.join(BACKENDS)}")
        rank_limits.check_settings(vars(self))

    @property
    def chunk(self) -> int:
        """Most rows of a prefill in a step, as sparse ones take them. What a method selects hangs on where its chunks
        end, so this is no matter of the device."""
        return CHUNK if self.prefill_chunk is None else self.prefill_chunk

    @property
    def dense_chunk(self) -> int:
        """Most rows in a step of a prefill that reads everything, whatever its chunks are."""
        return _dense_chunk(self.device) if self.prefill_chunk is None else self.prefill_chunk

    @property
    def token_gap(self) -> float | None:
        """``max_token_gap``, read."""
        assert not isinstance(self.max_token_gap, str)
        return self.max_token_gap

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """A config of some settings. SaccadeError for a name that is none."""
        known = {one.name for one in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise SaccadeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**settings)


def _dense_chunk(device: object) -> int:
    """``dense_chunk`` where no ``prefill_chunk`` is given. ``device`` may still be wrong."""
    if not isinstance(device, str) or not device.startswith("cuda"):
        return CHUNK
    size = gpu_bytes(device)
    return CHUNK if size is not None and size < ROOMY else CHUNK_ON_GPU


def _gap(given: object) -> float | None:
    """``max_token_gap`` as it may be written: a number, its text, or what stands for no bound."""
    gap = given
    if isinstance(given, str):
        with suppress(ValueError):
            gap = None if given.strip().lower() == "none" else float(given)
    if gap is None or (finite_number(gap) and gap == 0):
        return None
    if isinstance(gap, str) or not finite_number(gap) or not 0.001 <= cast(float, gap) <= 3600:
        raise SaccadeError(
            f"max_token_gap={shown(given)} must be a number of seconds from 0.001 to 3600, or 0 or 'none' for no bound"
        )
    return float(cast(float, gap))
