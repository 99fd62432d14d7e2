"""GGUF files as models: equal to the checkpoints they were made of, blocks by other readers, errors of one line."""

from __future__ import annotations

import math
import struct
import warnings
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import BOS, EOS, TOKENS, tiny, write
from safetensors.torch import load_file
from test_cli import run
from tiny_models import oracle, oracle_logits
from transformers.integrations.gguf import dequant as theirs
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from saccade import LLM, SamplingParams
from saccade.errors import ModelError
from saccade.models import cached, gguf_folder
from saccade.models.folders import checkpoint_folder
from saccade.models.gguf_header import read_header
from saccade.models.gguf_names import FAMILIES
from saccade.models.loader import load_model
from saccade.models.tokenizer import load_tokenizer

IDS = [BOS, 5, 7, 11, 13, 2, 3, 60, 61, 9, 8, 7]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saccade"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("llama"))


def converted(file: Path) -> Path:
    with warnings.catch_warnings(record=True):
        return checkpoint_folder(file)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_what_its_file_was_made_of(kind, tied, tmp_path):
    """All tensors bit for bit (Gemma's norms but for their offset), and the same logits by transformers."""
    made = tiny(kind, tmp_path / "made", tie_word_embeddings=tied)
    folder = converted(write(made, tmp_path / "model.gguf", kind))
    ours, original = load_file(folder / "model.safetensors"), load_file(made / "model.safetensors")
    assert ours.keys() == original.keys()
    for name, weight in original.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6 if kind == "gemma3" else 0, rtol=0, msg=name)
    ours_say, made_says = (oracle_logits(oracle(path), IDS) for path in (folder, made))
    torch.testing.assert_close(ours_say, made_says, atol=2e-5, rtol=1e-4)


def test_a_file_runs_under_its_own_name(capsys, llama, tmp_path, cache):
    """LLM, and the command line; the first time says what it takes, the next finds it by content."""
    file = write(llama, tmp_path / "model.gguf", "llama", Kind.Q4_0)
    with pytest.warns(UserWarning, match=r"model\.gguf holds .*M weights in .* MB; .* as bfloat16, once: .* MB there"):
        llm = LLM(file)
    with llm:
        text = llm.generate("hello", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
        assert llm.model.eos_token_ids == (EOS,)
        assert llm.tokenizer.has_chat_template
    (same := tmp_path / "renamed").symlink_to(file)  # known by how it begins
    code, out, err = run(capsys, "generate", "hello", "-m", str(same), "-n", "5", "--raw")
    assert (code, out) == (0, text + "\n")
    assert "weights" not in err
    assert len(list(cache.iterdir())) == 1


def test_types_that_a_file_has_decide_what_is_stored(llama, tmp_path):
    for at, (stored, dtype) in enumerate(
        [(Kind.F32, torch.float32), (Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16), (Kind.Q4_0, torch.bfloat16)]
    ):
        folder = converted(write(llama, tmp_path / f"{at}.gguf", "llama", stored))
        found = load_file(folder / "model.safetensors")
        assert {one.dtype for one in found.values()} == {dtype}
        weight = load_file(llama / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), stored), stored)).to(dtype)
        assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], expected)


def blocks_of(kind: Kind, rows: int, blocks: int) -> np.ndarray:
    """Random bytes of ``kind`` whose half-precision scales are small numbers, wherever they stand."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(int(kind)).integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    data[..., 1::2] = np.where(data[..., 1::2] & 0x7C == 0x7C, data[..., 1::2] & 0x3F, data[..., 1::2])  # no inf
    data[..., 0::2] = np.where(data[..., 0::2] & 0x7C == 0x7C, data[..., 0::2] & 0x3F, data[..., 0::2])
    return data.reshape(rows, -1)


def read_back(tmp_path: Path, raw: np.ndarray, kind: Kind) -> torch.Tensor:
    out = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    out.add_tensor("x", raw, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    header = read_header(tmp_path / "one.gguf")
    return torch.cat(list(gguf_folder.plain(header.path, header.tensors[0])))


@pytest.mark.parametrize("number", sorted(theirs.GGML_BLOCK))
def test_blocks_are_read_as_transformers_reads_them(number, tmp_path, monkeypatch):
    """Every type that its reader has, in pieces of a few rows."""
    kind = Kind(number)
    raw = blocks_of(kind, 5, 3)
    per_row = 3 * gguf.GGML_QUANT_SIZES[kind][0]
    monkeypatch.setattr(gguf_folder, "CHUNK", 2 * per_row)
    found = read_back(tmp_path, raw, kind)
    assert found.shape == (5, per_row)
    expected = theirs.dequantize(torch.from_numpy(raw.copy()).view(-1, raw.shape[1] // 3), number).reshape(5, per_row)
    torch.testing.assert_close(found, expected.float(), atol=0, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1])
def test_types_that_transformers_lacks_are_as_ggml_defines_them(kind, tmp_path):
    """32 weights a block: a half-precision scale (and a least value), a word of fifth bits, 16 bytes of two nibbles."""
    assert int(kind) not in theirs.GGML_BLOCK
    raw = blocks_of(kind, 3, 2)
    expected = []
    for block in raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]):
        bytes_ = block.tobytes()
        halves = 1 if kind == Kind.Q5_0 else 2
        scale, *least = struct.unpack(f"<{halves}e", bytes_[: 2 * halves])
        (high,) = struct.unpack("<I", bytes_[2 * halves : 2 * halves + 4])
        for at in range(32):
            nibble = bytes_[2 * halves + 4 + at % 16] >> (0 if at < 16 else 4) & 15
            level = nibble | (high >> at & 1) << 4
            expected.append(scale * level + least[0] if least else scale * (level - 16))
    found = read_back(tmp_path, raw, kind).flatten()
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3_become_its_config(factor, tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    made = tiny("llama", tmp_path / "made", rope_parameters=rope, head_dim=64, max_position_embeddings=65536)
    config = load_model(made).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    assert len(set((plain / scaled).round(decimals=2).tolist())) > 3  # some divided by nothing, all, and between
    divisors = {"rope_freqs.weight": (plain / scaled).numpy()}
    folder = converted(write(made, tmp_path / "model.gguf", "llama", extra=divisors))
    assert load_model(folder).config.rope_parameters == rope
    odd = write(made, tmp_path / "odd.gguf", "llama", extra={"rope_freqs.weight": np.linspace(1, 3, 32)})
    with pytest.raises(ModelError, match=r"neither Llama 3\.1's nor Llama 3\.2's"):
        converted(odd)


def test_scaled_rotation_is_read_or_refused(llama, tmp_path):
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
    found = load_model(converted(write(llama, tmp_path / "yarn.gguf", "llama", **yarn))).config.rope_parameters
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 4.0, 64)
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}
    found = load_model(converted(write(llama, tmp_path / "linear.gguf", "llama", **linear))).config.rope_parameters
    assert (found["rope_type"], found["factor"]) == ("linear", 2.0)
    for more in ({"rope__scaling__type": "longrope"}, {"rope__scaling__type": "yarn"}):
        with pytest.raises(ModelError, match=r"rope.scaling.type='(longrope|yarn)' .* is not read"):
            converted(write(llama, tmp_path / f"{len(more)}.gguf", "llama", **more))


def test_words_are_cut_as_the_file_says(llama, tmp_path):
    """SmolLM's merges were learned on single digits: a digit never joins what stands before it, a space among it."""
    ways = {}
    for pre in ("default", "smollm"):
        folder = converted(write(llama, tmp_path / f"{pre}.gguf", "llama", pre=pre))
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode("ab  12", add_special_tokens=False)
        assert tokenizer.decode(ids) == "ab  12"
        ways[pre] = [TOKENS[token] for token in ids]
    assert ways["default"] == ["a", "b", "Ġ", "Ġ", "1", "2"]
    assert ways["smollm"] == ["a", "b", "ĠĠ", "1", "2"]


CASES = {
    "no such file": (lambda file: file.unlink(), "there is no file"),
    "empty": (lambda file: file.write_bytes(b""), "does not begin with GGUF"),
    "something else": (lambda file: file.write_bytes(b"PK\x03\x04" * 9), "does not begin with GGUF"),
    "another version": (lambda file: edit(file, 4, b"\x01\0\0\0"), "of version 1"),
    "big-endian": (lambda file: edit(file, 4, b"\0\0\0\x03"), "little-endian"),
    "cut in its header": (lambda file: file.write_bytes(file.read_bytes()[:300]), "cut off after 300 bytes"),
    "cut in its tensors": (lambda file: file.write_bytes(file.read_bytes()[:-9]), "is cut off"),
    "many tensors": (lambda file: edit(file, 8, b"\xff" * 8), "cut off|no GGUF file that can be read"),
}


def edit(file: Path, at: int, new: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + len(new)] = new
    file.write_bytes(data)


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_whole_file_is_an_error_of_one_line(capsys, case, llama, tmp_path, cache):
    file = write(llama, tmp_path / "model.gguf", "llama")
    harm, message = CASES[case]
    harm(file)
    with pytest.raises(ModelError, match=message) as caught:
        checkpoint_folder(file)
    assert str(file) in str(caught.value)
    code, out, err = run(capsys, "generate", "x", "-m", str(file))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not cache.exists() or not any(path.name.startswith("gguf-") for path in cache.iterdir())


def test_harmed_headers_are_read_or_refused(llama, tmp_path, cache):
    """Whatever a byte becomes: a model, or a ModelError of one line, and nothing else of it in the cache."""
    whole = write(llama, tmp_path / "model.gguf", "llama", without=("tokenizer",), vocab_size=272).read_bytes()
    head = min(tensor.offset for tensor in read_header(tmp_path / "model.gguf").tensors)
    rng = np.random.default_rng(0)
    file, ends = tmp_path / "harmed.gguf", Counter()
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(4, head, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        file.write_bytes(data[: int(rng.integers(4, head))] if rng.random() < 0.2 else data)
        try:
            gguf_folder.write_folder(read_header(file), tmp_path / "out")
            ends["read"] += 1
        except ModelError as error:
            ends["refused" if len(str(error).splitlines()) == 1 else "said at length"] += 1
    assert min(ends["read"], ends["refused"]) >= 5
    assert sum(ends.values()) == ends["read"] + ends["refused"] == 150


REFUSED = {
    "a part by name": ({}, "part 2 of 3 of a split GGUF file"),
    "a part by key": ({"split.count": 4}, "part 1 of 4 of a split"),
    "experts": ({"expert_count": 8}, r"llama.expert_count=8 is not read"),
    "half rotated heads": ({"rope.dimension_count": 8}, r"rope.dimension_count=8 is not read"),
    "no sizes": ({"without": ("block_count",)}, "does not say llama.block_count"),
    "no heads": ({"attention.head_count": 0}, "no number of heads"),
    "a tensor too many": ({"extra": {"blk.0.attn_sinks.weight": np.ones(4)}}, "attn_sinks.weight has no place"),
    "a tensor too few": ({"without": ("blk.1.ffn_up.weight",)}, "no weights in the checkpoint"),
}


def test_what_has_no_place_is_refused_by_name(llama, tmp_path):
    """Never dropped: what a reader does not know may be what the model cannot do without."""
    for at, (case, (change, message)) in enumerate(REFUSED.items()):
        name = "model-00002-of-00003.gguf" if case == "a part by name" else f"{at}.gguf"
        change = {key.replace(".", "__"): value for key, value in change.items()}
        without, extra = change.pop("without", ()), change.pop("extra", None)
        file = tmp_path / name
        if case == "a part by key":
            file = write(llama, file, "llama")
            data = file.read_bytes()
            pair = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 4)
            (count,) = struct.unpack_from("<Q", data, 16)
            file.write_bytes(data[:16] + struct.pack("<Q", count + 1) + pair + data[24:])
        else:
            write(llama, file, "llama", without=without, extra=extra, **change)
        with pytest.raises(ModelError, match=message):
            load_model(converted(file))
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(write(llama, tmp_path / "known.gguf", "llama").read_bytes().replace(b"llama", b"mambo"))
    with pytest.raises(ModelError, match=r"'mambo' are not read, only those of llama, qwen2, qwen3, gemma3"):
        converted(unknown)


def test_a_checkpoint_folder_may_be_named_as_a_file(llama, tmp_path):
    (named := tmp_path / "model.gguf").symlink_to(llama)
    assert checkpoint_folder(named) == named
    assert load_model(named).spec.layers == 3


def test_a_folder_of_gguf_files_says_to_give_the_file(llama, tmp_path):
    file = write(llama, tmp_path / "model.gguf", "llama")
    with pytest.raises(ModelError, match=str(file)):
        load_model(tmp_path)


def test_no_room_is_said_before_anything_is_written(llama, tmp_path, monkeypatch, cache):
    file = write(llama, tmp_path / "model.gguf", "llama")
    monkeypatch.setattr(cached.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    monkeypatch.setattr(cached.tempfile, "gettempdir", lambda: str(tmp_path / "spare"))
    with pytest.raises(ModelError, match=r"0.00 GB are needed and 0.00 GB are free.*; free some space"):
        converted(file)
    assert not any(path.name.startswith("gguf-") for path in cache.iterdir())


def test_a_conversion_that_was_ended_leaves_no_folder(llama, tmp_path, monkeypatch, cache):
    """A half folder is never taken for a whole one: it has no name before that, and a shortened one is none."""
    file = write(llama, tmp_path / "model.gguf", "llama")
    real = gguf_folder._write_weights

    def ended(*args):
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_folder, "_write_weights", ended)
    with pytest.raises(KeyboardInterrupt):
        converted(file)
    assert list(cache.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    folder = converted(file)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert converted(file) == folder
    assert weights.read_bytes() == whole


def test_memory_for_a_conversion_is_that_of_some_rows(llama, tmp_path, monkeypatch):
    """Matrices come in pieces; only queries and keys, whose rows are put in order, are whole."""
    file = write(llama, tmp_path / "model.gguf", "llama", Kind.Q4_0)
    monkeypatch.setattr(gguf_folder, "CHUNK", 256)
    seen = []
    real = gguf.dequantize

    def watched(data, kind):
        seen.append(real(data, kind))
        return seen[-1]

    monkeypatch.setattr(gguf, "dequantize", watched)
    converted(file)
    assert max(values.size for values in seen) <= 256
    assert sum(values.size for values in seen) == read_header(file).weights
    assert math.prod(read_header(file).tensors[0].shape) > 256
