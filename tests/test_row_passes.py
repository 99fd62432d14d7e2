"""One pass over rows where transformers' modules take several: the same values, to the last bit in bfloat16."""

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from saccade.ops import cpu, row_passes

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
    agree(row_passes.rms_norm(x, norm.weight, 1e-5), norm(x))
    total = x + other
    agree(row_passes.rms_norm(x, norm.weight, 1e-5, add=other), norm(total))
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
    agree(row_passes.silu_mul(gate[:, :48], up), wanted)
    far = torch.tensor([[-1e4, -200.0, -80.0, 0.0, 80.0, 1e4, 3e38, -2e38] * 2], dtype=dtype)
    torch.testing.assert_close(row_passes.silu_mul(far.clone(), torch.ones_like(far)), mlp.act_fn(far))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [32, 64])
def test_rotations_agree_with_the_function(isa, dtype, turned):
    cpu.set_isa(isa)
    q = draw(1, 33, 3, 64, dtype=dtype)  # rows before heads, as projections leave them
    angles = torch.outer(torch.arange(33.0), 0.3 ** torch.arange(turned // 2)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype)[None], angles.sin().to(dtype)[None]
    wanted = q.transpose(1, 2).clone()
    wanted[..., :turned], _ = apply_rotary_pos_emb(wanted[..., :turned], wanted[..., :turned], cos, sin)
    assert row_passes.rotates(q, cos)
    row_passes.rotate(q[0].transpose(0, 1), cos[0], sin[0])
    agree(q.transpose(1, 2), wanted)


def test_what_does_not_fit_is_left_to_torch():
    x = torch.zeros(4, 32)
    assert row_passes.fits(x, x[:, :16])
    assert not row_passes.fits(x, x.bfloat16())
    assert not row_passes.fits(x.double())
    assert not row_passes.fits(x.T)
    assert not row_passes.fits(torch.zeros(4, 24))
    assert not row_passes.rotates(x, torch.zeros(4, 16))
