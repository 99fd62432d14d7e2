"""One pass over rows where transformers' modules take several: the same values, to the last bit in bfloat16."""

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from saccade.ops import cpu, row_passes
from saccade.ops.layer_weights import HeadNorms

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")

ISAS = cpu.supported_isas()
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _restore_isa():
    yield
    cpu.set_isa(None)


def draw(*size, dtype, seed=0):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def agree(ours, theirs):
    if ours.dtype == torch.bfloat16:
        # torch's own vectors round exponentials and square roots another way once in thousands of values.
        assert float((ours != theirs).float().mean()) < 5e-3
    torch.testing.assert_close(ours, theirs, rtol=1.6e-2 if ours.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 300])
@torch.no_grad()
def test_norms_agree_with_the_module(isa, dtype, rows):
    cpu.set_isa(isa)
    norm = LlamaRMSNorm(208, eps=1e-5)
    norm.weight.copy_(draw(208, dtype=torch.float32, seed=1))
    norm.to(dtype)
    x, other = draw(rows, 208, dtype=dtype), draw(rows, 208, dtype=dtype, seed=2)
    agree(row_passes.add_norm(x, None, norm.weight, 1e-5), norm(x))
    total = x + other
    agree(row_passes.add_norm(x, other, norm.weight, 1e-5), norm(total))
    assert torch.equal(x, total)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_gated_activations_agree_with_the_module(isa, dtype):
    cpu.set_isa(isa)
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48)).to(dtype)
    x = draw(77, 32, dtype=dtype)
    gate, up = 20 * mlp.gate_proj(x), mlp.up_proj(x)
    wanted = mlp.act_fn(gate) * up
    agree(row_passes.gated(gate[:, :48], up), wanted)
    far = torch.tensor([[-1e4, -200.0, -80.0, 0.0, 80.0, 1e4, 3e38, -2e38] * 2], dtype=dtype)
    torch.testing.assert_close(row_passes.gated(far.clone(), torch.ones_like(far)), mlp.act_fn(far))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [32, 40, 64])  # halves of 20 fill no vectors: torch turns them
@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_rotations_agree_with_the_function(isa, dtype, turned, normed):
    cpu.set_isa(isa)
    both = draw(33, 5, 64, dtype=dtype)  # rows before heads, as projections leave them
    q, k = both[:, :3].contiguous(), both[:, 3:]
    angles = torch.outer(torch.arange(33.0), 0.3 ** torch.arange(turned // 2)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms, wanted = None, [q.clone(), k.clone()]
    if normed:
        modules = [LlamaRMSNorm(64, eps=1e-5), LlamaRMSNorm(64, eps=1e-5)]
        for seed, module in enumerate(modules):
            module.weight.copy_(draw(64, dtype=torch.float32, seed=seed))
            module.to(dtype)
        norms = HeadNorms(modules[0].weight, modules[1].weight, 1e-5)
        wanted = [module(part) for module, part in zip(modules, wanted)]
    wanted = [part.transpose(0, 1)[None] for part in wanted]
    turn = apply_rotary_pos_emb(*(part[..., :turned] for part in wanted), cos[None], sin[None])
    for part, done in zip(wanted, turn):
        part[..., :turned] = done
    row_passes.rotate(q, k, cos, sin, norms)
    agree(q, wanted[0][0].transpose(0, 1))
    agree(k, wanted[1][0].transpose(0, 1))


@torch.no_grad()
def test_rows_that_no_kernel_reads_run_in_torch():
    """Widths that fill no vectors and types without kernels: to the bit what the modules give."""
    for dtype, width in ((torch.float32, 24), (torch.float64, 32), (torch.float16, 32)):
        norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
        x, other = draw(5, width, dtype=dtype), draw(5, width, dtype=dtype, seed=1)
        total = x + other
        assert torch.equal(row_passes.add_norm(x, other, norm.weight, 1e-5), norm(total))
        assert torch.equal(x, total)
        assert torch.equal(row_passes.gated(x.clone(), other), torch.nn.functional.silu(x) * other)
