"""The gated delta rule's kernel against transformers' functions and a recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from saccade.models.keeping import _with_kernels
from saccade.ops import cpu, cpu_delta
from saccade.ops.cpu_delta import gated_delta_rule, on_cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernels are not built")


@pytest.fixture(params=cpu.supported_isas())
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


def exact(q, k, v, g, beta, state):
    """Float64, token by token."""
    q, k, v, g, beta, state = (one.double() for one in (q, k, v, g, beta, state))
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    q, k = (one.repeat_interleave(v.shape[2] // one.shape[2], 2) for one in (q, k))
    out = torch.empty_like(v)
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        told = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - told))[:, :, None]
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / q.shape[-1] ** 0.5
    return out, state


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sequences", "key_heads", "value_heads", "d_k", "d_v"), [(1, 2, 4, 24, 72), (3, 2, 2, 13, 7)])
def test_recurrence(isa, tokens, dtype, sequences, key_heads, value_heads, d_k, d_v):
    torch.manual_seed(tokens)
    q, k = (torch.randn(sequences, tokens, key_heads, d_k).to(dtype) for _ in range(2))
    v = torch.randn(sequences, tokens, value_heads, d_v).to(dtype)
    g = -torch.rand(sequences, tokens, value_heads) * torch.tensor([1e-4, 1.0, 20.0])[torch.arange(tokens) % 3][:, None]
    g[:, tokens // 2, 0] = -200.0  # forgets all
    beta = torch.rand(sequences, tokens, value_heads).to(dtype)
    state = torch.randn(sequences, value_heads, d_k, d_v)
    want, after = exact(q, k, v, g, beta, state)
    rule = theirs.torch_recurrent_gated_delta_rule if tokens == 1 else theirs.torch_chunk_gated_delta_rule
    asked = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    reference = rule(q, k, v, initial_state=state.clone(), **asked)
    own, own_state = gated_delta_rule(q, k, v, initial_state=state, **asked)
    assert own_state.data_ptr() == state.data_ptr()
    assert own.dtype == dtype
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(own.double(), want, rtol=close, atol=close)
    torch.testing.assert_close(own, reference[0], rtol=close, atol=close)
    torch.testing.assert_close(own_state.double(), after, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own_state, reference[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5])
def test_layers_of_ours_call_it_and_others_do_not(tokens, monkeypatch):
    config = Qwen3NextConfig(
        hidden_size=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
    )
    torch.manual_seed(0)
    module = theirs.Qwen3NextGatedDeltaNet(config, 0).eval()
    hidden = torch.randn(1, tokens, 16)
    calls = []

    def counted(*rest, **named):
        calls.append(1)
        return gated_delta_rule(*rest, **named)

    monkeypatch.setattr(cpu_delta, "gated_delta_rule", counted)
    with torch.inference_mode():
        want = module(hidden)
        assert not calls
        got = _with_kernels(module)(hidden_states=hidden)
    assert calls == [1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_the_kernel_has_not_is_left_to_the_reference():
    called = []
    rule = on_cpu(lambda *rest, **named: called.append(named) or "theirs")
    q, v, g = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
    assert rule(q, q, v, g=g, beta=g, cu_seqlens=torch.tensor([0, 1, 3])) == "theirs"
    assert rule(q.to("meta"), q, v, g=g, beta=g) == "theirs"
    assert len(called) == 2
    assert rule(q, q, v, g=g, beta=g, cu_seqlens=None)[0].shape == v.shape
    assert len(called) == 2
