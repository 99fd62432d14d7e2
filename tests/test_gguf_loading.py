"""What a GGUF file takes of memory while it is loaded and while its weights are read for its identity."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from test_block_formats import random_blocks

from saccade.models import identity
from saccade.models.gguf_parts import read_header
from saccade.models.gguf_weights import GgufWeights
from saccade.ops import arena, cpu, planes

OUTPUTS, SAME, BLOCKS = 24576, 24, 4  # rows, of which so many are drawn, and blocks of 256 channels
PIECE = 1 << 18  # bytes, of a matrix of 13 to 48 MiB
AROUND = 6 << 20  # that the system maps around what is read: large pages of its cache


def written(file: Path, kind: Kind) -> Path:
    """A file of the shape of a Llama whose embedding, which is its head too, is large."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(0)
    if kind in (Kind.F16, Kind.BF16, Kind.F32):
        values = np.random.default_rng(0).standard_normal((OUTPUTS // SAME, BLOCKS * 256)).astype(np.float32)
        data = gguf.quantize(values, kind)
    else:
        data = random_blocks(kind.name, OUTPUTS // SAME, BLOCKS * (1 if kind.name.endswith("K") else 8), even=True)
    writer.add_tensor("token_embd.weight", np.tile(data, (SAME, 1)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def mapped() -> int:
    """Bytes of files, libraries among them, that this process holds in memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) << 10


@pytest.fixture
def source(request, tmp_path, monkeypatch):
    monkeypatch.setattr(planes, "PACKED", PIECE)
    monkeypatch.setattr(arena, "COPIED", PIECE)
    monkeypatch.setattr(identity, "PIECE", PIECE)
    file = written(tmp_path / "m.gguf", request.param)
    return file, GgufWeights(read_header(file), 4, 4, torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("source", [Kind.Q4_K, Kind.Q8_0, Kind.F16], indirect=True)
def test_pages_of_a_matrix_are_given_back_while_it_is_packed(source, monkeypatch):
    if not cpu.available():
        pytest.skip("without the kernels blocks stay in their file")
    file, weights = source
    most, before = 0, mapped()
    real = GgufWeights.read

    def read(self, part):
        nonlocal most
        most = max(most, mapped() - before)
        real(self, part)

    monkeypatch.setattr(GgufWeights, "read", read)
    made = weights.matrix("model.embed_tokens")
    assert most <= PIECE + AROUND
    weights.let_go()
    assert mapped() - before <= AROUND
    stored = gguf.GGUFReader(file).tensors[0]
    expected = torch.from_numpy(gguf.dequantize(stored.data[[0, 17, OUTPUTS - 1]], stored.tensor_type))
    ids = torch.tensor([0, 17, OUTPUTS - 1])
    assert torch.equal(made.rows(ids, torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("source", [Kind.Q8_0], indirect=True)
def test_pages_are_given_back_while_the_identity_is_found(source, monkeypatch):
    if not cpu.available():
        pytest.skip("pages are given back by the kernels' module")
    _, weights = source
    before = mapped()
    first = weights.digest()
    assert mapped() - before <= AROUND
    monkeypatch.setattr(identity, "PIECE", 1 << 30)
    assert weights.digest() == first
