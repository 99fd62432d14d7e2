"""What a checkpoint is and what it takes, before its weights are read, or without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import GGUF_LINK, Checkpoint, open_checkpoint, open_config
from saccade.models.families import FAMILIES, configured_shapes, configured_windows, keeping_layers, read_layers
from saccade.models.headers import MOST_LAYERS, described_model, refuse_absent_or_other
from saccade.models.hf_config import checked_config, max_position
from saccade.models.keeping import KeepingLayers
from saccade.models.llama_loading import check_plain
from saccade.models.llama_weights import has_shape
from saccade.models.matrix_modules import refuse_unfilled, stored_as
from saccade.models.packed_config import KEYS, scheme_of
from saccade.models.quiet import quiet_transformers
from saccade.models.rounded_weights import bits_of
from saccade.models.target import run_dtype
from saccade.models.text_part import WRAPPERS
from saccade.models.tokenizer import load_tokenizer
from saccade.ops.group_rounding import BITS, CHANNELS


@dataclass(frozen=True)
class ModelFacts:
    """``multimodal``: the type of the checkpoint whose text this is, None of others. ``architecture``: GGUF's name of
    the family, None of a folder. ``formats``: bytes of weights by how they are stored; where ``weights_here`` is False,
    as the config lets expect. ``context``: the longest sequence in tokens. ``windows``: layers that read a window of it
    alone, whose sizes ``layer_windows`` has, None for the others. ``step_share``: of the weights' bytes, those that a
    decode step of one sequence reads: no embedding that is no head too, and of experts those of one token.
    ``token_bytes``: of a token's keys and values in the ``stored_layers`` that attend and store them, in ``dtype``,
    others reading theirs again, and ``layer_bytes`` in each layer that attends; ``shapes``, where layers differ: each
    one's KV heads and head_dim, of which ``kv_heads`` and ``head_dim`` are the first's; ``state_bytes``: of what
    ``state_layers`` layers keep of a sequence of any length instead. ``tokenizer``: its kind, None without one.
    ``own_loop``: whether layers run in our loop of Llama's shape, else as transformers' modules. ``latent``: whether
    what is kept of a token is a latent, a row of ``head_dim`` channels which all heads share."""

    path: Path
    family: str
    multimodal: str | None
    architecture: str | None
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    windows: int
    layer_windows: tuple[int | None, ...]
    vocabulary: int
    dtype: str
    formats: dict[str, int]
    weights_here: bool
    step_share: float
    token_bytes: int
    stored_layers: int
    state_layers: int
    state_bytes: int
    tokenizer: str | None
    chat_template: bool
    own_loop: bool
    layer_bytes: tuple[int, ...]
    latent: bool = False
    shapes: tuple[tuple[int, int], ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Of all weights, as they are stored."""
        return sum(self.formats.values())

    @property
    def step_bytes(self) -> int:
        """Of weights that a decode step of one sequence reads."""
        return round(self.weight_bytes * self.step_share)

    def tokens_in(self, memory: int) -> int:
        """Tokens whose keys and values ``memory`` bytes hold beside the weights, at most the context."""
        return max(0, min(self.context, (memory - self.weight_bytes - self.state_bytes) // self.token_bytes))

    def kv_bytes(self, tokens: int, windowed: bool | None = None) -> int:
        """Of keys and values that a decode step reads after so many tokens, by each layer's window; of layers with a
        window alone, or of those without."""
        return sum(
            size * (tokens if one is None else min(tokens, one))
            for size, one in zip(self.layer_bytes, self.layer_windows)
            if windowed is None or (one is not None) == windowed
        )

    def gain(self, tokens: int, read: float) -> float:
        """How many times fewer bytes a decode step of one sequence reads where layers without a window read a share
        ``read`` of their keys and values: what no policy that reads as much can exceed, if bytes decide."""
        kept = self.kv_bytes(tokens, True) + read * self.kv_bytes(tokens, False)
        others = self.step_bytes + 2 * self.state_bytes  # which are read and written
        return (others + self.kv_bytes(tokens)) / (others + kept)

    @property
    def half_at(self) -> int | None:
        """Tokens at which keys and values are half of what a decode step of one sequence reads. None where that never
        comes, since every layer has a window."""
        low, high = 0, 1 << 40
        if self.kv_bytes(high) < self.step_bytes:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.kv_bytes(middle) >= self.step_bytes else (middle + 1, high)
        return low


@dataclass(frozen=True)
class RefusedModel:
    """A model that does not run here, and the ``reason``. ``parameters``: None where transformers has no such model."""

    path: Path
    family: str
    reason: str
    parameters: int | None


def described(folder: Path, quantize: str | None = None) -> ModelFacts | RefusedModel:
    """:func:`facts_of` the checkpoint in ``folder``, or why its config.json is of none that runs. ModelError for files
    that are missing or broken."""
    checkpoint = open_config(folder)
    try:
        with quiet_transformers():
            config = checked_config(checkpoint)
            scheme = scheme_of(checkpoint.config, f"{checkpoint.path} ({config.model_type})")
            model = described_model(checkpoint, config, torch.bfloat16)
            if scheme is not None and not has_shape(FAMILIES[config.model_type], config):
                refuse_unfilled(model)
    except ModelError as error:
        with quiet_transformers():
            return _refused(checkpoint, str(error))
    return facts_of(folder, quantize)


def facts_of(folder: Path, quantize: str | None = None) -> ModelFacts:
    """Of the checkpoint in ``folder`` (``folders.checkpoint_folder``), which runs on a CPU in its own dtype; without
    safetensors there, of what its config.json describes. ``quantize``: None, or one of ``group_rounding.BITS``, as its
    weights are rounded to then. ModelError as of the loader for what does not load."""
    if quantize is not None and quantize not in BITS:
        raise ModelError(f"quantize={shown(quantize)} is not foretold; known: {', '.join(BITS)}")
    here = (folder / GGUF_LINK).is_symlink() or any(Path(folder).expanduser().glob("*.safetensors"))
    checkpoint = open_checkpoint(folder) if here else open_config(folder)
    with quiet_transformers():
        config = checked_config(checkpoint)
        dtype, _ = run_dtype(checkpoint, "auto", torch.device("cpu"))
        model = described_model(checkpoint, config, dtype)
        tokenizer = load_tokenizer(checkpoint.path)
    family = FAMILIES[config.model_type]
    header, tied = checkpoint.gguf, bool(config.tie_word_embeddings)
    numbers = {name: shape.numel() for name, shape in stored_as(model).items() if name != "lm_head.weight" or not tied}
    formats: Counter[str] = Counter()
    if header is not None or checkpoint.packed is not None:
        refuse_absent_or_other(checkpoint, stored_as(model), tied)
        if not has_shape(family, config):
            refuse_unfilled(model)
    if quantize is not None:
        check_plain(checkpoint, quantize)
        formats = _rounded(model, quantize, dtype)
    elif not here:
        formats = _expected(checkpoint.config, numbers, dtype)
    elif checkpoint.packed is not None:
        formats.update(checkpoint.packed.nbytes)
    elif header is None:
        stored = str(checkpoint.stored_dtype).removeprefix("torch.")
        formats[stored] = sum(one.numel() for one in checkpoint.shapes.values()) * checkpoint.stored_dtype.itemsize
    else:
        for tensor in header.tensors:
            formats[tensor.kind] += tensor.nbytes
    windows = configured_windows(family, config)
    reads = read_layers(family, config) or tuple(range(len(windows)))
    if family.latent:
        shapes = ((1, config.kv_lora_rank + config.qk_rope_head_dim),) * len(windows)
    elif not (shapes := configured_shapes(family, config)):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shapes = ((config.num_key_value_heads, head_dim),) * len(windows)
    each = tuple((1 if family.latent else 2) * heads * width * dtype.itemsize for heads, width in shapes)
    keeps = bool(keeping_layers(family, config))
    with quiet_transformers():
        states = KeepingLayers(model.get_decoder().layers, family, config).format if keeps else None
    whole = checkpoint.whole["model_type"]
    return ModelFacts(
        path=folder if header is None else header.path,
        family=config.model_type,
        multimodal=whole if whole in WRAPPERS else None,
        architecture=None if header is None else header.architecture,
        parameters=sum(one.numel() for one in checkpoint.shapes.values()) if here else sum(numbers.values()),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=shapes[0][0],
        head_dim=shapes[0][1],
        shapes=shapes if len(set(shapes)) > 1 else (),
        context=max_position(config),
        windows=sum(window is not None for window in windows),
        layer_windows=windows,
        vocabulary=config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        formats=dict(formats.most_common()),
        weights_here=here,
        step_share=_read_each_step(config, numbers) / max(1, sum(numbers.values())),
        state_layers=0 if states is None else states.layers,
        state_bytes=0 if states is None else states.nbytes,
        token_bytes=sum(each[layer] for layer in set(reads)),
        layer_bytes=each,
        stored_layers=len(set(reads)),
        latent=family.latent,
        tokenizer=_kind(tokenizer.available, {} if header is None else header.metadata),
        chat_template=tokenizer.available and tokenizer.has_chat_template,
        own_loop=has_shape(family, config),
    )


def _refused(checkpoint: Checkpoint, reason: str) -> RefusedModel:
    """With what else transformers knows of the model."""
    parameters: int | None = None
    layers = checkpoint.config.get("num_hidden_layers")
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
        if not isinstance(layers, int) or layers <= MOST_LAYERS:
            with torch.device("meta"):  # shapes without memory
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
            parameters = sum(one.numel() for one in model.parameters())
    except Exception:  # nothing is lost: the reason stands
        pass
    return RefusedModel(checkpoint.path, checkpoint.whole["model_type"], reason, parameters)


def _read_each_step(config: Any, numbers: Mapping[str, int]) -> float:
    """Of a model's ``numbers`` by name, those that a decode step of one sequence reads."""
    count = next((one for name in _EXPERTS if (one := getattr(config, name, None))), None)
    each = next((one for name in _EXPERTS_OF_A_TOKEN if (one := getattr(config, name, None))), count)
    share = min(1.0, each / count) if count and each else 1.0
    named = next((one for one in ("model.embed_tokens", "model.embeddings") if f"{one}.weight" in numbers), "")
    embedding = 0 if config.tie_word_embeddings else numbers.get(f"{named}.weight", 0)
    embedding += numbers.get(_BY_LAYER, 0)  # of which a token's row is read
    return sum(one * (share if ".experts." in name else 1) for name, one in numbers.items()) - embedding


_BY_LAYER = "model.embed_tokens_per_layer.weight"
_EXPERTS_OF_A_TOKEN = "num_experts_per_tok", "top_k_experts"
_EXPERTS = "num_local_experts", "num_experts", "n_routed_experts"


def _expected(config: Mapping[str, Any], numbers: Mapping[str, int], dtype: torch.dtype) -> Counter[str]:
    """Bytes of weights that are not here by formats: a quantization_config's bits for the layers' matrices."""
    given = next((config[key] for key in KEYS if config.get(key)), None)
    plain = str(dtype).removeprefix("torch.")
    formats: Counter[str] = Counter()
    for name, count in numbers.items():
        packed = given is not None and ("_proj" in name or ".experts." in name) and name.endswith(".weight")
        if given is not None and packed:
            formats[f"about {_bits(given):.4g} bits"] += round(count * _bits(given) / 8)
        else:
            formats[plain] += count * dtype.itemsize
    return formats


def _bits(given: Mapping[str, Any]) -> float:
    """Of a weight, by what a quantization_config says, scales and zeros of groups among them."""
    groups = given.get("config_groups")
    own = next(iter(groups.values()))["weights"] if isinstance(groups, Mapping) and groups else given
    method = given.get("quant_method")
    bits = own.get("num_bits") or own.get("bits") or (4 if method == "mxfp4" else 8)
    group = own.get("group_size") or (32 if method == "mxfp4" else -1)
    scales = 8 if method == "mxfp4" else 16 + (bits if method in ("awq", "gptq") else 0)
    return bits + (scales / group if group > 0 else 0)


def _rounded(model: Any, quantize: str, dtype: torch.dtype) -> Counter[str]:
    """Bytes of a model's weights by formats, once they are rounded."""
    formats: Counter[str] = Counter()
    for name, shape in stored_as(model).items():
        own, tied = name.removesuffix(".weight"), model.config.tie_word_embeddings
        if name == "lm_head.weight" and tied:
            continue
        bits = bits_of(own, shape[-1], quantize) if own != name and len(shape) > 1 else None
        if bits is None:
            formats[str(dtype).removeprefix("torch.")] += shape.numel() * dtype.itemsize
        else:
            formats[f"INT{bits}_{CHANNELS}"] += shape.numel() * bits // 8 + shape.numel() // CHANNELS * 3
    return formats


def _kind(available: bool, metadata: dict[str, Any]) -> str | None:
    if not available:
        return None
    kind = {"gpt2": "BPE over bytes", "llama": "SentencePiece"}.get(str(metadata.get("tokenizer.ggml.model")))
    rule = metadata.get("tokenizer.ggml.pre")
    return (kind or "transformers'") + (f", words cut as {rule}" if rule and kind == "BPE over bytes" else "")
