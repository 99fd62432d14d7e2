"""What the calls of one transformers model share: settings, the KV pool, memories, and the reports of the last call."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from saccade.engine.attention import Watch
from saccade.engine.memory.memories import Memories
from saccade.engine.rows.backend import RowBackend
from saccade.engine.rows.calls import Setting
from saccade.engine.settings.checks import Checks
from saccade.engine.settings.config import EngineConfig
from saccade.engine.watch.report import Report
from saccade.errors import ModelError, PolicyError, SaccadeError
from saccade.kv import BlockManager
from saccade.methods.policy import Policy, PolicyLike
from saccade.methods.verified import Verified
from saccade.models.attention import ATTENTION_NAME
from saccade.models.calibration import Calibrations
from saccade.models.families import FAMILIES, configured_shapes, configured_windows, keeping_layers, read_layers
from saccade.models.hf_config import max_position
from saccade.models.interface import ModelSpec
from saccade.models.key_turns import KeyTurn, turn_of_module
from saccade.ops import fa4
from saccade.pools import make_pool

POLICY = "SACCADE_POLICY"  # the environment's: the policy of models that none was chosen for
SETTINGS = ("backend", "block_size", "fa4", "kv_dtype", "kv_memory", "kv_rotate", "prefill_chunk", "threads")
GPU_SHARE = 0.5  # of free memory, where kv_memory does not say: transformers' own tensors need the rest


@dataclass(frozen=True)
class Shown:
    """What a pool and checks must know of a model whose layers transformers runs."""

    spec: ModelSpec
    device: torch.device
    balances_modules: bool = False  # of keys that are stored for others; a cache's are its own model's


@dataclass
class Running:
    """What there is from a model's first rows on."""

    config: EngineConfig
    model: Shown
    pool: BlockManager
    backend: RowBackend
    checks: Checks


class Runtime:
    """Of the model of ``config``, a text decoder's. ModelError for a family that saccade does not serve."""

    def __init__(self, config: PreTrainedConfig) -> None:
        model_type = getattr(config, "model_type", None)
        if model_type not in FAMILIES:
            raise ModelError(
                f"attn_implementation='{ATTENTION_NAME}' does not serve '{model_type}' (served: "
                f"{', '.join(sorted(FAMILIES))}); of a model of several parts give it the text alone: "
                "attn_implementation={'text_config': 'saccade', ...}"
            )
        if keeping_layers(FAMILIES[model_type], config):
            raise ModelError(
                f"attn_implementation='{ATTENTION_NAME}' does not serve '{model_type}': its layers that keep a state "
                "need a cache of their own; use saccade.LLM, or attn_implementation='sdpa'"
            )
        if FAMILIES[model_type].latent:
            raise ModelError(
                f"attn_implementation='{ATTENTION_NAME}' does not serve '{model_type}': transformers' layers make keys "
                "and values of latents before they attend; use saccade.LLM, or attn_implementation='sdpa'"
            )
        if len(set(configured_shapes(FAMILIES[model_type], config))) > 1:
            raise ModelError(
                f"attn_implementation='{ATTENTION_NAME}' does not serve '{model_type}': its layers have heads of "
                "more than one size; use saccade.LLM, or attn_implementation='sdpa'"
            )
        self.reads = read_layers(FAMILIES[model_type], config)
        self._config = weakref.ref(config)
        self.policy = usable(Policy.parse(os.environ.get(POLICY) or "dense"))
        self.settings: dict[str, Any] = {}
        self.memories = Memories()
        self.reports: list[Report] = []
        self.running: Running | None = None
        self._turns: dict[int, KeyTurn] = {}

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    def source(self, layer: int) -> int:
        """Whose keys and values a layer reads: its own number where it stores some."""
        return self.reads[layer] if self.reads else layer

    def turn_of(self, module: Any) -> KeyTurn:
        """How its queries and keys are turned where keys are (``kv_rotate``), by the first that is seen of a layer."""
        layer = module.layer_idx
        if layer not in self._turns:
            self._turns[layer] = turn_of_module(module, FAMILIES[self.config.model_type], self.config)
        return self._turns[layer]

    @property
    def config(self) -> Any:
        config = self._config()
        assert config is not None, "the caller has the model"
        return config

    def set(self, policy: PolicyLike, settings: dict[str, Any]) -> None:
        """See :func:`saccade.transformers.configure`."""
        unknown = sorted(set(settings) - set(SETTINGS))
        if unknown:
            raise SaccadeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(SETTINGS)}")
        EngineConfig.of(device="cpu", **settings)
        chosen = self.policy if policy is None else usable(Policy.parse(policy))
        if settings and self.memories:
            raise SaccadeError(
                f"{', '.join(settings)} cannot change while a cache of this model holds keys; let go of it first"
            )
        if settings:
            self.settings, self.running = {**self.settings, **settings}, None
        self.policy = chosen

    def run_on(self, q: Tensor, k: Tensor) -> Running:
        """What runs rows like ``q``, ``k`` [batch, heads or kv_heads, rows, head_dim]; made by the first. SaccadeError
        for rows that are unlike the first ones."""
        spec = self._spec(q, k)
        if self.running is None:
            self.running = self._made(spec, q.device)
        model = self.running.model
        if model.spec != spec or model.device != q.device:
            if self.memories:
                raise SaccadeError(
                    f"rows in {spec.dtype} on {q.device} after rows in {model.spec.dtype} on {model.device}: keys and "
                    "values of a model lie on one device, in one dtype; load it without device_map and autocast"
                )
            self.running = self._made(spec, q.device)
        return self.running

    def _spec(self, q: Tensor, k: Tensor) -> ModelSpec:
        config = self.config
        return ModelSpec(
            family=config.model_type,
            layers=config.num_hidden_layers,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=k.shape[3],
            vocab_size=config.vocab_size,
            max_position=max_position(config),
            dtype=q.dtype,
            windows=configured_windows(FAMILIES[config.model_type], config),
            reads=self.reads,
        )

    def _made(self, spec: ModelSpec, device: torch.device) -> Running:
        settings = dict(self.settings)
        if device.type == "cuda":
            settings.setdefault("kv_memory", int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]))
        config = EngineConfig.of(device=str(device), **settings)
        model = cast(Any, Shown(spec, device))
        pool, _ = make_pool(config, model, spec.max_position)
        name = Path(getattr(self.config, "_name_or_path", "") or ".")
        calibrations = Calibrations(spec, name if name.is_dir() else None)
        by_fa4 = fa4.wanted(config.fa4, config.backend, device)
        setting = Setting(spec, calibrations, Watch(), config.backend, config.threads, by_fa4)
        checks = Checks(model, pool, spec.max_position, calibrations)
        return Running(config, model, pool, RowBackend(setting, cast(Any, None)), checks)


def usable(policy: Policy) -> Policy:
    """``policy``. PolicyError, naming the part, where transformers' layer loop cannot run it."""
    for method in (policy.prefill, policy.decode):
        why = None
        if isinstance(method, Verified):
            why = "drafts tokens and verifies them, which is the engine's loop"
        elif method.deferred:
            why = "is settled by an engine, which times what pays"
        elif method.looks_ahead or method.looks_at_inputs:
            why = "looks at what layers take in, which transformers does not hand to attention"
        if why is not None:
            raise PolicyError(f"'{method.text}' {why}; use saccade.LLM for it")
    if policy.freeze is not None:
        raise PolicyError(
            f"'{policy.freeze.text}' has rows skip layers, and transformers runs every row through every layer; use "
            f"saccade.LLM for it, or '{replace(policy, freeze=None).text}'"
        )
    return policy


_runtimes: dict[int, Runtime] = {}  # by the id of the model's config, as long as that lives


def runtime_of(config: Any) -> Runtime:
    """Of the model that has ``config``, or whose attention layers have it."""
    found = _runtimes.get(id(config))
    if found is None:
        found = _runtimes[id(config)] = Runtime(config)
        weakref.finalize(config, _runtimes.pop, id(config), None)
    return found


def text_config(model: Any) -> Any:
    """The config that a model's attention layers have."""
    return model.config.get_text_config(decoder=True)
