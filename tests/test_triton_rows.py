"""What layers do to rows between products, and rows into pages, on the device: under Triton's interpreter against
transformers' modules and torch's indexing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from saccade.kv import device
from saccade.kv.view import KVView
from saccade.models import attention, passes
from saccade.ops import row_passes
from saccade.ops.triton.rows import add_norm, gated, rotate

DTYPES = [torch.float32, torch.float16]


def draw(*size, dtype=torch.float32, seed=0):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def agree(ours, theirs):
    if ours.dtype == torch.float16:
        # Square roots and exponentials of another library move a value over a rounding edge now and then.
        assert float((ours != theirs).float().mean()) < 5e-3
    torch.testing.assert_close(ours, theirs, rtol=2e-3 if ours.dtype == torch.float16 else 1e-5, atol=1e-5)


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
    far = torch.tensor([-6e4, -200.0, -80.0, 0.0, 80.0, 6e4], dtype=dtype)
    agree(gated(far.clone(), torch.ones_like(far)), ACT2FN["silu"](far))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "turned"), [(6, 2, 80, 80), (20, 3, 64, 32)])
def test_rotations_agree_with_the_function(dtype, rows, heads, kv_heads, head_dim, turned):
    both = draw(rows, heads + kv_heads, head_dim, dtype=dtype)  # as a product of joined weights leaves them
    q, k = both[:, :heads], both[:, heads:]
    angles = torch.outer(torch.arange(float(rows)), 0.3 ** torch.arange(turned // 2)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = [part.transpose(0, 1)[None].clone() for part in (q, k)]
    turn = [part[..., :turned] for part in wanted]
    for part, done in zip(wanted, apply_rotary_pos_emb(*turn, cos[None], sin[None])):
        part[..., :turned] = done
    rotate(q, k, cos, sin)
    agree(q, wanted[0][0].transpose(0, 1))
    agree(k, wanted[1][0].transpose(0, 1))
    alone = draw(rows, heads + kv_heads, head_dim, dtype=dtype)[:, :heads]
    rotate(alone, None, cos, sin)
    assert torch.equal(alone, q)


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize(("start", "count"), [(0, 96), (5, 3), (31, 2), (17, 90), (64, 32)])
def test_rows_go_into_pages_and_come_out_again(page, start, count):
    plain = draw(2, 2, 160, 80)
    stored = KVView.from_tensors(*plain, block_size=page, shuffle_seed=1)
    k, v = draw(count, 4, 80, seed=2).transpose(0, 1).split(2)  # heads of a row one after another
    before = stored.k_pool.clone(), stored.v_pool.clone()
    stored.write(start, k, v)
    wanted = stored.k_pool.clone(), stored.v_pool.clone()
    stored.k_pool.copy_(before[0])
    stored.v_pool.copy_(before[1])
    device.store((stored.k_pool, stored.v_pool), stored.table, start, (k, v))
    assert torch.equal(stored.k_pool, wanted[0])
    assert torch.equal(stored.v_pool, wanted[1])
    out = device.gather(stored.v_pool, stored.table, start, start + count)
    assert out.is_contiguous()
    assert torch.equal(out, v)


def small(kind):
    torch.manual_seed(0)
    config = kind.config_class(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_act="silu",
        attn_implementation=attention.ATTENTION_NAME,
    )
    attention.register()
    model = kind(config).eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


class _Causal:
    """An attention context of plain causal attention over the rows at hand."""

    def attend(self, layer, q, k, v, spec):
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=spec.scale, enable_gqa=True
        )
        return out[0]


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen3ForCausalLM])
@pytest.mark.parametrize("rows", [2, 70])
@torch.no_grad()
def test_layers_on_the_device_agree_with_the_modules(kind, rows, monkeypatch):
    model = small(kind)
    decoder, positions = model.get_decoder(), torch.arange(rows)[None]
    first = draw(1, rows, 64)

    def run():
        hidden = first.clone()
        pair = decoder.rotary_emb(hidden, positions)
        for layer in decoder.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=pair, saccade=_Causal())
        return decoder.norm(hidden)

    wanted = run()
    passes.install(model, SimpleNamespace(family=model.config.model_type, windows=(None, None)))
    called = []
    monkeypatch.setattr(row_passes, "_on_gpu", lambda x: called.append(x.shape) or True)
    torch.testing.assert_close(run(), wanted, rtol=1e-4, atol=1e-4)
    assert called
    passes.remove(model)
    called.clear()
    assert torch.equal(run(), wanted)
    assert not called
