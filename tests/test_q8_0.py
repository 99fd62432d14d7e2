"""Q8_0, as it lies in a GGUF file and in planes: values against the gguf package's dequantiser bit for bit, products
against float64 on every instruction set and under Triton's interpreter, models against transformers' modules of the
dequantised weights, and refusals."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny, write
from test_cli import run
from tiny_models import oracle, oracle_logits, random_ids

from saccade import LLM, SamplingParams
from saccade.errors import ModelError
from saccade.models.gguf_parts import read_header
from saccade.models.gguf_weights import Mapped
from saccade.models.loader import load_model
from saccade.ops import cpu
from saccade.ops.block_weights import Q8_0
from saccade.ops.layer_rows import head
from saccade.ops.layer_weights import Norm
from saccade.ops.planes import FORMATS as PLANES
from saccade.ops.planes import packed
from saccade.ops.tile_weights import TileMatrix

IDS = random_ids(40, seed=5)
SCORED = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saccade"


def raw(outputs: int, channels: int, seed: int = 0) -> np.ndarray:
    """Blocks of all bytes, with scales of every size: zero, subnormal, negative, large."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (outputs, channels // 32, 34), dtype=np.uint8)
    scales = rng.standard_normal((outputs, channels // 32)) * 2.0 ** rng.integers(-26, 8, (outputs, channels // 32))
    scales[0, 0] = 0.0
    blocks[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def matrix(outputs: int, channels: int, bias: torch.Tensor | None = None, even: bool = False):
    """A matrix, and its values by the gguf package. ``even``: of weights that a model may have."""
    if even:
        values = np.random.default_rng(1).standard_normal((outputs, channels), dtype=np.float32)
        stored = gguf.quantize(values / channels**0.5, Kind.Q8_0)
    else:
        stored = raw(outputs, channels)
    return Q8_0(torch.from_numpy(stored), bias), torch.from_numpy(gguf.dequantize(stored, Kind.Q8_0))


def draw(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_values_are_the_gguf_packages_bit_for_bit():
    held, values = matrix(37, 96)
    assert (held.outputs, held.channels, held.nbytes) == (37, 96, 37 * 3 * 34)
    found = held.rows(torch.arange(37), torch.float32)
    assert torch.equal(found, values)
    assert torch.equal(held.rows(torch.tensor([5, 5, 36]), torch.bfloat16), values[[5, 5, 36]].bfloat16())
    first, second = held.split([30, 7])
    assert torch.equal(second.rows(torch.arange(7), torch.float32), values[30:])
    assert torch.equal(Q8_0.join([second, first]).rows(torch.tensor([0, 7]), torch.float32), values[[30, 0]])


@pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
@pytest.mark.parametrize("isa", cpu.supported_isas() or ["none"])
def test_the_cpu_reads_every_value_as_it_is(isa):
    """A row that picks one channel: what comes back is the weight, to the bit."""
    held, values = matrix(70, 64)
    one = Norm(torch.ones(64), 0.0)
    picked = torch.eye(64)[::7] * 8.0  # whose norm is 8 again
    cpu.set_isa(isa)
    try:
        assert torch.equal(head(picked, one, packed(held)), (picked @ values.double().T.float()))
    finally:
        cpu.set_isa(None)


@pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
@pytest.mark.parametrize("isa", cpu.supported_isas() or ["none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_few_rows_on_a_cpu(isa, dtype):
    norm, x = Norm(1 + 0.1 * draw(160, dtype=dtype), 1e-5), draw(17, 160, seed=1, dtype=dtype)
    held, values = matrix(203, 160, draw(203, seed=2, dtype=dtype), even=True)
    held = packed(held)
    cpu.set_isa(isa)
    try:
        made = head(x, norm, held)
        alone = [head(x[row : row + 1], norm, held) for row in (0, 16)]
    finally:
        cpu.set_isa(None)
    wide = x.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    normed = (normed * norm.weight).double()
    if dtype == torch.bfloat16:  # these are multiplied in 8 bits, a scale for 32 channels
        apart = normed.unflatten(1, (-1, 32))
        scale = apart.abs().amax(2, keepdim=True).float() / 127
        normed = ((apart / scale).round() * scale).flatten(1)
    exact = normed @ values.double().T + held.bias.double()
    assert float((made.double() - exact).abs().max()) <= (2e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(torch.cat(alone), made[[0, 16]])  # a row hangs on no other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_few_rows_on_the_device(rows, dtype):
    x = draw(rows, 2 * 96, dtype=dtype)[:, ::2]
    held, values = matrix(45, 96, draw(45, seed=2, dtype=dtype), even=True)
    made = TileMatrix.of_weights(held).product(x)
    exact = x.double() @ values.double().T + held.bias.double()
    torch.testing.assert_close(made.double(), exact, rtol=2e-3, atol=2e-6 if dtype == torch.float32 else 2e-3)
    wide = Q8_0(torch.cat([held.weight, held.weight], 1)[:, : held.weight.shape[1]], held.bias)  # rows lie apart
    assert torch.equal(TileMatrix.of_weights(wide).product(x), made)


def test_products_of_many_rows_dequantise_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr("saccade.ops.dequantised.PIECE", 96 * 7)
    seen: list[int] = []
    real = Q8_0.values
    monkeypatch.setattr(Q8_0, "values", staticmethod(lambda blocks: (seen.append(len(blocks)), real(blocks))[1]))
    held, values = matrix(45, 96, draw(45, seed=2), even=True)
    x = draw(50, 96)
    made = held.product(x)
    torch.testing.assert_close(made.double(), x.double() @ values.double().T + held.bias.double(), rtol=1e-5, atol=1e-5)
    assert max(seen) == 7 * 3
    assert sum(seen) == 45 * 3


def opened(file: Path, **settings) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is written out, and nothing said of it
        return LLM(file, dtype="float32", kv_memory="4MiB", **{"enable_prefix_caching": False, **settings})


def said(llm: LLM) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and log-probabilities of the prompt's and of those that follow."""
    with llm:
        output = llm.generate([IDS], SCORED)[0]
    tokens = output.outputs[0].token_ids
    found = [entry[token].logprob for token, entry in zip(IDS[1:], output.prompt_logprobs[1:])]
    return list(tokens), torch.tensor(found)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_its_dequantised_modules(kind, tied, tmp_path):
    """The same tokens, and logits within 1e-4, as transformers' model of the weights that the gguf package reads."""
    made = tiny(kind, tmp_path / "made", tie_word_embeddings=tied)
    theirs = oracle(made)
    file = write(made, tmp_path / "m.gguf", Kind.Q8_0, model=theirs)
    llm = opened(file)
    weights = llm.model.runner.llama.weights
    matrices = [part for layer in weights.layers for part in layer.matrices] + [weights.head, weights.embedding]
    assert {type(part) for part in matrices} == {PLANES["Q8_0"] if cpu.available() else Q8_0}
    assert (weights.head is weights.embedding) == tied
    assert llm.model.identity.quantize == "Q8_0"
    assert llm.model.weight_bytes < 0.3 * sum(one.nbytes for one in theirs.parameters())
    if cpu.available():
        assert llm.model.runner.llama.kernels(1).whole is not None  # all layers in one call
    tokens, found = said(llm)
    whole = IDS + tokens
    logits = oracle_logits(theirs, whole)
    wanted = torch.log_softmax(logits.float(), -1)
    assert wanted[len(IDS) - 1 : -1].argmax(-1).tolist() == tokens
    torch.testing.assert_close(
        found, wanted[: len(IDS) - 1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0], atol=1e-4, rtol=0
    )


def test_a_model_holds_its_weights_once(tmp_path):
    """In planes; pages of the file that were read for them are given back, as often as they are read again."""
    file = write(tiny("llama", tmp_path / "made"), tmp_path / "m.gguf", Kind.Q8_0)
    header = read_header(file)
    mapped = Mapped()
    largest = max(header.tensors, key=lambda one: one.nbytes)
    first = mapped.stored(largest)
    kept = first.clone()
    for one in header.tensors:
        mapped.stored(one)
    assert torch.equal(first, kept)
    area, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(file))
        if inside and line.startswith("Rss:"):
            area += int(line.split()[1]) << 10
    assert area < file.stat().st_size


def test_the_command_line_finds_the_file_where_it_is_now(capsys, tmp_path, cache):
    made = tiny("llama", tmp_path / "made")
    file = write(made, tmp_path / "m.gguf", Kind.Q8_0)
    code, out, err = run(capsys, "generate", "hello", "-m", str(file), "-n", "5", "--raw")
    assert (code, "weights" in err) == (0, False)
    (tmp_path / "elsewhere").mkdir()
    moved = file.rename(tmp_path / "elsewhere" / "n.gguf")
    assert run(capsys, "generate", "hello", "-m", str(moved), "-n", "5", "--raw")[:2] == (0, out)
    (folder,) = cache.iterdir()
    assert sum(one.stat().st_size for one in folder.iterdir() if not one.is_symlink()) < 100_000  # no weights
    moved.unlink()
    with pytest.raises(ModelError, match="has gone; give the GGUF file where it is now"):
        load_model(folder)


def test_what_cannot_be_is_refused_by_name(tmp_path):
    file = write(tiny("llama", tmp_path / "made"), tmp_path / "m.gguf", Kind.Q8_0)
    with pytest.raises(ModelError, match=r"quantize='fp8_reference' is for weights of 16 or 32 bits; m.gguf has fewer"):
        LLM(file, quantize="fp8_reference", enable_prefix_caching=False)
    gone = write(tiny("llama", tmp_path / "less"), tmp_path / "l.gguf", Kind.Q8_0, without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match="no weights in the checkpoint"):
        LLM(gone, enable_prefix_caching=False)
