"""Modules that our kernels take over give what they gave, and those that compute anything else are left alone: by the
C++ kernels, and by Triton's under its interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from covering import quick
from tiny_models import make_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from saccade.models.fused_modules import fuse
from saccade.ops import cpu, slotted


@pytest.fixture(autouse=True, params=["cpp", "triton"])
def device(request, monkeypatch):
    if request.param == "triton":
        monkeypatch.setattr(slotted, "on_host", lambda device: False)
    elif not cpu.available():
        pytest.skip("the kernels are not built")
    return request.param


def norms_of(model):
    return [one for one in model.modules() if "Norm" in type(one).__name__]


FAMILIES = ("qwen3_5_text", "granitemoehybrid", "lfm2", "olmo_hybrid", "falcon_h1")


@pytest.mark.parametrize("family", quick(FAMILIES, lambda one: one in FAMILIES[:2]))
def test_norms_and_mlps_give_what_they_gave(family, device, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(family, tmp_path), dtype=torch.float32).eval()
    rng, given, expected = torch.Generator().manual_seed(3), {}, {}
    with torch.inference_mode():
        for name, module in model.named_modules():
            mlp = "MLP" in type(module).__name__
            if "Norm" in type(module).__name__ or mlp:
                if not mlp:
                    module.weight.copy_(torch.randn(module.weight.shape, generator=rng))
                width = next(iter(module.parameters())).shape[-1]
                gated = 2 if "Gated" in type(module).__name__ else 1
                given[name] = torch.randn(gated, 2, 5, width, generator=rng).unbind(0)
                expected[name] = module(*given[name])
        assert fuse(model) == fuse(model) >= len(norms_of(model))
        assert all("forward" in vars(one) for one in norms_of(model))
        assert all("forward" in vars(one) for one in model.modules() if type(one).__name__.endswith("Attention"))
        for name, module in model.named_modules():
            if name in given:
                torch.testing.assert_close(module(*given[name]), expected[name], atol=1e-5, rtol=1e-5)


class HalvedNorm(nn.Module):
    """What no kernel computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        return 0.5 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class ScaledMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        return 0.9 * self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def test_others_are_left_alone(device):
    model = nn.Sequential(HalvedNorm(), ScaledMLP(), nn.LayerNorm(16))
    linears = 3 if device == "cpp" else 0  # Triton's products are of two bytes a value
    assert fuse(model) == linears
    assert not any("forward" in vars(one) for one in model)
