"""The C++ kernels of layers that keep a state, for every instruction set here, against float64 and against
transformers' functions: ragged rows, views with strides, slots in no order, states where they lie."""

from __future__ import annotations

import pytest
import torch
from keeping_helpers import convolution, delta_inputs, delta_rule, state_space
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from saccade.ops import cpu, cpu_keeping, cpu_modules, norming
from saccade.ops.matrices import DenseMatrix
from saccade.ops.slots import NewRows, Slots

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernels are not built")
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}
STATE = {"atol": 3e-5, "rtol": 3e-5}


@pytest.fixture(params=cpu.supported_isas())
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


def slots_of(shape, sequences, dtype=torch.float32):
    """Slots in no order, of a pool twice as large, in the midst of a tensor of several layers."""
    rng = torch.Generator().manual_seed(7)
    pool = torch.randn(3, 2 * sequences + 1, *shape, generator=rng).to(dtype)
    where = torch.randperm(2 * sequences + 1, generator=rng)[:sequences].contiguous()
    return Slots(pool[1], where, where), pool


def only_own_changed(before, pool, slots):
    kept = torch.ones(before.shape[:2], dtype=torch.bool)
    kept[1, slots.writes] = False
    assert torch.equal(before[kept], pool[kept])


def split(parts):
    """``parts`` as views into one wider tensor, as a projection's parts are."""
    first, flat = parts[0], [one.flatten(2) for one in parts]
    wide = torch.cat([torch.zeros_like(flat[0][..., :3]), *flat], -1)
    views = wide[..., 3:].split([one.shape[-1] for one in flat], -1)
    assert not views[0].is_contiguous() or first.shape[1] == 1
    return [view.view(one.shape) for view, one in zip(views, parts)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 37, 64, 150])
@pytest.mark.parametrize(
    ("taps", "kept", "bias", "silu"),
    [(4, 4, False, True), (3, 3, True, False), (2, 4, True, True), (5, 4, False, True)],
)
def test_convolutions(isa, tokens, taps, kept, bias, silu, dtype):
    sequences, channels = 3, 600 if tokens < 3 else 77
    rng = torch.Generator().manual_seed(tokens)
    rows = torch.randn(sequences, tokens, channels + 5, generator=rng).to(dtype)[..., 2 : channels + 2].transpose(1, 2)
    weight = torch.randn(channels, taps, generator=rng).to(dtype)
    bias = torch.randn(channels, generator=rng).to(dtype) if bias else None
    slots, pool = slots_of((channels, kept), sequences, dtype)
    before = pool.clone()
    out = cpu_keeping.convolve(NewRows(rows, slots), weight, bias, silu)
    expected, after = convolution(rows, before[1][slots.reads], weight, bias, silu)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **CLOSE[dtype])
    torch.testing.assert_close(pool[1][slots.writes].double(), after, atol=0, rtol=0)
    only_own_changed(before, pool, slots)
    if taps == kept + 1:
        return
    theirs = qwen.causal_conv1d_update(rows, before[1][slots.reads], weight, bias, "silu" if silu else None)
    torch.testing.assert_close(out, theirs, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "alike"), [(1, False), (3, False), (4, False), (63, True), (130, False), (130, True)]
)
@pytest.mark.parametrize(
    ("sequences", "key_heads", "heads", "d_k", "d_v"), [(1, 2, 4, 24, 72), (3, 2, 2, 13, 7), (2, 1, 3, 16, 150)]
)
def test_delta_rule(isa, tokens, alike, sequences, key_heads, heads, d_k, d_v, dtype):
    inputs = delta_inputs(sequences, tokens, key_heads, heads, d_k, d_v, dtype=dtype, alike=alike, seed=tokens)
    inputs[3][:, tokens // 2, 0] = -200.0  # forgets all
    inputs[3][:, -1, 1] = -float("inf")
    q, k, v = split(inputs[:3])
    slots, pool = slots_of((heads, d_k, d_v), sequences)
    before = pool.clone()
    normalize = tokens != 3
    if not normalize:
        k = k / 8
    out = cpu_keeping.delta_rule(q, k, v, *inputs[3:], slots, normalize)
    expected, after = delta_rule(q, k, v, *inputs[3:], before[1][slots.reads], normalize)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **CLOSE[dtype])
    torch.testing.assert_close(pool[1][slots.writes].double(), after, **STATE)
    only_own_changed(before, pool, slots)
    inputs[3][:, -1, 1] = -80.0  # their sums have no infinities
    q, k = (one.repeat_interleave(heads // key_heads, 2) for one in (q, k))  # which older versions leave to modules
    theirs, theirs_after = qwen.torch_chunk_gated_delta_rule(
        q, k, v, g=inputs[3], beta=inputs[4], initial_state=before[1][slots.reads], output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )  # fmt: skip
    close = {"atol": 1e-3, "rtol": 1e-3} if alike else CLOSE[dtype]
    torch.testing.assert_close(out, theirs, **(CLOSE[dtype] if dtype == torch.bfloat16 else close))
    torch.testing.assert_close(pool[1][slots.writes], theirs_after, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 64, 130])
@pytest.mark.parametrize(("heads", "head_dim", "groups", "size"), [(4, 24, 2, 16), (3, 40, 1, 20), (2, 5, 2, 70)])
def test_state_spaces(isa, tokens, heads, head_dim, groups, size, dtype):
    rng = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, heads, head_dim, generator=rng).to(dtype)
    dt = torch.randn(2, tokens, heads, generator=rng).to(dtype)
    b, c = torch.randn(2, 2, tokens, groups, size, generator=rng).to(dtype)
    a, d, bias = -4 * torch.rand(heads, generator=rng), *torch.randn(2, heads, generator=rng)
    dt[0, 0, 0] = 25.0  # as good as its own softplus
    dt[1, -1, 1] = -30.0
    x, b, c = split([x, b, c])
    limits, skip = ((0.3, 5.0), d) if tokens % 2 else ((0.0, float("inf")), None)
    slots, pool = slots_of((heads, head_dim, size), 2)
    before = pool.clone()
    out = cpu_keeping.state_space(x, dt, a, b, c, skip, bias, slots, softplus=True, limits=limits)
    times = torch.nn.functional.softplus(dt.double() + bias).clamp(*limits)
    expected, after = state_space(x, times, a, b, c, skip, before[1][slots.reads])
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **CLOSE[dtype])
    torch.testing.assert_close(pool[1][slots.writes].double(), after, **STATE)
    only_own_changed(before, pool, slots)
    if dtype == torch.float32:
        theirs, theirs_after = granite.mamba2_chunk_scan(
            x, dt, a, b, c, 16, D=skip, dt_bias=bias, initial_states=before[1][slots.reads], dt_softplus=True,
            dt_limit=limits, return_final_states=True,
        )  # fmt: skip
        torch.testing.assert_close(out, theirs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool[1][slots.writes], theirs_after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "groups"), [(128, 1), (60, 3), (5, 1)])
@pytest.mark.parametrize("gate", ["none", "first", "last"])
def test_norms(isa, channels, groups, gate, dtype):
    rng = torch.Generator().manual_seed(channels)
    x, z = (one[..., 3:] for one in torch.randn(2, 2, 350, channels + 3, generator=rng).to(dtype))
    weight = torch.randn(channels, generator=rng).to(dtype)
    values, gates, weights = x.double(), torch.nn.functional.silu(z.double()), weight.double()
    for kind in (norming.ROUNDED, norming.PLUS_ONE, norming.WHOLE):
        normed = (values * gates if gate == "first" else values).unflatten(-1, (groups, -1))
        normed = (normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)
        expected = normed * (1 + weights if kind == norming.PLUS_ONE else weights)
        expected = expected * gates if gate == "last" else expected
        how = norming.Norming(kind, gate == "first", groups)
        out = cpu_modules.norm(x, weight, 1e-6, how, None if gate == "none" else z)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_few_rows(isa, dtype):
    weight, bias = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype)
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, 50).to(dtype)[:, 2:]
        for own in (None, bias):
            matrix = DenseMatrix(weight, own)
            expected = x.double() @ weight.double().T + (0 if own is None else own.double())
            torch.testing.assert_close(cpu_modules.product(x, matrix).double(), expected, **CLOSE[dtype])
        made = x.double() @ weight.double().T
        inner = torch.nn.functional.silu(made) * (made + bias.double())
        out = cpu_modules.gated(x, DenseMatrix(weight), DenseMatrix(weight, bias))
        torch.testing.assert_close(out.double(), inner, atol=8 * CLOSE[dtype]["atol"], rtol=8 * CLOSE[dtype]["rtol"])


def test_a_result_does_not_depend_on_the_threads():
    inputs = delta_inputs(2, 70, 2, 4, 24, 40)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        slots, pool = slots_of((4, 24, 40), 2)
        results.append((cpu_keeping.delta_rule(*inputs, slots, True), pool))
    torch.set_num_threads(1)
    assert all(map(torch.equal, *results))


def test_slots_that_are_none_and_shapes_that_do_not_fit_are_refused():
    inputs = delta_inputs(1, 2, 1, 2, 8, 8)
    where, pool = torch.tensor([3]), torch.zeros(3, 2, 8, 8)
    with pytest.raises(ValueError, match="slot 3 is none of the 3"):
        cpu_keeping.delta_rule(*inputs, Slots(pool, where, where))
    own = torch.tensor([1])
    with pytest.raises(ValueError, match=r"states must be float32 \[2, 8, 8\]"):
        cpu_keeping.delta_rule(*inputs, Slots(pool[..., :4], own, own))
    with pytest.raises(ValueError, match="one tensor"):
        cpu_keeping.delta_rule(*inputs, Slots(pool, own, own.clone()))
    with pytest.raises(ValueError, match="7 taps reach behind"):
        cpu_keeping.convolve(
            NewRows(torch.zeros(1, 4, 2), Slots(torch.zeros(3, 4, 4), own, own)), torch.zeros(4, 7), None, False
        )
