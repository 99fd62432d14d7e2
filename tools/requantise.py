"""A GGUF file with all matrices in another type, tensor by tensor, by the ``gguf`` package.

    python tools/requantise.py build/real/qwen2.5-coder.gguf build/qwen-q8_0.gguf [--type Q8_0]

Metadata and vectors are copied as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf


def requantise(given: Path, made: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write ``given`` to ``made``, matrices as ``kind``."""
    reader = gguf.GGUFReader(given)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(made, architecture, use_temp_file=True)
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1:
            data, stored = gguf.quantize(gguf.dequantize(data, stored), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", type=Path)
    parser.add_argument("made", type=Path)
    parser.add_argument("--type", default="Q8_0", choices=["Q8_0", "F16", "BF16", "F32", "Q4_0", "Q5_0"])
    options = parser.parse_args()
    requantise(options.given, options.made, gguf.GGMLQuantizationType[options.type])


if __name__ == "__main__":
    main()
