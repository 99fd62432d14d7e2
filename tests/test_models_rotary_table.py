"""What decode steps look up is what transformers' module computes for the same rows, to the last bit."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from saccade.models.interface import Segment
from saccade.models.rotary import Rotary
from saccade.models.rotary_table import KEPT, SPAN, RotaryTable

LAYERS = 4
TRAINED = 4096
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(48)],
        "long_factor": [3.0 + 0.5 * i for i in range(48)],
        "original_max_position_embeddings": TRAINED,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}
# The beginning, borders of stretches, ends of usual contexts.
POSITIONS = [0, 1, SPAN - 1, SPAN, 8191, 8192, 131_070, 131_071, 1_048_575, 1_048_576]


def llama(kind: str) -> tuple[Rotary, LlamaRotaryEmbedding]:
    most = TRAINED if kind == "dynamic" else 131_072
    config = LlamaConfig(
        hidden_size=192,
        num_attention_heads=2,
        head_dim=96,
        num_hidden_layers=LAYERS,
        max_position_embeddings=most,
        rope_parameters=KINDS[kind],
    )
    return Rotary(LlamaRotaryEmbedding(config), config, per_layer_type=False), LlamaRotaryEmbedding(config)


def segments(positions: list[int]) -> list[Segment]:
    """Decode rows, each of a sequence of its own."""
    return [Segment(row, 1, position + 1) for row, position in enumerate(positions)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_rows_equal_the_modules(kind, dtype):
    """One by one and packed, in any order, with rows that are alike; every rope type that is supported."""
    ours, module = llama(kind)
    x = torch.zeros(1, dtype=dtype)
    alone = {}
    for position in POSITIONS:
        if kind == "dynamic":
            module(x, torch.zeros(1, 1, dtype=torch.long))  # forgets the longest call
        expected = module(x, torch.tensor([[position]]))
        alone[position] = [part[0] for part in expected]
        for _ in range(2):
            got = ours.embed(x, torch.tensor([position]), segments([position])).layers
            assert len(got) == LAYERS
            for part, own in zip(got[-1], alone[position]):
                assert part.dtype == own.dtype
                assert torch.equal(part, own)
    packed = [*reversed(POSITIONS), 1, 131_071]
    got = ours.embed(x, torch.tensor(packed), segments(packed)).layers[0]
    for at in (0, 1):
        assert torch.equal(got[at], torch.cat([alone[position][at] for position in packed]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_types_have_tables_of_their_own(dtype):
    types = ["sliding_attention", "full_attention"] * 2
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
    config = Gemma3TextConfig(num_hidden_layers=LAYERS, layer_types=types, rope_parameters=parameters, head_dim=64)
    module, x = Gemma3RotaryEmbedding(config), torch.zeros(1, dtype=dtype)
    rotary = Rotary(Gemma3RotaryEmbedding(config), config, per_layer_type=True)
    for positions in ([131_071], [5], POSITIONS, [131_071]):
        asked = torch.tensor(positions)
        got = rotary.embed(x, asked, segments(positions)).layers
        for kind, pair in zip(types, got):
            for part, own in zip(pair, module(x, asked[None], kind)):
                assert torch.equal(part, own[0])
    assert not torch.equal(got[0][0], got[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefills_rows_equal_those_that_decode(dtype):
    """Keys of a prompt and of an answer must be rotated alike wherever one ends and the other begins."""
    for kind in ("default", "linear", "llama3", "yarn"):
        ours, _ = llama(kind)
        x = torch.zeros(1, dtype=dtype)
        first = 1_048_576 - 200
        asked = torch.arange(first, first + 300)
        chunk = ours.embed(x, asked, [Segment(0, 300, first + 300)]).layers[0]
        for row in range(0, 300, 7):
            one = ours.embed(x, asked[row : row + 1], segments([first + row])).layers[0]
            for part, own in zip(one, chunk):
                assert torch.equal(part[0], own[row])


class Counted:
    """Factors that name their position, and how many were asked for."""

    def __init__(self) -> None:
        self.calls, self.fails, self.breaks = 0, False, False

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.fails:
            raise RuntimeError("no memory")
        values = positions[:, None].double().repeat(1, 2)
        return values, -values[1:] if self.breaks else -values


def looked_up(table: RotaryTable, positions: list[int]) -> None:
    cos, sin = table.rows(torch.tensor(positions))
    assert cos[:, 1].tolist() == [float(one) for one in positions]
    assert torch.equal(cos, -sin)


def test_a_table_asks_once_a_stretch_and_keeps_the_last_ones():
    ask = Counted()
    table = RotaryTable(ask)
    for position in range(3 * SPAN):
        looked_up(table, [position])
    assert ask.calls == 3
    far = [stretch * SPAN + stretch for stretch in range(10, 10 + KEPT)]
    looked_up(table, far)  # takes every slot
    assert ask.calls == 3 + KEPT
    looked_up(table, far[::-1])
    assert ask.calls == 3 + KEPT
    looked_up(table, [0, *far[1:]])  # the one used longest ago has left, and nothing that this call reads
    looked_up(table, [0, *far[1:]])
    order = torch.randint(0, 500 * SPAN, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for at in range(0, 300, 30):
        looked_up(table, order[at : at + 30])


def test_a_table_goes_on_after_a_failure():
    """Nothing is known of a stretch that was not written whole, wherever it broke off."""
    ask = Counted()
    table = RotaryTable(ask)
    far = [stretch * SPAN for stretch in range(KEPT)]
    looked_up(table, far)
    for failure in ("fails", "breaks"):
        setattr(ask, failure, True)
        with pytest.raises(RuntimeError):
            table.rows(torch.tensor([KEPT * SPAN]))
        setattr(ask, failure, False)
        looked_up(table, [KEPT * SPAN, *far[1:]])
        looked_up(table, far)
