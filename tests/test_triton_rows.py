"""What layers do to rows between products, and rows into pages, on the device: under Triton's interpreter against
transformers' modules and torch's indexing."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from covering import covered
from kv_helpers import view_with_heads_apart
from module_oracle import with_modules
from tiny_models import make_checkpoint, random_ids
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from saccade.kv.view import KVView
from saccade.models.interface import Segment
from saccade.models.llama import LlamaDecoder
from saccade.models.loader import load_model
from saccade.ops.layer_weights import HeadNorms
from saccade.ops.row_passes import _torch_turn
from saccade.ops.triton import pages
from saccade.ops.triton import rows as triton_rows
from saccade.ops.triton.rows import add_norm, gated, rotate, turn

DTYPES = [torch.float32, torch.float16]


def draw(*size, dtype=torch.float32, seed=0):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def agree(ours, theirs):
    if ours.dtype == torch.float16:
        # Square roots and exponentials of another library move a value over a rounding edge now and then.
        assert float((ours != theirs).float().mean()) < 5e-3
    torch.testing.assert_close(ours, theirs, rtol=2e-3 if ours.dtype == torch.float16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 128), (67, 80), (5, 12)])
def test_turns_are_those_of_torch_to_the_bit(dtype, rows, head_dim):
    base = draw(rows, 3, head_dim, dtype=dtype)
    for balance in (None, draw(3, head_dim, seed=1)):
        x = base.clone().transpose(0, 1)
        wide = x.float() if balance is None else x.float() * balance[:, None]
        wanted = _torch_turn(wide).to(dtype)
        turn(x, balance)
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "channels"), [(1, 208), (7, 2100), (300, 24), (130, 64)])
@torch.no_grad()
def test_norms_agree_with_the_module(dtype, rows, channels):
    norm = LlamaRMSNorm(channels, eps=1e-5)
    norm.weight.copy_(draw(channels, seed=1))
    norm.to(dtype)
    x, other = draw(rows, 2 * channels, dtype=dtype)[:, :channels], draw(rows, channels, dtype=dtype, seed=2)
    agree(add_norm(x, None, norm.weight, 1e-5), norm(x))
    total = x + other
    agree(add_norm(x, other, norm.weight, 1e-5), norm(total))
    assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations_agree_with_the_function(dtype):
    gate, up = 5 * draw(77, 48, dtype=dtype), draw(77, 48, dtype=dtype, seed=1)
    wanted = ACT2FN["silu"](gate) * up
    agree(gated(gate, up), wanted)
    assert torch.equal(gate, gated(draw(77, 48, dtype=dtype) * 5, up))  # written over what it was given
    far = torch.tensor([-6e4, -200.0, -80.0, 0.0, 80.0, 6e4], dtype=dtype)[None]
    agree(gated(far.clone(), torch.ones_like(far)), ACT2FN["silu"](far))


@covered(
    {
        "dtype": DTYPES,
        "rows": [3, 70],
        ("heads", "kv_heads", "head_dim", "turned", "normed"): [
            (6, 2, 80, 80, False), (20, 3, 64, 32, False), (6, 2, 80, 80, True), (20, 3, 64, 64, True),
        ],
    }
)  # fmt: skip
@torch.no_grad()
def test_rotations_agree_with_the_function(dtype, rows, heads, kv_heads, head_dim, turned, normed):
    both = draw(rows, heads + kv_heads, head_dim, dtype=dtype)  # as a product of joined weights leaves them
    q, k = both[:, :heads], both[:, heads:]
    angles = torch.outer(torch.arange(float(rows)), 0.3 ** torch.arange(turned // 2)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms, wanted = None, [q.clone(), k.clone()]
    if normed:
        modules = [LlamaRMSNorm(head_dim, eps=1e-5), LlamaRMSNorm(head_dim, eps=1e-5)]
        for seed, module in enumerate(modules):
            module.weight.copy_(draw(head_dim, seed=seed))
            module.to(dtype)
        norms = HeadNorms(modules[0].weight, modules[1].weight, 1e-5)
        wanted = [module(part) for module, part in zip(modules, wanted)]
    wanted = [part.transpose(0, 1)[None] for part in wanted]
    turn = apply_rotary_pos_emb(*(part[..., :turned] for part in wanted), cos[None], sin[None])
    for part, done in zip(wanted, turn):
        part[..., :turned] = done
    rotate(q, k, cos, sin, norms)
    agree(q, wanted[0][0].transpose(0, 1))
    agree(k, wanted[1][0].transpose(0, 1))
    alone = draw(rows, heads + kv_heads, head_dim, dtype=dtype)[:, :heads]
    rotate(alone, None, cos, sin, norms)
    assert torch.equal(alone, q)


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize(("start", "count"), [(0, 96), (5, 3), (31, 2), (17, 90), (64, 32)])
@pytest.mark.parametrize("make", [KVView.from_tensors, view_with_heads_apart])
def test_rows_go_into_pages_and_come_out_again(page, start, count, make):
    plain = draw(2, 2, 160, 80)
    view, expected = (make(*plain, block_size=page, shuffle_seed=1) for _ in range(2))
    k, v = draw(count, 4, 80, seed=2).transpose(0, 1).split(2)  # heads of a row one after another
    expected.write(start, k, v)
    paged, wanted = view.paged(), expected.paged()
    pages.store(paged, start, k, v)
    for ours, theirs in ((paged.k, wanted.k), (paged.v, wanted.v)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    out = pages.gather(paged.v, paged.block_table, start, start + count)
    assert out.is_contiguous()
    assert torch.equal(out, v)


class _Causal:
    """An attention context of plain causal attention over the rows at hand."""

    def run(self, layer, q, k, v, spec):
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=spec.scale, enable_gqa=True
        )
        return out[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
@pytest.mark.parametrize("rows", [2, 70])
def test_layers_on_the_device_agree_with_the_modules(family, rows, tmp_path):
    """The passes that a prefill on a GPU takes."""
    runner = with_modules(load_model(make_checkpoint(family, tmp_path)).runner)
    decoder = LlamaDecoder(runner.llama.weights, triton_rows)
    ids, segments = torch.tensor(random_ids(rows, seed=1)), [Segment(0, rows, rows)]
    logits = []
    for runner.llama in (decoder, None):
        logits.append(runner.run(ids, torch.arange(rows), _Causal(), segments=segments, logit_rows=torch.arange(rows)))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
