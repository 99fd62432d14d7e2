"""GGUF files in parts, and files that lie: a ModelError of one line before anything is read or made."""

from __future__ import annotations

import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny, write
from gguf_fuzz import mutated, outcome
from test_cli import run
from test_gguf_families import check, opened
from tiny_models import oracle

from saccade.errors import ModelError
from saccade.models.folders import checkpoint_folder
from saccade.models.gguf_parts import read_header
from saccade.models.loader import load_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saccade"


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen2", tmp_path_factory.mktemp("qwen2"))


def split(made: Path, folder: Path, stored: Kind = Kind.Q4_0, model=None) -> list[Path]:
    folder.mkdir(exist_ok=True)
    write(made, folder / "m.gguf", stored, split=10, model=model)
    return sorted(folder.glob("m-*.gguf"))


def test_a_model_in_parts_is_the_whole(qwen2, tmp_path):
    """Whichever part is given, and nothing of it is joined on the disk."""
    theirs = oracle(qwen2)
    files = split(qwen2, tmp_path / "parts", model=theirs)
    assert [file.name for file in files] == [f"m-{at:05d}-of-{len(files):05d}.gguf" for at in range(1, len(files) + 1)]
    assert len(files) > 2
    headers = [read_header(file) for file in files]
    assert {header.path for header in headers} == {files[0]}
    assert len(headers[1].tensors) == len({one.name for header in headers for one in header.tensors})
    assert {one.file for one in headers[0].tensors} | {files[0]} == set(files)
    with opened(files[1]) as llm:
        check(llm, theirs)


def test_parts_that_do_not_belong_together_are_refused(qwen2, tmp_path):
    one, two, *_, last = split(qwen2, tmp_path / "parts")
    other = split(tiny("qwen2", tmp_path / "made", num_hidden_layers=2), tmp_path / "other")
    aside = two.rename(tmp_path / "aside")
    with pytest.raises(ModelError, match=f"{one.name} is a part of a model, and {two.name} is not beside it"):
        read_header(one)
    two.write_bytes(last.read_bytes())
    with pytest.raises(
        ModelError, match=f"{two.name} is no part 2 of .*: it says split.no={len(other)}|give the parts the"
    ):
        read_header(one)
    two.write_bytes(aside.read_bytes()[:-40])
    with pytest.raises(ModelError, match=f"{two.name} is cut off"):
        read_header(one)
    aside.rename(two)
    assert read_header(last).path == one
    whole = write(qwen2, tmp_path / "m-00001-of-00001.gguf")  # one part is a whole file
    assert read_header(whole).path == whole


def test_a_part_of_another_model_is_refused(qwen2, tmp_path):
    """By the number of tensors, or by one that is there twice."""
    files = split(qwen2, tmp_path / "parts")
    wide = split(qwen2, tmp_path / "wide", Kind.Q8_0)
    files[1].write_bytes(wide[1].read_bytes())  # the same tensors in another type: a model, though a mixed one
    read_header(files[0])
    less = tmp_path / "less"
    less.mkdir()
    write(qwen2, less / "m.gguf", split=10, without=("blk.2.ffn_up.weight",))
    (less / files[-1].name).replace(files[-1])
    with pytest.raises(ModelError, match=r"hold \d+ tensors, not the \d+ that they had|twice"):
        read_header(files[0])


def header_of(pairs: bytes = b"", count: int = 0, tensors: bytes = b"", number: int = 0, data: int = 0) -> bytes:
    whole = b"GGUF" + struct.pack("<IQQ", 3, number, count) + pairs + tensors
    return whole + bytes(-len(whole) % 32) + bytes(data)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def info(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LIES = {
    "nested arrays": (header_of(text("a") + struct.pack("<IIQ", 9, 9, 1 << 40), 1), "an array of|values, more than"),
    "an array of arrays": (header_of(text("a") + struct.pack("<IIQ", 9, 9, 2), 1), "an array of 2 values of type 9"),
    "many values": (header_of(text("a") + struct.pack("<IIQ", 9, 8, 1 << 62), 1, data=64), "values, more than"),
    "many numbers": (header_of(text("a") + struct.pack("<IIQ", 9, 12, 1 << 22), 1, data=64), "cut off"),
    "a long text": (header_of(struct.pack("<Q", (1 << 64) - 1), 1, data=64), "cut off"),
    "many pairs": (header_of(count=1 << 60, data=64), "pairs of metadata, more than"),
    "many tensors": (header_of(number=1 << 60, data=64), "tensors, more than"),
    "an unknown value": (header_of(text("a") + struct.pack("<I", 77), 1, data=64), "unknown type 77"),
    "a key twice": (header_of((text("a") + struct.pack("<II", 4, 1)) * 2, 2), "'a' is said twice"),
    "no alignment": (header_of(text("general.alignment") + struct.pack("<II", 4, 0), 1), "general.alignment=0"),
    "an odd alignment": (header_of(text("general.alignment") + struct.pack("<II", 4, 24), 1), "general.alignment=24"),
    "a type that is none": (header_of(tensors=info("x", (32,), 99), number=1, data=64), "ggml's type 99"),
    "many dimensions": (header_of(tensors=info("x", (1,) * 7), number=1, data=64), "of 7 dimensions"),
    "no rows": (header_of(tensors=info("x", (0, 8)), number=1, data=64), "no whole blocks of F32"),
    "part of a block": (
        header_of(tensors=info("x", (33, 2), int(Kind.Q4_0)), number=1, data=64),
        "no whole blocks of Q4_0",
    ),
    "more than memory has": (header_of(tensors=info("x", (1 << 40, 1 << 40)), number=1, data=64), "is cut off"),
    "beyond the end": (header_of(tensors=info("x", (8,), 0, 1 << 50), number=1, data=64), "is cut off"),
    "between two places": (
        header_of(tensors=info("x", (8,), 0, 4), number=1, data=64),
        "no multiple of the alignment 32",
    ),
    "one name twice": (
        header_of(tensors=info("x", (8,)) + info("x", (8,), 0, 32), number=2, data=64),
        "holds 'x' twice",
    ),
    "shared bytes": (
        header_of(tensors=info("x", (16,)) + info("y", (8,), 0, 32), number=2, data=64),
        "'x' and 'y' share bytes",
    ),
    "no family": (header_of(data=64), "architecture '' are not read"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_header_that_lies_is_an_error_of_one_line(case, tmp_path, capsys, cache):
    data, message = LIES[case]
    (file := tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            checkpoint_folder(file)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20
    assert str(file) in str(caught.value)
    code, out, err = run(capsys, "generate", "x", "-m", str(file))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not cache.exists() or not list(cache.iterdir())


def test_types_without_a_class_are_refused_by_name(qwen2, tmp_path):
    """With the way out. I quants of 1 to 3 bits and ternary ones have codebooks of their own."""
    for kind in (Kind.IQ2_XXS, Kind.IQ3_S, Kind.IQ1_M, Kind.TQ1_0, Kind.F64):
        out = gguf.GGUFWriter(file := tmp_path / f"{kind.name}.gguf", "qwen2")
        block, size = gguf.GGML_QUANT_SIZES[kind]
        out.add_tensor("token_embd.weight", np.zeros((2, size * (256 // block)), dtype=np.uint8), raw_dtype=kind)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        with pytest.raises(ModelError, match=rf"token_embd.weight' is stored as {kind.name}.*llama-quantize"):
            checkpoint_folder(file)


def test_shapes_that_the_metadata_does_not_describe_are_refused(qwen2, tmp_path):
    for key, value in {"embedding_length": 128, "attention.head_count": 8, "feed_forward_length": 64}.items():
        file = write(qwen2, tmp_path / f"{key}.gguf", Kind.Q8_0, **{key.replace(".", "__"): value})
        with pytest.raises(ModelError, match=r"config\.json does not describe|rows, no whole heads"):
            load_model(checkpoint_folder(file))
    layers = write(qwen2, tmp_path / "layers.gguf", Kind.Q8_0, block_count=1 << 30)
    with pytest.raises(ModelError, match="num_hidden_layers=1073741824, but the checkpoint holds"):
        load_model(checkpoint_folder(layers))


def test_a_file_without_a_tokenizer_takes_tokens_alone(qwen2, tmp_path, capsys):
    file = write(qwen2, tmp_path / "m.gguf", Kind.Q8_0, without=("tokenizer",))
    with opened(file) as llm:
        assert len(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids) > 0
    code, out, err = run(capsys, "generate", "x", "-m", str(file))
    assert (code, out) == (2, "")
    assert "this checkpoint has no tokenizer; give token ids" in err


def test_mutated_headers_are_read_or_refused(tmp_path, qwen2):
    """300 of them; ``make fuzz-gguf`` runs 20,000."""
    ends: Counter[str] = Counter()
    for file in mutated(tmp_path, qwen2, 300, seed=1):
        ends[outcome(file)] += 1
    assert min(ends["read"], ends["refused"]) >= 20
    assert sum(ends.values()) == ends["read"] + ends["refused"] == 300
