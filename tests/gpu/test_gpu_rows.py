"""Row passes and paging on a GPU: against transformers' modules in bfloat16, against torch's indexing to the bit."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, tokens
from gpu_helpers import data
from module_oracle import with_modules
from tiny_models import make_checkpoint, random_ids
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from saccade import LLM
from saccade.ops.layer_weights import HeadNorms
from saccade.ops.row_passes import _torch_turn
from saccade.ops.triton import pages
from saccade.ops.triton.rows import add_norm, gated, rotate, turn


def draw(*size, seed=0, dtype=torch.bfloat16):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to("cuda", dtype)


def agree(ours, theirs):
    """Equal but for values at a rounding edge, which another order of a sum or another exponential moves over it."""
    assert torch.isfinite(ours).all()
    assert float((ours != theirs).float().mean()) < 1e-2
    torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=1e-3)


@pytest.mark.parametrize(("rows", "channels"), [(1, 4096), (777, 4096), (300, 128), (33, 2880), (65, 14336)])
@torch.no_grad()
def test_norms(rows, channels):
    norm = LlamaRMSNorm(channels, eps=1e-5).to("cuda", torch.bfloat16)
    norm.weight.copy_(draw(channels, seed=1))
    x, other = draw(rows, channels), draw(rows, channels, seed=2)
    agree(add_norm(x, None, norm.weight, 1e-5), norm(x))
    total = x + other
    agree(add_norm(x, other, norm.weight, 1e-5), norm(total))
    assert torch.equal(x, total)


@pytest.mark.parametrize(("rows", "head_dim"), [(1, 128), (8, 64), (700, 80), (300, 256)])
def test_turns(rows, head_dim):
    base = draw(rows, 3, head_dim)
    for balance in (None, draw(3, head_dim, seed=1, dtype=torch.float32)):
        x = base.clone().transpose(0, 1)
        wide = x.float() if balance is None else x.float() * balance[:, None]
        wanted = _torch_turn(wide).to(x.dtype)
        turn(x, balance)
        agree(x, wanted)


@pytest.mark.parametrize("rows", [1, 500])
def test_gates(rows):
    gate, up = draw(rows, 14336), draw(rows, 14336, seed=1)
    wanted = ACT2FN["silu"](gate) * up
    agree(gated(gate, up), wanted)


@pytest.mark.parametrize("rows", [3, 900])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "turned"), [(32, 8, 128, 128), (14, 2, 80, 80), (5, 1, 64, 32)]
)
def test_rotations(rows, heads, kv_heads, head_dim, turned):
    q, k, cos, sin = heads_of(rows, heads, kv_heads, head_dim, turned)
    wanted = turned_by_torch(q, k, cos, sin)
    rotate(q, k, cos, sin)
    torch.testing.assert_close(q, wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(k, wanted[1], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [3, 900])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 80)])
@torch.no_grad()
def test_rotations_of_normed_heads(rows, heads, kv_heads, head_dim):
    q, k, cos, sin = heads_of(rows, heads, kv_heads, head_dim, head_dim)
    modules = [LlamaRMSNorm(head_dim, eps=1e-6).to("cuda", torch.bfloat16) for _ in range(2)]
    for seed, module in enumerate(modules):
        module.weight.copy_(draw(head_dim, seed=seed))
    wanted = turned_by_torch(modules[0](q), modules[1](k), cos, sin)
    rotate(q, k, cos, sin, HeadNorms(modules[0].weight, modules[1].weight, 1e-6))
    for ours, theirs in zip((q, k), wanted):
        assert float((ours != theirs).float().mean()) < 1e-2
        torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=4e-2)


def heads_of(rows, heads, kv_heads, head_dim, turned):
    """Queries and keys as parts of one product's output, and their factors."""
    both = draw(rows, heads + kv_heads, head_dim)
    angles = torch.outer(torch.arange(float(rows)), 0.3 ** torch.arange(turned // 2)).repeat(1, 2)
    factors = (part.to("cuda", torch.bfloat16) for part in (angles.cos(), angles.sin()))
    return both[:, :heads], both[:, heads:], *factors


def turned_by_torch(q, k, cos, sin):
    wanted = [part.transpose(0, 1)[None].clone() for part in (q, k)]
    turned = cos.shape[-1]
    for part, done in zip(wanted, apply_rotary_pos_emb(*(part[..., :turned] for part in wanted), cos[None], sin[None])):
        part[..., :turned] = done
    return [part[0].transpose(0, 1) for part in wanted]


@pytest.mark.parametrize(("start", "count"), [(0, 1000), (5, 3), (31, 2), (17, 800)])
@pytest.mark.parametrize("head_dim", [128, 80])
def test_pages(start, count, head_dim):
    _, k, v, view, _ = data(8, 4, 8, 1000, head_dim)
    new_k, new_v = draw(count, 8, head_dim, seed=2).transpose(0, 1).split(4)
    view.write(start, new_k, new_v)
    k[:, start : start + count], v[:, start : start + count] = new_k, new_v
    for _ in range(5):
        assert torch.equal(view.keys(), k)
        assert torch.equal(view.values(3, 999), v[:, 3:999])
    assert torch.equal(pages.gather(view.paged().v, view.paged().block_table, start, start + count), new_v)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_answers_as_its_modules_do(family, tmp_path_factory):
    folder = make_checkpoint(family, tmp_path_factory.mktemp(family), max_position_embeddings=2048, head_dim=32)
    engine = LLM(folder, kv_memory="64MiB", prefill_chunk=256, device="cuda", enable_prefix_caching=False)
    prompt = random_ids(700, seed=7)
    fast = tokens(engine.generate(prompt, GREEDY, policy="dense")[0])
    with_modules(engine.model.runner).llama = None  # transformers' modules run the layers of prefill
    assert tokens(engine.generate(prompt, GREEDY, policy="dense")[0]) == fast
