"""Weights in planes: values against torch's dequantisers (which tests hold against the gguf package's), bit for bit,
and products against float64, on every instruction set that this machine has."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from saccade.errors import SaccadeError
from saccade.ops import cpu, planes
from saccade.ops.block_weights import FORMATS, BlockMatrix
from saccade.ops.cpu_structs import native
from saccade.ops.layer_rows import RowLayer
from saccade.ops.layer_weights import LayerWeights, Norm
from saccade.ops.matrices import DenseMatrix
from saccade.ops.planes import PlaneMatrix

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,), "MXFP4": ()}
INTS = [f"INT{bits}_{group}{kind}" for kind in ("", "_BF16") for bits in (4, 8) for group in (32, 64, 128)]


HAS_AVX_VNNI = native is not None and native.use_avx_vnni(True)


@pytest.fixture(params=[*cpu.supported_isas(), *(["avx2 without AVX-VNNI"] if HAS_AVX_VNNI else [])] or ["none"])
def isa(request):
    """Each instruction set in turn."""
    cpu.set_isa(request.param.split()[0])
    native.use_avx_vnni("without" not in request.param)
    yield request.param
    cpu.set_isa(None)
    native.use_avx_vnni(True)


def blocks(name: str, outputs: int, channels: int, seed: int = 0, wild: bool = False) -> BlockMatrix:
    """All bytes at random but for the scales, which are such as models have, or of every size: ``wild``."""
    kind, rng = FORMATS[name], np.random.default_rng(seed)
    count = channels // kind.block
    stored = rng.integers(0, 256, (outputs, count, kind.block_bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        sizes = 2.0 ** rng.integers(-26, 8, (outputs, count)) if wild else 0.02
        scales = rng.standard_normal((outputs, count)) * sizes
        stored[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if name == "MXFP4" and not wild:
        stored[..., 0] = rng.integers(118, 124, (outputs, count))
    return kind(torch.from_numpy(stored.reshape(outputs, -1)))


def draw(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(name: str, outputs: int, channels: int) -> tuple[PlaneMatrix, torch.Tensor]:
    """A matrix of integer codes and zeros, and its values."""
    bits, group = int(name[3]), planes.FORMATS[name].step
    rng = np.random.default_rng(bits + group)
    codes = torch.from_numpy(rng.integers(0, 1 << bits, (outputs, channels), dtype=np.uint8))
    zeros = torch.from_numpy(rng.integers(0, 1 << bits, (outputs, channels // group), dtype=np.uint8))
    kind = torch.bfloat16 if name.endswith("BF16") else torch.float16
    scales = draw(outputs, channels // group, dtype=kind) * 0.02
    held = planes.FORMATS[name].of_codes(codes, scales, zeros)
    apart = codes.float().unflatten(1, (-1, group)) - zeros.float()[..., None]
    return held, (apart * scales.float()[..., None]).flatten(1)


def everything(outputs: int, channels: int):
    """All formats: name, planes, values."""
    for name in FORMATS:
        held = blocks(name, outputs, channels)
        yield name, PlaneMatrix.of_blocks(held), held.rows(torch.arange(outputs), torch.float32)
    for name in INTS:
        yield name, *integers(name, outputs, channels)


def coded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What products make of ``x`` bfloat16 [rows, channels]: codes and scales [rows, channels / 32] in float64."""
    apart = x.float().unflatten(1, (-1, 32))
    top = apart.abs().amax(-1, keepdim=True)
    inverse = 127 / top
    fused = cpu.isa() != "portable"  # which rounds the product before it rounds to an integer
    codes = torch.round(apart.double() * inverse.double() if fused else (apart * inverse).double()).nan_to_num()
    return codes, (top / 127).double()


def test_planes_are_the_formats_of_blocks_and_integers():
    assert set(planes.FORMATS) == set(FORMATS) | set(INTS)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_the_formats_bit_for_bit(isa, name):
    held = blocks(name, 37, 512, wild=True)
    wanted = held.rows(torch.arange(37), torch.float32)
    packed = PlaneMatrix.of_blocks(held)
    assert (packed.outputs, packed.channels, packed.format) == (37, 512, name)
    assert packed.nbytes <= 1.05 * held.nbytes * 48 / 37
    every = torch.arange(37)
    assert torch.equal(packed.rows(every, torch.float32), wanted)
    # AVX-512 rounds numbers below the least normal one to 0.
    normal = wanted.abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(packed.rows(every, torch.bfloat16)[normal], wanted.bfloat16()[normal])
    assert torch.equal(packed.rows(torch.tensor([36, 5, 5, 16]), torch.float32), wanted[[36, 5, 5, 16]])
    assert torch.equal(packed._values(torch.float32, 20, first=9), wanted[9:29])
    # A row that picks one channel: what comes back is the weight.
    picked = torch.eye(512)[3::47]
    finite = wanted.isfinite().all(1)
    assert torch.equal(packed.product(picked)[:, finite], picked @ wanted[finite].T)
    assert bool(finite.any())


@pytest.mark.parametrize("name", INTS)
def test_values_of_integers_with_zeros(isa, name):
    held, wanted = integers(name, 21, 256)
    assert torch.equal(held.rows(torch.arange(21), torch.float32), wanted)


def test_infinite_scales_are_their_rows_own(isa):
    for name, at in (("Q4_0", 0), ("Q4_K", 2), ("Q6_K", 208)):
        held = blocks(name, 20, 256)
        held.weight[7, at : at + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
        held.weight[9, at : at + 2] = torch.tensor([1, 0x7E], dtype=torch.uint8)  # not a number
        values = held.rows(torch.arange(20), torch.float32)
        packed = PlaneMatrix.of_blocks(held)
        found = packed.rows(torch.arange(20), torch.float32)
        assert torch.equal(found.nan_to_num(3.0, 1e9, -1e9), values.nan_to_num(3.0, 1e9, -1e9))
        for dtype in (torch.float32, torch.bfloat16):
            made = packed.product(draw(3, 256, dtype=dtype))
            bad = ~made.isfinite().all(0)
            assert bad.nonzero().flatten().tolist() == [7, 9], name


def test_products_of_rows_in_float32_are_exact(isa):
    for name, held, values in everything(37, 256):
        held.bias = draw(37, seed=2)
        x = draw(5, 256, seed=1)
        made = held.product(x)
        exact = x.double() @ values.double().T + held.bias.double()
        size = x.double().abs() @ values.double().abs().T + 1
        assert float(((made.double() - exact).abs() / size).max()) <= 2e-6, name


def test_products_of_rows_in_bfloat16_are_those_of_codes(isa):
    """Sums of integers are exact: what is left is the rounding of fp32 sums over blocks, and of the result."""
    for name, held, values in everything(37, 256):
        held.bias = draw(37, seed=2, dtype=torch.bfloat16)
        x = draw(5, 256, seed=1, dtype=torch.bfloat16)
        x[1] *= 1000
        x[2, 32:64] = 0
        made = held.product(x)
        codes, scales = coded(x)
        taken = (codes * scales).flatten(1)
        exact = taken @ values.double().T + held.bias.double()
        # Codes and offsets are multiplied apart: their sizes bound what is lost, not the values'.
        size = taken.abs() @ values.double().abs().amax(1, keepdim=True).expand_as(values).T
        lost = (made.double() - exact).abs() - 2**-8 * exact.abs() - 2e-6 * size
        assert float(lost.max()) <= 0, name
        true = x.double() @ values.double().T + held.bias.double()
        # Half a step of the activations' codes for each channel, at most.
        bound = (scales / 2).expand(-1, -1, 32).flatten(1) @ values.double().abs().T + 2**-8 * true.abs() + 2e-6 * size
        assert float(((made.double() - true).abs() - bound).max()) <= 0, name


def test_products_of_many_rows_are_those_of_values_in_bfloat16(isa):
    """Weights are rounded once, sums are fp32: what is left is their rounding, and the result's."""
    for name, held, values in everything(53, 512):
        held.bias = draw(53, seed=2, dtype=torch.bfloat16)
        x = draw(41, 512, seed=1, dtype=torch.bfloat16)
        made, taken = held.product(x), values.bfloat16().double()
        exact = x.double() @ taken.T + held.bias.double()
        size = x.double().abs() @ taken.abs().T + 1
        assert float(((made.double() - exact).abs() - 2**-8 * exact.abs() - 2e-6 * size).max()) <= 0, name


@pytest.mark.skipif("amx_bf16" not in cpu.supported_isas(), reason="needs AMX")
def test_tiles_multiply_a_row_alike_among_any_others():
    """Over the bounds of chunks, slabs, panels and parts, and with any threads."""
    threads, held = torch.get_num_threads(), PlaneMatrix.of_blocks(blocks("Q6_K", 1000, 2304))
    x = draw(1100, 2304, dtype=torch.bfloat16)
    whole = held.product(x)
    one = torch.zeros(20, 2304, dtype=torch.bfloat16)
    one[3, 2200] = 1
    weight = held.rows(torch.arange(1000), torch.bfloat16)
    assert torch.equal(held.product(one)[3], weight[:, 2200])
    assert torch.equal(whole[1090], held.product(x[1083:])[7])
    narrow = PlaneMatrix.of_blocks(blocks("Q6_K", 24, 2304))
    assert narrow.product(x[:17]).isfinite().all()
    try:
        torch.set_num_threads(3)
        for rows in (17, 33, 1056):
            assert torch.equal(held.product(x[:rows]), whole[:rows])
    finally:
        torch.set_num_threads(threads)
    with pytest.raises(ValueError, match="tiles multiply bfloat16 by a matrix in planes"):
        cpu.kernels().many_rows(
            native.ProductRows(threads=1, storage=0, rows=1, channels=256, x=1, matrix=held._native(None), out=1)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_hangs_on_no_other_and_on_no_thread(isa, dtype):
    threads = torch.get_num_threads()
    for name in ("Q4_0", "Q5_K", "Q6_K", "Q8_0", "INT8_32"):
        found = planes.FORMATS[name]
        if name in FORMATS:
            held = PlaneMatrix.of_blocks(blocks(name, 147, 256))
        else:
            held, _ = integers(name, 147, 256)
        assert type(held) is found
        x = draw(16, 256, dtype=dtype)
        whole = held.product(x)
        try:
            torch.set_num_threads(3)
            for rows in (1, 2, 7, 15):
                assert torch.equal(held.product(x[:rows]), whole[:rows]), name
                assert torch.equal(held.product(x[16 - rows :]), whole[16 - rows :]), name
        finally:
            torch.set_num_threads(threads)


def test_rows_that_are_no_numbers_say_so(isa):
    held = PlaneMatrix.of_blocks(blocks("Q4_K", 32, 256))
    x = draw(4, 256, dtype=torch.bfloat16)
    x[1, 40], x[2, 3] = float("nan"), float("inf")
    made = held.product(x)
    assert made.isfinite().all(1).tolist() == [True, False, False, True]
    assert made[1].isnan().all()
    x[1:3] = 1e-38
    assert torch.equal(held.product(x)[1:3], torch.zeros(2, 32, dtype=torch.bfloat16))  # below 2^-100


def test_many_rows_unpack_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr("saccade.ops.planes.PIECE", 512 * 16)
    taken: list[int] = []
    real = PlaneMatrix._values
    monkeypatch.setattr(PlaneMatrix, "_values", lambda self, *a, **k: (taken.append(a[1]), real(self, *a, **k))[1])
    source = blocks("Q5_0", 45, 512)
    source.bias = draw(45, seed=3)
    held, x = PlaneMatrix.of_blocks(source), draw(17, 512)
    made = held.product(x)
    exact = x.double() @ source.rows(torch.arange(45), torch.float32).double().T + source.bias.double()
    torch.testing.assert_close(made.double(), exact, rtol=1e-4, atol=1e-4)
    assert taken == [16, 16, 13]


def test_parts_and_wholes():
    values = blocks("Q4_K", 58, 256)
    held = PlaneMatrix.of_blocks(values)
    held.bias = draw(58)
    first, second = held.split([48, 10])
    every = torch.arange(58)
    wanted = values.rows(every, torch.float32)
    assert torch.equal(second.rows(torch.arange(10), torch.float32), wanted[48:])
    assert second.weight.data_ptr() != held.weight.data_ptr()
    assert first.weight.data_ptr() == held.weight.data_ptr()  # no copy
    again = type(first).join([first, second])
    assert torch.equal(again.rows(every, torch.float32), wanted)
    x = draw(3, 256)
    assert torch.equal(again.product(x), held.product(x))
    with pytest.raises(SaccadeError, match=r"Q4_K in planes splits at multiples of 16 outputs; got \[10, 48\]"):
        held.split([10, 48])
    with pytest.raises(SaccadeError, match="joins multiples of 16 outputs"):
        type(first).join([second, first])
    with pytest.raises(ValueError, match="channels=96 must be a multiple of 256"):
        native.PackPlanes(format=held.number, threads=1, rows=1, channels=96, stored=1, planes=1)
    with pytest.raises(ValueError, match="row 58 is not among the matrix's 58"):
        held.rows(torch.tensor([0, 58]), torch.float32)


def test_matrices_lie_behind_one_another_as_long_as_one_is_used():
    first = PlaneMatrix.of_blocks(blocks("Q4_0", 16, 64))
    second = PlaneMatrix.of_blocks(blocks("Q8_0", 16, 64))
    base = first.weight.untyped_storage().data_ptr()
    assert second.weight.untyped_storage().data_ptr() == base
    assert second.weight.data_ptr() - first.weight.data_ptr() == -(-first.nbytes // 64) * 64
    arena = weakref.ref(first._arena)
    assert arena() is second._arena
    del first, second
    assert arena() is None


MIXED = {
    "query": "Q4_K",
    "key": "Q5_0",
    "value": None,
    "output": "Q6_K",
    "gate": "Q4_0",
    "up": "Q4_1",
    "down": "IQ4_XS",
}
SIZES = {"query": (256, 256), "output": (256, 256), "gate": (512, 256), "up": (512, 256), "down": (256, 512)}


def layer(dtype: torch.dtype, plain: bool) -> LayerWeights:
    """A layer of several formats, or the same of plain numbers."""
    made = {}
    for seed, (part, name) in enumerate(MIXED.items()):
        outputs, channels = SIZES.get(part, (64, 256))
        held = blocks(name or "Q8_0", outputs, channels, seed=seed)
        values = held.rows(torch.arange(outputs), torch.float32)
        values /= values.std() * channels**0.5
        factor = float(values.abs().max() / held.rows(torch.arange(outputs), torch.float32).abs().max())
        for at in HALVES.get(name, (0,)):
            stored = held.weight.view(outputs, -1, held.block_bytes)
            scales = stored[..., at : at + 2].contiguous().view(torch.float16).float() * factor
            stored[..., at : at + 2] = scales.half().view(torch.uint8)
        dense = DenseMatrix(held.rows(torch.arange(outputs), torch.float32).to(dtype))
        made[part] = dense if plain or name is None else planes.packed(held)
    norm = Norm(torch.ones(256, dtype=dtype), 1e-5)
    return LayerWeights(norm=norm, second_norm=norm, head_dim=32, rotated=False, head_norms=None, **made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_several_formats_in_the_kernels_own_calls(isa, dtype):
    mixed, plain = RowLayer(layer(dtype, plain=False)), RowLayer(layer(dtype, plain=True))
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for rows in (1, 5, 12):  # vectors, and tiles
        hidden, none = draw(rows, 256, dtype=dtype), torch.empty(0, dtype=dtype)
        found = mixed.project(hidden, none, none)
        for one, other in zip(found, plain.project(hidden, none, none), strict=True):
            torch.testing.assert_close(one.float(), other.float(), **near)
        if rows > 1:
            alone = mixed.project(hidden[rows - 1 :], none, none)
            assert torch.equal(alone[0][:, 0], found[0][:, -1])
            assert torch.equal(alone[1][:, 0], found[1][:, -1])
        attended = draw(8, rows, 32, seed=1, dtype=dtype)
        after, wanted = hidden.clone(), hidden.clone()
        mixed.finish(after, attended)
        plain.finish(wanted, attended)
        torch.testing.assert_close(after.float(), wanted.float(), **near)
        assert float((after.float() - hidden.float()).abs().mean()) > 0.3
        last = hidden[rows - 1 :].clone()
        mixed.finish(last, attended[:, rows - 1 :])
        assert torch.equal(last[0], after[-1])


def test_codes_that_do_not_fit_are_refused():
    kind = planes.FORMATS["INT4_32"]
    codes, scales, zeros = torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 2).half(), torch.zeros(3, 2).byte()
    assert kind.of_codes(codes + 15, scales, zeros + 16).outputs == 3  # a zero may lie beyond all codes
    for given, said in (
        ((codes + 16, scales, zeros), "codes below 16; got 16"),
        ((codes, scales.bfloat16(), zeros), r"scales of torch.float16 \[3, 2\]; got torch.bfloat16"),
        ((codes, scales[:, :1], zeros), r"scales of torch.float16 \[3, 2\]; got torch.float16 \[3, 1\]"),
        ((codes, scales, zeros[:2]), r"zeros of torch.uint8 \[3, 2\]; got torch.uint8 \[2, 2\]"),
        ((codes[:, :48], scales[:, :1], zeros[:, :1]), r"codes of torch.uint8 \[3, 32\]; got torch.uint8 \[3, 48\]"),
    ):
        with pytest.raises(SaccadeError, match=said):
            kind.of_codes(*given)


def test_plain_matrices_stay():
    plain = DenseMatrix(draw(3, 32))
    assert planes.packed(plain) is plain
