"""What a model computes with: its weights, its types, and what of its config changes a result. Two folders of the same
have one identity, wherever they lie, whatever they are called, and whichever version of a library wrote them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedConfig

from saccade.errors import shown
from saccade.models.interface import ModelSpec

VERSION = 1
PIECE = 1 << 23  # bytes that are hashed at a time: other threads run in between
_THREADS = 8

# Fields of a family's config that change no answer: training, dropout, what generation ends with, and what the weights'
# names and shapes say already.
_DROPOUT = "attention_dropout", "embd_pdrop", "embedding_dropout", "resid_pdrop", "residual_dropout"
_TRAINING = "initializer_range", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "pretraining_tp"
_TOKENS = "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"
_OTHERS = "use_cache", "tie_word_embeddings", "num_mtp_layers", "num_nextn_predict_layers"
_WITHOUT_MEANING = frozenset((*_DROPOUT, *_TRAINING, *_TOKENS, *_OTHERS))
# Whose factors hang on the trained length; for all others that length is a limit alone.
_ROPE_OF_LENGTH = ("dynamic", "longrope", "yarn")


@dataclass(frozen=True)
class ModelIdentity:
    """``family``: its model_type. ``dtype``: of activations. ``quantize``: the format of matrices that are
    no plain numbers.
    ``weights``: a digest of all of them in that dtype, before they are quantized. ``config``: fields that change a
    result. ``lora``: the adapter in the weights, for people: weights merged before are the same model. As
    :attr:`data` it can be stored as JSON."""

    family: str
    dtype: str
    quantize: str | None
    weights: str
    config: dict[str, Any]
    lora: str | None = field(default=None, compare=False)

    @cached_property
    def data(self) -> dict[str, Any]:
        """Plain data, equal for equal models."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.lora is None:
            del own["lora"]
        return {"version": VERSION, **own}

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits for all of it."""
        told = {name: value for name, value in self.data.items() if name != "lora"}
        return xxhash.xxh3_128(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """What the model of ``stored``, another one's :attr:`data`, has otherwise: ``name=its, not ours`` each. Weights
        are named where the types are equal; in other types all of them differ."""
        ours, theirs = dict(_leaves(self.data)), dict(_leaves(stored))
        names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        told = [
            f"{name}={shown(theirs.get(name), 80)}, not {shown(ours.get(name), 80)}"
            for name in names
            if name not in ("weights", "lora")
        ]
        if "weights" in names and not {"dtype", "quantize"} & set(names):
            told.append(f"other weights{self._adapters(theirs.get('lora'))}")
        return told

    def _adapters(self, other: Any) -> str:
        """Which adapters are in other and in these weights."""
        if other == self.lora:
            return ""
        named = [f"the adapter {shown(one, 80)}" if one is not None else "no adapter" for one in (other, self.lora)]
        return f" ({named[0]}, not {named[1].removeprefix('the adapter ')})"


class FoundOnce:
    """An identity that is found when it is first asked for, by any thread."""

    def __init__(self, find: Callable[[], ModelIdentity]) -> None:
        self._find, self._lock = find, threading.Lock()
        self._found: ModelIdentity | None = None

    def get(self) -> ModelIdentity:
        with self._lock:
            if self._found is None:
                self._found = self._find()
            return self._found


def identity_of(
    config: Any, spec: ModelSpec, weights: str, quantize: str | None, lora: str | None = None
) -> ModelIdentity:
    """The identity of a loaded model whose weights have the digest ``weights`` and, where not all of them are plain
    numbers, the format ``quantize``, with the adapter ``lora`` in them."""
    return ModelIdentity(
        family=spec.family,
        dtype=str(spec.dtype).removeprefix("torch."),
        quantize=quantize,
        weights=weights,
        config=meaningful(config)
        | {
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            **({"windows": list(spec.windows)} if any(spec.windows) else {}),
            **({"shapes": [list(one) for one in spec.shapes]} if spec.shapes else {}),
        },
        lora=lora,
    )


def meaningful(config: Any) -> dict[str, Any]:
    """The fields of a config that change what a model answers, as JSON holds them: those of its family that are
    switched on. What a library adds to every config, or leaves switched off, is no part."""
    if is_dataclass(config) and is_dataclass(PreTrainedConfig):
        names = {one.name for one in fields(config)} - {one.name for one in fields(PreTrainedConfig)}
    else:
        names = set(config.to_dict()) - set(PreTrainedConfig().to_dict())
    by_layer = getattr(vars(config).get("_heterogeneity_spec"), "per_layer_attributes", ())  # no value for all layers
    kept = {name: _plain(getattr(config, name, None)) for name in sorted(names - _WITHOUT_MEANING - set(by_layer))}
    if not any(kind in _ROPE_OF_LENGTH for kind in _rope_types(kept.get("rope_parameters"))):
        kept.pop("max_position_embeddings", None)
    return {name: value for name, value in kept.items() if not _is_off(value)}


def digest_weights(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None = None, read: Callable[[Tensor], None] = lambda part: None
) -> str:
    """:func:`joined_digest` of the tensors of a model, in ``dtype`` if it is given. One of several names is read once.
    ``read`` is given each part of them when it has been."""
    places = {name: (one.data_ptr(), tuple(one.shape), one.stride()) for name, one in weights.items()}
    once = {place: name for name, place in places.items()}
    with ThreadPoolExecutor(max(1, min(_THREADS, torch.get_num_threads()))) as pool:
        digests = dict(zip(once, pool.map(lambda name: tensor_digest(weights[name], dtype, read), once.values())))
    return joined_digest({name: digests[place] for name, place in places.items()})


def joined_digest(digests: Mapping[str, str]) -> str:
    """32 hexadecimal digits of XXH3 over names, shapes, types and bytes of all weights, in any order, from their
    digests by name."""
    whole = xxhash.xxh3_128()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name]}\n".encode())
    return whole.hexdigest()


def tensor_digest(
    tensor: Tensor, dtype: torch.dtype | None = None, read: Callable[[Tensor], None] = lambda part: None
) -> str:
    """Of a tensor's type, shape and bytes, as it would be in ``dtype``; ``read`` is given each part that has been."""
    dtype = dtype or tensor.dtype
    digest = xxhash.xxh3_128(f"{dtype} {list(tensor.shape)}".encode())
    for part in tensor.detach().reshape(-1).split(max(1, PIECE // tensor.itemsize)):
        digest.update(memoryview(part.to(dtype).view(torch.uint8).cpu().numpy()))
        read(part)
    return digest.hexdigest()


def _rope_types(parameters: Any) -> Iterator[str]:
    """Of one kind of layer, or of several."""
    if isinstance(parameters, Mapping):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for part in parameters.values():
            yield from _rope_types(part)


def _plain(value: Any) -> Any:
    """As JSON holds it, one number written one way, without parts that are switched off."""
    if isinstance(value, Mapping):
        parts = {str(name): _plain(part) for name, part in value.items() if name != "type" or "rope_type" not in value}
        return {name: parts[name] for name in sorted(parts) if not _is_off(parts[name])}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == {} or value == []


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested data by its path; lists whole."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key != "config" or name:
                yield from _leaves(part, f"{name}.{key}" if name else str(key))
            else:
                yield from _leaves(part)
    else:
        yield name, value
