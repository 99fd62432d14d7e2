"""vLLM's FlashAttention backend with rows of long prompts read by a policy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from saccade.errors import SaccadeError
from saccade.kv.format import BLOCK_SIZES
from saccade_vllm.prefill import Prefill
from saccade_vllm.rows import Rows, packed, slots, split
from saccade_vllm.settings import POLICY, Settings

logger = init_logger("vllm.saccade")
BLOCK_SIZE = 32  # where vLLM's default is a smaller one: kernels read that many keys at once
_prefills: dict[tuple[Any, int], Prefill] = {}


def prefill_of(settings: Settings, layers: int) -> Prefill:
    """The one of this process, which counts for all layers."""
    key = settings, layers
    if key not in _prefills:
        _prefills[key] = Prefill(settings.policy, layers)
    return _prefills[key]


@dataclass(eq=False)
class Step:
    """A step with rows that the policy chooses for. ``others``: vLLM's metadata of the rest, ``where`` its packed rows;
    None where there is no rest."""

    chosen: list[Rows]
    others: FlashAttentionMetadata | None
    where: slice | Tensor | None


class Builder(FlashAttentionMetadataBuilder):
    """Takes the rows that the policy chooses for out of what vLLM's kernels are given."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH  # a recorded step of prompts would replay one choice
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._settings = Settings.read()
        self._drafted = vllm_config.num_speculative_tokens

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        lengths = common.seq_lens_cpu_upper_bound  # exact for prompts
        if self._settings is None or common.causal is not True:
            return super().build(common_prefix_len, common, fast_build)
        if lengths is None:
            logger.warning_once("saccade: vLLM does not say how long sequences are; it reads them whole")
            return super().build(common_prefix_len, common, fast_build)
        starts, upto = common.query_start_loc_cpu.tolist(), lengths.tolist()
        chosen, others = split(starts, upto, self._prefilling(common, starts), self._settings.least)
        if not chosen:
            return super().build(common_prefix_len, common, fast_build)
        whole = super().build(0, common, True)
        tables = slots(common.block_table_tensor)
        rows = [Rows(starts[one], starts[one + 1], upto[one], tables[one : one + 1], True) for one in chosen]
        where, rest = None, None
        if others:
            where = packed(starts, others, self.device)
            rest = super().build(0, _only(common, others, starts, upto, self.device), True)
        whole.saccade = Step(rows, rest, where)  # type: ignore[attr-defined]
        return whole

    def _prefilling(self, common: CommonAttentionMetadata, starts: list[int]) -> list[bool]:
        """Which sequences' rows are of prompts. vLLM's second model runner, which runs dense models by default, does
        not say: there they are those of more rows than a decode step has, with its drafts."""
        if common.is_prefilling is not None:
            return common.is_prefilling.tolist()[: common.num_reqs]
        return [stop - start > 1 + self._drafted for start, stop in pairwise(starts)]


def _only(
    common: CommonAttentionMetadata, numbers: list[int], starts: list[int], lengths: list[int], device: torch.device
) -> CommonAttentionMetadata:
    """Of sequences ``numbers`` alone, their rows packed anew."""
    sizes = torch.tensor([starts[one + 1] - starts[one] for one in numbers], dtype=torch.int32)
    begins = torch.zeros(len(numbers) + 1, dtype=torch.int32)
    begins[1:] = sizes.cumsum(0)
    index = torch.tensor(numbers)
    there = index.to(device, non_blocking=True)
    return common.replace(
        query_start_loc=begins.to(device, non_blocking=True),
        query_start_loc_cpu=begins,
        seq_lens=common.seq_lens[there],
        seq_lens_cpu_upper_bound=torch.tensor([lengths[one] for one in numbers], dtype=torch.int32),
        num_reqs=len(numbers),
        num_actual_tokens=int(begins[-1]),
        max_query_len=int(sizes.max()),
        max_seq_len=max(lengths[one] for one in numbers),
        block_table_tensor=common.block_table_tensor[there],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[index],
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


class Impl(FlashAttentionImpl):
    """A layer's attention."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._settings = Settings.read()
        if self._settings is None:
            raise SaccadeError(f"the attention backend of saccade needs a policy: set {POLICY}, 'flexprefill' say")
        self._why = self._unserved()
        self._prefill: Prefill | None = None
        self._layer = 0

    def _unserved(self) -> str | None:
        """Why vLLM's own kernels read all rows of this layer; None where they do not."""
        if self.attn_type != AttentionType.DECODER:
            return f"attention of an {self.attn_type}"
        if self.sliding_window != (-1, -1):
            return "a sliding window"
        if self.alibi_slopes is not None or self.sinks is not None:
            return "sinks or slopes beside its keys"
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            return f"keys stored in {self.kv_cache_dtype}"
        if self.dcp_world_size > 1:
            return "keys of one sequence on several ranks"
        return None

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata, output: Tensor, *args: Any, **more: Any,
    ) -> Tensor:  # fmt: skip
        step: Step | None = getattr(attn_metadata, "saccade", None)
        if step is None or self._why is not None:
            if step is not None:
                logger.info_once("saccade: layers with %s are read whole, by vLLM", self._why)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **more)
        if step.others is not None:
            own, into = query[step.where], output[step.where]
            super().forward(layer, own, key, value, kv_cache, step.others, into, *args, **more)
            if isinstance(step.where, Tensor):
                output[step.where] = into
        prefill, pages = self._of(layer), kv_cache.transpose(2, 3)  # as it lies: kv_heads before the block's rows
        for rows in step.chosen:
            some = slice(rows.first, rows.stop)
            prefill.attend(
                query[some], pages, rows, self._layer, self.scale, self.logits_soft_cap or None, output[some]
            )
        if self._layer == prefill.layers - 1 and (line := prefill.line()) is not None:
            logger.info(line)
        return output

    def _of(self, layer: Any) -> Prefill:
        """What reads the rows; the first that a layer gets say which one it is."""
        if self._prefill is None:
            from vllm.forward_context import get_forward_context

            assert self._settings is not None
            self._layer = extract_layer_index(layer.layer_name)
            names = get_forward_context().no_compile_layers
            layers = 1 + max(extract_layer_index(name) for name, one in names.items() if hasattr(one, "impl"))
            self._prefill = prefill_of(self._settings, layers)
        return self._prefill


class Backend(FlashAttentionBackend):
    """``--attention-backend CUSTOM``."""

    accept_output_buffer: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return list(BLOCK_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if default_block_size in BLOCK_SIZES[1:] else BLOCK_SIZE

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "HND"
