"""The row kernels of a decoder layer against transformers' own modules, on every instruction set that runs here."""

from __future__ import annotations

import pytest
import torch
from module_oracle import with_modules
from safetensors.torch import load_file
from tiny_models import CONFIGS, make_checkpoint

from saccade.models.families import FAMILIES
from saccade.models.interface import Segment
from saccade.models.loader import load_model
from saccade.ops import arena, attend, cpu
from saccade.ops.layer_rows import MOST_ROWS as MOST
from saccade.ops.layer_rows import RowLayer, head, serves_head
from saccade.ops.layer_weights import LayerWeights, Norm
from saccade.ops.matrices import DenseMatrix

MOST_ROWS = MOST[torch.float32]
pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=cpu.supported_isas() or ["none"])
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


class Attention:
    """Plain causal attention of the rows among themselves; keeps what the layers handed over."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, ...]] = []

    def run(self, layer, q, k, v, spec):
        self.seen.append((q.clone(), k.clone(), v.clone(), spec))
        return attend(q, (k, v), scale=spec.scale, backend="reference")[0]


def ran(runner, rows: int, fused: bool):
    kept, context = runner.llama, Attention()
    runner.llama = kept if fused else None
    ids = (torch.arange(rows) * 7 + 3) % 250
    try:
        logits = runner.run(
            ids,
            torch.arange(rows) + 20,
            context,
            segments=[Segment(0, rows, rows + 20)],
            logit_rows=torch.arange(rows),
        )
    finally:
        runner.llama = kept
    return logits, context.seen


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.llama_shape])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_layers_hand_over_what_the_modules_do(family, dtype, isa, tmp_path):
    runner = with_modules(load_model(make_checkpoint(family, tmp_path), dtype=dtype).runner)
    assert isinstance(runner.llama.kernels(1).layers[0], RowLayer)
    for rows in (1, 3, 6):
        ours, seen = ran(runner, rows, fused=True)
        theirs, wanted = ran(runner, rows, fused=False)
        near = TOLERANCE[dtype]
        assert float((ours - theirs).abs().max()) <= near * float(theirs.abs().max())
        for (*parts, spec), (*others, other) in zip(seen, wanted, strict=True):
            assert (spec.scale, spec.window, spec.softcap) == (other.scale, other.window, other.softcap)
            for a, b in zip(parts, others):
                assert a.shape == b.shape
                assert float((a - b).abs().max()) <= near * max(1.0, float(b.abs().max()))


def test_a_row_does_not_hang_on_the_others(isa, tmp_path):
    runner = load_model(make_checkpoint("qwen3", tmp_path), dtype=torch.float32).runner
    layer = runner.llama.kernels(1).layers[0]
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(MOST_ROWS, 48, generator=rng)
    cos, sin = torch.rand(2, MOST_ROWS, 16, generator=rng)
    attended = torch.randn(4, MOST_ROWS, 16, generator=rng)
    together = layer.project(hidden, cos, sin)
    whole = hidden.clone()
    layer.finish(whole, attended)
    for row in range(MOST_ROWS):
        part = slice(row, row + 1)
        alone = layer.project(hidden[part], cos[part], sin[part])
        assert all(torch.equal(a[:, part], b) for a, b in zip(together, alone))
        own = hidden[part].clone()
        layer.finish(own, attended[:, part])
        assert torch.equal(own, whole[part])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("channels", "dim", "inner", "rows"), [(45, 14, 101, 5), (64, 16, 160, 17), (96, 32, 45, 50), (608, 16, 64, 64)]
)
def test_shapes_that_fill_no_vector(dtype, threads, channels, dim, inner, rows, isa):
    """Channels that are no multiple of anything, and more outputs than one task takes; rows and channels that fill
    tiles, or do so in some products."""
    rng = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) / shape[-1] ** 0.5).to(dtype)

    norm, second = Norm(1 + draw(channels), 1e-5), Norm(1 + draw(channels), 1e-6)
    q, k, v = (DenseMatrix(draw(heads * dim, channels), draw(heads * dim)) for heads in (3, 1, 1))
    output, down = DenseMatrix(draw(channels, 3 * dim), draw(channels)), DenseMatrix(draw(channels, inner))
    gate, up = DenseMatrix(draw(inner, channels), draw(inner)), DenseMatrix(draw(inner, channels))
    layer = RowLayer(LayerWeights(norm, q, k, v, output, second, gate, up, down, dim, rotated=False))
    hidden, attended = draw(rows, channels) * 6, draw(3, rows, dim) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        projected = layer.project(hidden, hidden, hidden)
        done = hidden.clone()
        layer.finish(done, attended)
        logits = head(hidden, second, gate)
        few, last = hidden[-min(rows, 17) :], slice(-min(rows, 17), None)
        assert torch.equal(head(few, second, gate), logits[last])  # by tiles, where they multiply, or not
    finally:
        torch.set_num_threads(before)

    def normed(x, by):
        return x / (x.square().mean(-1, keepdim=True) + by.epsilon).sqrt() * by.weight.double()

    def through(x, by):
        return x @ by.weight.double().T + (0 if by.bias is None else by.bias.double())

    x = hidden.double()
    wanted = [through(normed(x, norm), part).unflatten(1, (-1, dim)).transpose(0, 1) for part in (q, k, v)]
    after = x + through(attended.double().transpose(0, 1).flatten(1), output)
    inside = normed(after, second)
    after = after + through(torch.nn.functional.silu(through(inside, gate)) * through(inside, up), down)
    near = TOLERANCE[dtype]
    assert torch.equal(logits, logits.to(dtype).float())
    for ours, exact in (*zip(projected, wanted), (done, after), (logits, through(normed(x, second), gate))):
        assert ours.dtype == (dtype if ours is not logits else torch.float32)
        assert float((ours.double() - exact).abs().max()) <= near * float(exact.abs().max())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_outputs_do_not_hang_on_where_tasks_begin(dtype, isa):
    """Parts of a matrix by themselves, and an MLP whose units have moved up behind some that give nothing."""
    channels, inner, dim, shift = 80, 320, 16, 64
    rng = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) / shape[-1] ** 0.5 * 2).to(dtype)

    norm, wide = Norm(1 + draw(channels), 1e-5), draw(1000, channels)
    hidden, attended = draw(3, channels) * 6, draw(3, 3, dim)
    logits = head(hidden, norm, DenseMatrix(wide))
    for first, last in ((0, 7), (5, 333), (411, 1000)):
        assert torch.equal(head(hidden, norm, DenseMatrix(wide[first:last])), logits[:, first:last])
    parts = [DenseMatrix(draw(heads * dim, channels)) for heads in (3, 1, 1)]
    output, down = draw(channels, 3 * dim), draw(channels, inner)
    gate, up = draw(inner, channels), draw(inner, channels)

    def done(gate, up, down):
        matrices = (DenseMatrix(one) for one in (gate, up, down))
        layer = RowLayer(LayerWeights(norm, *parts, DenseMatrix(output), norm, *matrices, dim, rotated=False))
        own = hidden.clone()
        layer.finish(own, attended)
        return own

    zero = torch.zeros(shift, channels, dtype=dtype)
    moved = torch.cat([zero, gate]), torch.cat([zero, up]), torch.cat([zero.T, down], 1)
    assert torch.equal(done(gate, up, down), done(*moved))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 14])
def test_results_do_not_hang_on_the_threads(dtype, rows, isa):
    """Which share the weights out each in their own way."""
    channels, inner, dim = 160, 1000, 24
    rng = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) / shape[-1] ** 0.5 * 2).to(dtype)

    norm, hidden, attended = Norm(1 + draw(channels), 1e-5), draw(rows, channels) * 6, draw(5, rows, dim)
    q, k, v = (DenseMatrix(draw(heads * dim, channels)) for heads in (5, 1, 1))
    output, gate, up = (
        DenseMatrix(draw(*shape)) for shape in ((channels, 5 * dim), (inner, channels), (inner, channels))
    )
    down = DenseMatrix(draw(channels, inner))
    layer = RowLayer(LayerWeights(norm, q, k, v, output, norm, gate, up, down, dim, rotated=False))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            own = hidden.clone()
            layer.finish(own, attended)
            results.append((*layer.project(hidden, hidden, hidden), own, head(hidden, norm, gate)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[0], other))


def test_models_of_other_shapes_keep_their_modules(tmp_path):
    for family in ("gemma", "phi3", "mixtral", "granite"):
        assert family in CONFIGS
        folder = tmp_path / family
        folder.mkdir()
        assert load_model(make_checkpoint(family, folder), dtype=torch.float32).runner.llama is None


def test_weights_that_the_kernels_cannot_read_are_left_to_torch():
    def product(weight, bias=None, dtype=torch.float32):
        return DenseMatrix(weight, bias).native(dtype)

    assert product(torch.zeros(4, 4)) is not None
    assert product(torch.zeros(4, 4), torch.zeros(4)) is not None
    assert product(torch.zeros(4, 4).T[:3]) is None
    assert product(torch.zeros(4, 4), torch.zeros(4, dtype=torch.bfloat16)) is None
    assert product(torch.zeros(4, 4), dtype=torch.bfloat16) is None
    assert product(torch.zeros(4, 4, dtype=torch.float16), dtype=torch.float16) is None
    assert not serves_head(Norm(torch.zeros(4)[::2], 1e-5), DenseMatrix(torch.zeros(4, 2)))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_lie_together_in_the_order_of_a_step(tmp_path, monkeypatch, tied):
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    before = load_model(folder, dtype=torch.float32).runner
    monkeypatch.setattr(arena, "ARENA_BYTES", 1 << 17)
    after = load_model(folder, dtype=torch.float32).runner
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(part, stored[name]) for name, part in after.weights.items() if name in stored)

    def places(runner):
        layers = runner.llama.weights.layers
        return [part.weight.untyped_storage().data_ptr() for layer in layers for part in layer.matrices]

    assert len(set(places(before))) == 1 < len(set(places(after))) < len(places(after))
    addresses = [part.weight.data_ptr() for part in before.llama.weights.layers[0].matrices]
    assert addresses == sorted(addresses)
    assert (after.llama.weights.head is after.llama.weights.embedding) == tied
    assert torch.equal(ran(after, 3, fused=True)[0], ran(before, 3, fused=True)[0])
