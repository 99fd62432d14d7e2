"""GGUF files with a few wrong bytes: ``make fuzz-gguf``.

    PYTHONPATH=tests python -m gguf_fuzz 20000 --seed 0

Each is read, and its config described and held against its tensors, or refused by a ModelError of one line, within
seconds and without more memory than a small file needs. What is neither ends the run and stays in the folder that is
printed.
"""

from __future__ import annotations

import argparse
import resource
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny, write
from transformers import AutoConfig

from saccade.errors import ModelError
from saccade.models import matrix_modules
from saccade.models.checkpoint import Checkpoint
from saccade.models.gguf_folder import described
from saccade.models.gguf_parts import read_header
from saccade.models.gguf_weights import stored_shapes
from saccade.models.headers import described_model, refuse_absent_or_other

SECONDS = 20
MEMORY = 1 << 30  # bytes beyond what the process has at the beginning


def mutated(folder: Path, checkpoint: Path, count: int, seed: int) -> Iterator[Path]:
    """``count`` files, one after another under one name: bytes of the header changed, numbers set to extremes, pieces
    doubled, moved and left out, and the end cut off."""
    whole = write(checkpoint, folder / "whole.gguf", Kind.Q4_0).read_bytes()
    head = min(tensor.offset for tensor in read_header(folder / "whole.gguf").tensors)
    extremes = (0, 1, 3, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
    file = folder / "mutated.gguf"
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at, way = int(rng.integers(4, head - 16)), rng.integers(0, 10)
            if way < 6:
                data[at] = rng.integers(0, 256)
            elif way == 6:
                data[at : at + 8] = struct.pack("<Q", extremes[rng.integers(0, len(extremes))])
            elif way == 7:
                data[at : at + 4] = struct.pack("<I", extremes[rng.integers(0, 7)])
            else:
                size, to = int(rng.integers(1, 64)), int(rng.integers(4, head - 80))
                data[to : to + size] = data[at : at + size] if way == 8 else b""
        file.write_bytes(data[: int(rng.integers(4, len(data)))] if rng.random() < 0.1 else data)
        yield file


def outcome(file: Path) -> str:
    """How far a file comes towards a model whose weights are not made: "read", or "refused" in one line."""
    try:
        header = read_header(file)
        config = described(header)
        checkpoint = Checkpoint(file, config, torch.bfloat16, stored_shapes(header), header)
        if config["num_hidden_layers"] > len(checkpoint.shapes):
            raise ModelError("more layers than tensors")  # which the loader refuses before it makes any
        try:
            parsed = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
        except Exception as error:  # as the loader does: config classes raise many kinds
            raise ModelError("no valid config") from error
        model = described_model(checkpoint, parsed, torch.bfloat16)
        refuse_absent_or_other(checkpoint, matrix_modules.stored_as(model), model.config.tie_word_embeddings)
    except ModelError as error:
        return "refused" if len(str(error).splitlines()) == 1 and len(str(error)) < 3000 else "said at length"
    return "read"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ends: Counter[str] = Counter()
    slowest = 0.0
    folder = Path(tempfile.mkdtemp(prefix="gguf-fuzz-"))
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for file in mutated(folder, tiny("qwen2", folder / "made", num_hidden_layers=2), options.count, options.seed):
        start = time.process_time()
        ends[outcome(file)] += 1
        slowest = max(slowest, time.process_time() - start)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - begun
        if set(ends) - {"read", "refused"} or slowest > SECONDS or grown > MEMORY:
            raise SystemExit(f"{file}: {dict(ends)}, {slowest:.1f} s, {grown / 1e6:.0f} MB more")
    print(f"{dict(ends)}; the slowest took {slowest:.2f} s of processor time; {grown / 1e6:.0f} MB more than at first")


if __name__ == "__main__":
    main()
