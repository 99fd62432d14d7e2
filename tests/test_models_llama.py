"""The decoder of the Llama shape against transformers' modules, in float32: every family of the shape, many rows, few
rows, frozen rows, rows whose queries are wanted ahead."""

from __future__ import annotations

import pytest
import torch
from dense_store import DenseStore, run_packed
from module_oracle import with_modules
from safetensors.torch import load_file
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade.models.families import FAMILIES
from saccade.models.interface import AheadRows, FrozenRows, InputRows, Segment
from saccade.models.llama_kernels import ProductLayer
from saccade.models.llama_weights import NamedTensors, read_weights
from saccade.models.loader import load_model
from saccade.ops import cpu, matrices
from saccade.ops.layer_rows import RowLayer

SHAPED = [name for name, family in FAMILIES.items() if family.llama_shape is not None]
CLOSE = {"rtol": 1e-4, "atol": 5e-5}
# What fills the kernels' vectors, and what does not, so that torch takes its place between the products.
SIZES = {"vectors": {"hidden_size": 64, "head_dim": 32}, "odd": {"hidden_size": 40, "head_dim": 10}}


@pytest.fixture(scope="module", params=[(family, size) for family in SHAPED for size in SIZES], ids="-".join)
def runner(request, tmp_path_factory):
    family, size = request.param
    folder = make_checkpoint(family, tmp_path_factory.mktemp(family), **SIZES[size])
    return with_modules(load_model(folder).runner)


class Causal:
    """Causal attention of the live rows among themselves; keeps all that it is handed."""

    def __init__(self) -> None:
        self.attended: list[tuple] = []
        self.stored: list[tuple] = []

    def run(self, layer, q, k, v, spec):
        self.attended.append((layer, spec, q.clone(), k.clone(), v.clone()))
        return torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=spec.scale, enable_gqa=True
        )[0]

    def store(self, layer, k, v):
        self.stored.append((layer, k.clone(), v.clone()))


def both(runner, monkeypatch, run):
    """What ``run`` gives by the decoder and by the modules."""
    assert runner.llama is not None
    ours = run()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "llama", None)
        return ours, run()


def same(ours, theirs):
    """Equal layer numbers and wishes, close tensors."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        for a, b in zip(one, other, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, **CLOSE)
            else:
                assert a == b


def test_which_families_have_the_shape():
    assert SHAPED == ["llama", "mistral", "qwen2", "qwen3", "smollm3", "cwm"]


def test_prefill_and_decode_of_one_and_five_rows(runner, monkeypatch):
    names = ["a", "b", "c", "d", "e"]

    def run():
        store = DenseStore()
        many = {name: random_ids(18 + 3 * i, seed=i) for i, name in enumerate(names)}
        out = [run_packed(runner, store, many)]
        out.append(run_packed(runner, store, {"a": [7]}))
        out.append(run_packed(runner, store, {name: [9 + i] for i, name in enumerate(names)}))
        return [torch.cat(list(logits.values())) for logits in out]

    ours, theirs = both(runner, monkeypatch, run)
    assert [len(logits) for logits in ours] == [120, 1, 5]
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("rows", [7, 40])
def test_frozen_rows_and_queries_ahead(runner, monkeypatch, rows):
    layers = runner.spec.layers
    first = torch.full((rows,), layers)
    first[2 : rows // 2] = 1
    first[rows // 2 : rows // 2 + 2] = 2
    projected = torch.arange(rows) % 2 == 0
    wanted = torch.tensor([0, rows - 1])

    def run():
        context, ahead, inputs = Causal(), [], []
        logits = runner.run(
            torch.tensor(random_ids(rows, seed=1)),
            torch.arange(rows),
            context,
            segments=[Segment(0, rows, rows)],
            logit_rows=torch.arange(rows),
            frozen=FrozenRows(first, projected),
            ahead=AheadRows(wanted, lambda layer, q: ahead.append((layer, q.clone()))),
            inputs=InputRows(wanted, lambda layer, hidden: inputs.append((layer, hidden.clone()))),
        )
        return logits, context, ahead, inputs

    (logits, context, ahead, inputs), (wished, other, theirs, taken_in) = both(runner, monkeypatch, run)
    torch.testing.assert_close(logits, wished, **CLOSE)
    same(context.attended, other.attended)
    same(context.stored, other.stored)
    same(ahead, theirs)
    same(inputs, taken_in)
    assert [layer for layer, _ in inputs] == list(range(layers))
    torch.testing.assert_close(inputs[0][1], runner.embed(torch.tensor(random_ids(rows, seed=1))[wanted]))
    assert [k.shape[1] for _, k, _ in context.stored] == [int((projected & (first <= 1 + i)).sum()) for i in range(2)]
    assert [layer for layer, _ in ahead] == [1, 2]


def test_a_layer_all_of_whose_rows_are_frozen(runner, monkeypatch):
    def run():
        context = Causal()
        logits = runner.run(
            torch.arange(20),
            torch.arange(20),
            context,
            segments=[Segment(0, 20, 20)],
            logit_rows=torch.tensor([19, 0]),
            frozen=FrozenRows(torch.full((20,), 2), torch.zeros(20, dtype=torch.bool)),
        )
        return logits, context

    (logits, context), (wished, other) = both(runner, monkeypatch, run)
    torch.testing.assert_close(logits, wished, **CLOSE)
    assert [layer for layer, *_ in context.attended] == [0, 1] == [layer for layer, *_ in other.attended]
    assert [tuple(k.shape) for _, k, _ in context.stored] == [(runner.spec.kv_heads, 0, runner.spec.head_dim)]


@pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
def test_few_rows_have_kernels_of_their_own(runner):
    kinds = [type(runner.llama.kernels(rows).layers[0]) for rows in (0, 1, 16, 17)]
    assert kinds == [ProductLayer, RowLayer, RowLayer, ProductLayer]


def test_a_stopwatch_times_all_but_attention(runner):
    seen = []

    class Watch:
        def begin(self, name):
            seen.append(name)

        def end(self):
            seen.append("end")

    wanted = run_packed(runner, DenseStore(), {"a": [1, 2]})["a"]
    runner.watch(Watch())
    try:
        assert torch.equal(run_packed(runner, DenseStore(), {"a": [1, 2]})["a"], wanted)
    finally:
        runner.watch(None)
    assert seen == ["linear", "end"] * (2 * runner.spec.layers + 1)
    run_packed(runner, DenseStore(), {"a": [1, 2]})
    assert len(seen) == 4 * runner.spec.layers + 2


def test_joined_projections_are_the_matrices_side_by_side(tmp_path):
    """One matrix holds query, key and value, which are parts of it."""
    folder = make_checkpoint("qwen2", tmp_path)
    runner = load_model(folder).runner
    stored = load_file(folder / "model.safetensors")
    weights = read_weights(runner.model, NamedTensors(stored), join=True)
    for index, layer in enumerate(weights.layers):
        names = [f"model.layers.{index}.self_attn.{part}_proj" for part in "qkv"]
        assert torch.equal(layer.joined.weight, torch.cat([stored[f"{name}.weight"] for name in names]))
        assert torch.equal(layer.joined.bias, torch.cat([stored[f"{name}.bias"] for name in names]))
        where = layer.joined.weight.untyped_storage().data_ptr()
        assert [part.weight.untyped_storage().data_ptr() for part in layer.matrices[:3]] == [where] * 3
    named = weights.named()
    assert named.keys() == runner.model.state_dict().keys()
    assert all(torch.equal(named[name], part) for name, part in stored.items())


def test_another_activation_is_left_to_the_modules(tmp_path):
    assert load_model(make_checkpoint("llama", tmp_path, hidden_act="gelu")).runner.llama is None


def test_bfloat16_products_meet_few_numbers_of_rows(monkeypatch):
    """torch keeps megabytes for each, for good."""
    met = set()

    def linear(x, weight, bias):
        met.add(x.shape[0])
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(matrices, "linear", linear)
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(*size, generator=generator).bfloat16() for size in ((24, 16), (24,)))
    matrix = matrices.DenseMatrix(weight, bias)
    x = torch.randn(4096, 16, generator=generator).bfloat16()
    want = torch.nn.functional.linear(x.double(), matrix.weight.double(), matrix.bias.double())
    for rows in range(1, 4097, 5):
        out = matrix.product(x[:rows])
        assert out.shape == (rows, 24)
        torch.testing.assert_close(out.double(), want[:rows], atol=5e-2, rtol=2e-2)
    assert len(met) <= 8 * 12
    assert all(matrices.padded_rows(rows) <= rows * 1.125 for rows in range(1, 5000))
