"""GGUF files as models: equal to the checkpoints they were made of, blocks by other readers, errors of one line."""

from __future__ import annotations

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
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import dequant as theirs
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from saccade import LLM, SamplingParams
from saccade.errors import ModelError
from saccade.models import gguf_folder, gguf_tokenizer, gguf_weights
from saccade.models.folders import checkpoint_folder
from saccade.models.gguf_parts import read_header
from saccade.models.gguf_weights import Mapped
from saccade.models.loader import load_model
from saccade.models.tokenizer import load_tokenizer
from saccade.ops.block_weights import FORMATS

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


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "glm4"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_plain_numbers_is_what_its_file_was_made_of(family, tied, tmp_path):
    """As fetched models are written: all tensors bit for bit (Gemma's norms but for their offset), and the same logits
    by transformers."""
    made = tiny(family, tmp_path / "made", tie_word_embeddings=tied)
    gguf_folder.write_plain(read_header(write(made, tmp_path / "model.gguf")), tmp_path / "plain")
    ours, original = load_file(tmp_path / "plain" / "model.safetensors"), load_file(made / "model.safetensors")
    assert ours.keys() == original.keys()
    for name, weight in original.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6 if family == "gemma3_text" else 0, rtol=0, msg=name)
    ours_say, made_says = (oracle_logits(oracle(path), IDS) for path in (tmp_path / "plain", made))
    torch.testing.assert_close(ours_say, made_says, atol=2e-5, rtol=1e-4)


def test_a_file_runs_under_its_own_name(capsys, llama, tmp_path, cache):
    """LLM, and the command line; nothing is said, and config and tokenizer are found again by content."""
    file = write(llama, tmp_path / "model.gguf", Kind.Q4_0)
    with LLM(file) as llm:
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
        gguf_folder.write_plain(read_header(write(llama, tmp_path / f"{at}.gguf", stored)), tmp_path / str(at))
        found = load_file(tmp_path / str(at) / "model.safetensors")
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
    return Mapped().numbers(header.tensors[0])


@pytest.mark.parametrize("number", sorted(number for number in theirs.GGML_BLOCK if Kind(number).name in FORMATS))
def test_blocks_are_read_as_transformers_reads_them(number, tmp_path, monkeypatch):
    """Every type that its reader has, in pieces of a few rows."""
    kind = Kind(number)
    raw = blocks_of(kind, 5, 3)
    per_row = 3 * gguf.GGML_QUANT_SIZES[kind][0]
    monkeypatch.setattr(gguf_weights, "PIECE", 2 * per_row)
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
    folder = converted(write(made, tmp_path / "model.gguf", extra=divisors))
    assert load_model(folder).config.rope_parameters == rope
    odd = torch.linspace(1, 3, 32)  # Llama 3's of no factor: the divisors themselves, at any length
    other = LLM(write(made, tmp_path / "odd.gguf", extra={"rope_freqs.weight": odd.numpy()}), dtype="float32")
    with other:
        rotary = other.model.runner.rotary
        assert (rotary.regime(1), rotary.regime(65536)) == (0, 0)
        cos, _ = rotary._module(torch.zeros(1), torch.tensor([[3]]))
    torch.testing.assert_close(cos[0, 0, :32], (3 * plain / odd).cos(), atol=1e-6, rtol=0)


def test_words_are_cut_as_the_file_says(llama, tmp_path):
    """SmolLM's merges were learned on single digits: a digit never joins what stands before it, a space among it."""
    ways = {}
    for pre in ("default", "smollm"):
        folder = converted(write(llama, tmp_path / f"{pre}.gguf", pre=pre))
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode("ab  12", add_special_tokens=False)
        assert tokenizer.decode(ids) == "ab  12"
        ways[pre] = [TOKENS[token] for token in ids]
    assert ways["default"] == ["a", "b", "Ġ", "Ġ", "1", "2"]
    assert ways["smollm"] == ["a", "b", "ĠĠ", "1", "2"]


def test_rules_for_words_are_transformers_own():
    """Where its reader of GGUF files, which is not public, has them, too; what digits do is their difference."""
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    if not (mapping := getattr(theirs, "GGUF_PRE_TOKENIZER_SPLITS", None)):
        pytest.skip("this version of transformers has no such rules")
    shared = mapping.keys() & gguf_tokenizer._RULES.keys()
    assert len(shared) >= 12
    assert {name: gguf_tokenizer._RULES[name] for name in shared} == {name: mapping[name] for name in shared}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("llama-bpe", ["I", "'ll", "Ġsay", "Ġ", "123", "45", "ĊĊ", "x"]),
        ("qwen2", ["I", "'ll", "Ġsay", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "x"]),
        ("tekken", ["I", "'ll", "Ġsay", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "x"]),
        ("gpt-4o", ["I'll", "Ġsay", "Ġ", "123", "45", "ĊĊ", "x"]),
        ("gpt-2", ["I", "'ll", "Ġsay", "Ġ12345", "Ċ", "Ċ", "x"]),
    ],
)
def test_a_rule_cuts_words(rule, words, llama, tmp_path):
    made = PreTrainedTokenizerFast.from_pretrained(checkpoint_folder(write(llama, tmp_path / "m.gguf", pre=rule)))
    cut = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'll say 12345\n\nx")
    assert [word for word, _ in cut] == words


def test_a_rule_that_is_not_known_is_said(llama, tmp_path):
    with pytest.warns(UserWarning, match=r"m\.gguf has its text cut by a rule 'martian' that is not known here"):
        checkpoint_folder(write(llama, tmp_path / "m.gguf", pre="martian"))


def test_sentencepiece_is_read(llama, tmp_path):
    """Pieces by their scores, bytes for what is in none, and a space in front."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"helo",
        "he",
        "ll",
        "hell",
    ]
    tokens += ["hello", "\u2581hello"]
    file = tmp_path / "m.gguf"
    write(llama, file, pieces=tokens)
    with LLM(file, dtype="float32") as llm:
        ids = llm.tokenizer.encode("hello hello \u00fc")
        assert [tokens[one] for one in ids] == [
            "<s>", "\u2581hello", "\u2581hello", "\u2581", "<0xC3>", "<0xBC>",
        ]  # fmt: skip
        assert llm.tokenizer.decode(ids) == "hello hello \u00fc"


def test_all_tokens_that_end_an_answer_are_the_files(llama, tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 260, "tokenizer.ggml.eom_token_id": 0xFFFFFFFF}  # -1 is none
    with LLM(write(llama, tmp_path / "m.gguf", raw=ends), dtype="float32") as llm:
        assert llm.model.eos_token_ids == (EOS, 260)
    with pytest.raises(ModelError, match="eot_token_id=5000 is none of its 272 tokens"):
        checkpoint_folder(write(llama, tmp_path / "odd.gguf", raw={"tokenizer.ggml.eot_token_id": 5000}))


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
    file = write(llama, tmp_path / "model.gguf")
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
    whole = write(llama, tmp_path / "model.gguf", without=("tokenizer",), vocab_size=272).read_bytes()
    head = min(tensor.offset for tensor in read_header(tmp_path / "model.gguf").tensors)
    rng = np.random.default_rng(0)
    file, ends = tmp_path / "harmed.gguf", Counter()
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(4, head, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        file.write_bytes(data[: int(rng.integers(4, head))] if rng.random() < 0.2 else data)
        try:
            gguf_folder.write_config(read_header(file), tmp_path / "out")
            ends["read"] += 1
        except ModelError as error:
            ends["refused" if len(str(error).splitlines()) == 1 else "said at length"] += 1
    assert min(ends["read"], ends["refused"]) >= 5
    assert sum(ends.values()) == ends["read"] + ends["refused"] == 150


REFUSED = {
    "a part by name": ({}, "is a part of a model, and model-00001-of-00003.gguf is not beside it"),
    "a part by key": ({"split.count": 4}, "is one of 4 parts of a model; name them as"),
    "experts that are not there": ({"expert_count": 8, "expert_used_count": 2}, "but the checkpoint holds"),
    "scaled logits": ({"logit_scale": 0.5}, r"llama.logit_scale=0.5 is not read"),
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
            write(llama, file, raw={"split.count": 4})
        else:
            write(llama, file, without=without, extra=extra, **change)
        with pytest.raises(ModelError, match=message):
            load_model(converted(file))
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(write(llama, tmp_path / "known.gguf").read_bytes().replace(b"llama", b"mambo"))
    with pytest.raises(ModelError, match=r"'mambo' are not read, only those of llama, mistral3, qwen2"):
        converted(unknown)


def test_a_checkpoint_folder_may_be_named_as_a_file(llama, tmp_path):
    (named := tmp_path / "model.gguf").symlink_to(llama)
    assert checkpoint_folder(named) == named
    assert load_model(named).spec.layers == 3


def test_a_folder_of_gguf_files_says_to_give_the_file(llama, tmp_path):
    file = write(llama, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=str(file)):
        load_model(tmp_path)
