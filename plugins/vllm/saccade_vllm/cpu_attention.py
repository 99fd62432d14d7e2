"""vLLM's attention on a CPU, all of it by Saccade's kernels: a policy chooses for rows of long prompts, other rows read
everything. vLLM's own CPU kernels keep keys in an order of their own, which no other reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from saccade.errors import SaccadeError
from saccade.kv.format import BLOCK_SIZES
from saccade_vllm.prefill import Prefill
from saccade_vllm.rows import Rows, slots, split
from saccade_vllm.settings import POLICY, Settings

logger = init_logger("vllm.saccade")
_prefills: dict[tuple[Any, int], Prefill] = {}


@dataclass
class Metadata:
    """``rows``: of all sequences. ``slot_mapping``: where the keys of this step go, -1 for none."""

    rows: list[Rows]
    slot_mapping: Tensor
    num_actual_tokens: int


class Builder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = Settings.read()
        assert settings is not None, "the backend is offered with a policy alone"
        self._settings = settings

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise SaccadeError(f"saccade's attention on a CPU is causal; unset {POLICY} for this model")
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        prefilling = [False] * len(lengths) if common.is_prefilling is None else common.is_prefilling.tolist()
        chosen, others = split(starts, lengths, prefilling, self._settings.least)
        tables, mine = slots(common.block_table_tensor), set(chosen)
        rows = [
            Rows(starts[one], starts[one + 1], lengths[one], tables[one : one + 1], one in mine)
            for one in sorted(chosen + others)
        ]
        return Metadata(rows, common.slot_mapping, common.num_actual_tokens)


class Impl(CPUAttentionBackendImpl):
    """A layer's attention. SaccadeError for layers that it does not serve: nothing else reads its cache."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        settings = Settings.read()
        assert settings is not None, "the backend is offered with a policy alone"
        self._settings = settings
        self._prefill: Prefill | None = None
        self._layer = 0
        given = {
            "a sliding window": self.sliding_window != -1,
            "slopes": self.alibi_slopes is not None,
            "sinks": self.sinks is not None,
            f"keys stored in {self.kv_cache_dtype}": self.is_fp8_kv_cache,
            f"attention of an {self.attn_type}": self.attn_type != AttentionType.DECODER,
        }
        if any(given.values()):
            what = next(name for name, there in given.items() if there)
            raise SaccadeError(f"saccade's attention in vLLM on a CPU does not serve {what}; unset {POLICY}")

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Metadata | None, output: Tensor, *args: Any, **more: Any,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None:
            return output.fill_(0)
        prefill = self._of(layer)
        for rows in attn_metadata.rows:
            some = slice(rows.first, rows.stop)
            cap = self.logits_soft_cap or None
            prefill.attend(query[some], kv_cache, rows, self._layer, self.scale, cap, output[some])
        if self._layer == prefill.layers - 1 and (line := prefill.line()) is not None:
            logger.info(line)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """``key``, ``value`` [>= rows, kv_heads, head_dim] to the places that ``slot_mapping`` says."""
        size = kv_cache.shape[3]
        here = (slot_mapping >= 0).nonzero()[:, 0]
        blocks, offsets = slot_mapping[here] // size, slot_mapping[here] % size
        kv_cache[blocks, 0, :, offsets] = key[here]
        kv_cache[blocks, 1, :, offsets] = value[here]

    def _of(self, layer: Any) -> Prefill:
        if self._prefill is None:
            from vllm.forward_context import get_forward_context

            self._layer = extract_layer_index(layer.layer_name)
            names = get_forward_context().no_compile_layers
            layers = 1 + max(extract_layer_index(name) for name, one in names.items() if hasattr(one, "impl"))
            self._prefill = _prefills.setdefault((self._settings, layers), Prefill(self._settings.policy, layers))
        return self._prefill


class Backend(CPUAttentionBackend):
    """In the place of vLLM's CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return list(BLOCK_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, num_kv_heads, block_size, head_size
