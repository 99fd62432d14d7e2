"""What a config.json says of weights that are not plain numbers: ``quantization_config``, read or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import ModelError, SaccadeError, shown
from saccade.models import awq, compressed, gptq, mxfp4, scaled_fp8
from saccade.models.packed_format import PackedFormat

KEYS = "quantization_config", "compression_config", "quantization"
READ = "AWQ, GPTQ, compressed-tensors, FP8 or MXFP4"

# Of a method's config: the format of a module by its name, or PackedError for numbers that are not read.
Reader = Callable[[Mapping[str, Any]], Callable[[str], PackedFormat]]
READERS: dict[str, Reader] = {
    "awq": awq.formats,
    "gptq": gptq.formats,
    "compressed-tensors": compressed.formats,
    "fp8": scaled_fp8.formats,
    "fbgemm_fp8": scaled_fp8.formats,
    "mxfp4": mxfp4.formats,
}
_TITLES = {
    "bitsandbytes": "bitsandbytes (NF4, FP4 or LLM.int8)",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "quanto": "Quanto",
    "torchao": "torchao",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "bitnet": "BitNet",
    "auto-round": "AutoRound",
    "modelopt": "ModelOpt",
    "mlx": "MLX",
}


@dataclass(frozen=True)
class Scheme:
    """``method``: its name in the config. ``format``: of a module that is stored so, by its name; PackedError where
    none is said."""

    method: str
    format: Callable[[str], PackedFormat]


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """How the weights of a config.json are quantised; None where they are plain numbers. ModelError for what is not
    read."""
    key = next((one for one in KEYS if config.get(one)), None)
    if key is None:
        return None
    given = config[key]
    if not isinstance(given, Mapping):
        raise ModelError(f"{where}: {key} is no object: {shown(given, 80)}; give the config.json of these weights")
    method = given.get("quant_method") or ("compressed-tensors" if "config_groups" in given else None)
    if method is None and set(given) >= {"group_size", "bits"}:
        method = "mlx"
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        named = _TITLES.get(str(method), shown(method, 40))
        raise ModelError(
            f"{where} is not supported: its weights are quantised by {named} ({key}); give one in {READ}, a GGUF file, "
            "or the unquantised checkpoint"
        )
    try:
        return Scheme(str(method), reader(given))
    except SaccadeError as error:
        raise ModelError(f"{where}: {key} of {method}: {error}") from error
