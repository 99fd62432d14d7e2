"""Weights in tiles, as a GPU's kernels read them, under Triton's interpreter: values against torch's dequantisers, bit
for bit, and products against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_planes import blocks, draw
from torch.nn.functional import silu

from saccade.errors import SaccadeError
from saccade.models.matrix_modules import MatrixExperts
from saccade.ops.block_weights import FORMATS as BLOCKS
from saccade.ops.dequantised import DequantisedMatrix
from saccade.ops.group_weights import FORMATS as GROUPS
from saccade.ops.group_weights import packed_codes
from saccade.ops.tile_weights import _BITS, FORMATS, TILE, TileExperts, TileMatrix, tiled
from saccade.ops.triton import tile_products, tile_rows


def stored(name: str, outputs: int, channels: int, wild: bool, device: str = "cpu") -> DequantisedMatrix:
    """All bytes at random but for the scales, which are such as models have, or of every size: ``wild``."""
    if name in BLOCKS:
        weight = blocks(name, outputs, channels, seed=3, wild=wild).weight
        if name == "MXFP4":  # subnormal scales may count as 0, and sums are to stay finite
            weight.view(outputs, -1, BLOCKS[name].block_bytes)[..., 0].clamp_(2, 200)
        return BLOCKS[name](weight.to(device))
    kind, rng = GROUPS[name], np.random.default_rng(3)
    codes, zeros = (
        torch.from_numpy(rng.integers(0, 1 << kind.bits, (outputs, count), dtype=np.uint8))
        for count in (channels, channels // kind.group)
    )
    scales = draw(*zeros.shape, seed=5) * (2.0 ** rng.integers(-26, 8) if wild else 0.02)
    scales = scales.to(FORMATS[name].layout.kind)
    return kind(*(one.to(device) for one in (packed_codes(codes, kind.bits), scales, zeros)))


@pytest.mark.parametrize(("name", "wild"), [*((name, False) for name in FORMATS), *((name, True) for name in _BITS)])
def test_values_and_products_equal_the_dequantised_weights(name, wild):
    """More outputs than whole tiles have; channels that fill no whole span of most formats; rows that lie apart; scales
    as models have them, and of every size."""
    channels = {256: 768, 32: 96}.get(FORMATS[name].layout.group, 384)
    held = stored(name, TILE + 35, channels, wild)
    made = TileMatrix.of_weights(held)
    assert (made.outputs, made.channels, made.format) == (TILE + 35, channels, name)
    ids = torch.tensor([98, 0, 3, 63, 64, 3])
    assert torch.equal(made.rows(ids, torch.float32), held.rows(ids, torch.float32))
    values = held.dequantised(slice(None))
    assert torch.equal(tile_products.values(made, range(1, 99), torch.float32), values[1:])
    x = draw(3, 2 * channels, seed=4)[:, ::2]
    exact = x.double() @ values.double().T
    most = x.double().abs() @ values.double().abs().T  # what rounding is relative to
    got = made.product(x)
    assert bool(((got - exact).abs() <= 2e-6 * most).all())
    assert torch.equal(made.product(x[1:2]), got[1:2])
    many = made.product(x.repeat(12, 1))  # unpacked
    assert bool(((many[:3] - exact).abs() <= 2e-6 * most).all())


def test_halves_and_sums_that_programs_share():
    held = blocks("Q4_K", TILE, 1024, seed=3)
    bias, x = draw(TILE, seed=5).half(), draw(9, 1024, seed=4).half()
    made = TileMatrix.of_weights(type(held)(held.weight, bias))
    assert tile_products._splits(1, 8, 4, tile_products.PLAIN) == 4
    exact = x.double() @ held.dequantised(slice(None)).double().T + bias.double()
    assert bool(((made.product(x) - exact).abs() <= 1e-3 * (1 + exact.abs())).all())


@pytest.mark.parametrize(
    ("name", "channels", "biased"), [("Q4_K", 768, False), ("Q8_0", 2048, True), ("MXFP4", 96, True)]
)
def test_rows_meet_experts_of_their_own_in_one_launch(name, channels, biased):
    """Three rows of two experts each, one expert twice, sums in parts where channels are many."""
    weight, biases = stored(name, 500, channels, False).weight.view(5, 100, -1), draw(5, 100, seed=6)
    held = [BLOCKS[name](one.contiguous(), bias if biased else None) for one, bias in zip(weight, biases)]
    tiles = [TileMatrix.of_weights(one) for one in held]
    experts, x, chosen = TileExperts.of(tiles), draw(3, 2 * channels, seed=4)[:, ::2], torch.tensor([4, 0, 2, 2, 1, 4])
    assert experts is not None
    made, wide = experts.product(x, chosen, 2), x.repeat_interleave(2, 0)
    assert torch.equal(experts.product(wide, chosen), made)
    for row, (number, got) in enumerate(zip(chosen.tolist(), made)):
        values = held[number].dequantised(slice(None)).double()
        exact = values @ wide[row].double() + (biases[number].double() if biased else 0)
        assert bool(((got - exact).abs() <= 2e-6 * (values.abs() @ wide[row].double().abs() + 1)).all())
    assert all(torch.equal(one.weight, tile.weight) for one, tile in zip(experts.matrices, tiles))
    assert TileExperts.of([*tiles, TileMatrix.of_weights(blocks("Q6_K", 100, 768))]) is None
    assert TileExperts.of(held) is None


def test_experts_of_a_layer_in_three_launches():
    """Against those that are computed one after another."""
    shapes = {"gate": (96, 256), "up": (96, 256), "down": (256, 96)}
    held = {
        part: [blocks("Q8_0", *shape, seed=10 * at + number) for number in range(4)]
        for at, (part, shape) in enumerate(shapes.items())
    }
    tiles = {part: [TileMatrix.of_weights(one) for one in own] for part, own in held.items()}
    x, weights = draw(5, 256, seed=1), torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor([[0, 3], [1, 0], [3, 2], [2, 1], [0, 1]])
    apart, together = (
        MatrixExperts([own["gate"], own["up"]], own["down"], lambda gate, up: silu(gate) * up) for own in (held, tiles)
    )
    assert apart.together is None
    assert together.together is not None
    wanted = apart(x, chosen, weights)
    most = 1e-6 * float(wanted.abs().max())
    torch.testing.assert_close(together(x, chosen, weights), wanted, rtol=1e-5, atol=most)
    assert torch.equal(together(x[2:3], chosen[2:3], weights[2:3]), together(x, chosen, weights)[2:3])
    many = [one.repeat(7, 1) for one in (x, chosen, weights)]
    torch.testing.assert_close(together(*many)[:5], wanted, rtol=1e-5, atol=most)


def test_parts_of_whole_tiles_are_one_matrix():
    whole = TileMatrix.of_weights(type(held := blocks("Q6_K", 200, 512))(held.weight, draw(200)))
    parts, x = whole.split([64, 128, 8]), draw(2, 512)
    assert [part.outputs for part in parts] == [64, 128, 8]
    assert torch.equal(torch.cat([part.product(x) for part in parts], 1), whole.product(x))
    joined = whole.join(parts)
    assert torch.equal(joined.weight, whole.weight)
    assert torch.equal(joined.bias, whole.bias)
    with pytest.raises(SaccadeError, match="multiples of 64 outputs"):
        whole.split([8, 192])
    with pytest.raises(SaccadeError, match="multiples of 64 outputs"):
        whole.join(parts[::-1])


@pytest.mark.parametrize("magic", [0x4300, 0x6400])
@pytest.mark.parametrize("name", FORMATS)
def test_the_assembly_makes_codes_less_their_zero(name, magic):
    """Which the interpreter cannot run: here on pairs of numbers."""
    layout, rng = FORMATS[name].layout, np.random.default_rng(0)
    word, further = rng.integers(0, 1 << 32, (2, 500), dtype=np.uint32)
    for part in range(layout.span // layout.part):
        field = part % (16 // layout.bits)
        text = tile_rows.assembly.fn(layout.bits, layout.more, field * layout.bits, layout.zero, magic)
        turn = np.full(500, part * layout.more - 4 & 31, dtype=np.uint32)
        made = run(text, {"$1": word, "$2": further, "$3": turn}, magic)
        want = word.view(np.uint16) >> field * layout.bits & (1 << layout.bits) - 1
        if layout.more:
            want = want | (further.view(np.uint16) >> part * layout.more & (1 << layout.more) - 1) << layout.bits
        assert (made == want.astype(np.float32) - layout.zero).all()


OPERATIONS = {
    "mov": lambda a: a,
    "shr": lambda a, b: a >> b,
    "shf": lambda a, b, turn: a >> turn | b << (32 - turn & 31),
    "and": lambda a, b: a & b,
    "xor": lambda a, b: a ^ b,
    "lop3": lambda a, b, c, _: a & b | c,
}


def run(text: str, registers: dict[str, np.ndarray], magic: int) -> np.ndarray:
    """float32 [2n]: what PTX of the instructions below makes of words of two 16-bit floats."""

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full(500, int(name, 0), dtype=np.uint32)

    def floats(bits: np.ndarray) -> np.ndarray:
        halves = bits.view(np.uint16)
        if magic == 0x6400:
            return halves.view(np.float16).astype(np.float32)
        return (halves.astype(np.uint32) << 16).view(np.float32)

    for line in text.removeprefix("{ .reg .b32 t, h, m, o; ").removesuffix(" }").split("; "):
        operation, rest = line.removesuffix(";").split(" ", 1)
        to, *given = rest.split(", ")
        a, *more = map(value, given)
        kind = operation.split(".")[0]
        if kind == "fma":
            assert floats(more[0]).tolist() == [1.0] * 1000
            return floats(a) + floats(more[1])
        if kind == "lop3":
            assert given[3] == "0xEA"
        registers[to] = OPERATIONS[kind](a, *more)
    raise AssertionError("nothing was made")


def test_the_assembly_makes_floats_of_bytes():
    words = np.random.default_rng(0).integers(0, 1 << 32, 500, dtype=np.uint32)
    for number in range(4):
        _, _, one, selected = tile_rows.last.fn(number).removesuffix(";").split(", ")
        lots = np.concatenate([words[:, None], np.full((500, 1), int(one, 0), np.uint32)], 1).view(np.uint8)
        made = lots[:, [int(selected[-1 - place], 16) for place in range(4)]].copy().view(np.float32)[:, 0]
        assert (made == 8388608.0 + (words >> 8 * number & 255)).all()


def test_what_is_on_a_cpu_stays_in_blocks():
    for name in [*BLOCKS, *GROUPS]:
        if name in FORMATS:
            held = stored(name, 3, 512, False)
            assert tiled(held) is held
