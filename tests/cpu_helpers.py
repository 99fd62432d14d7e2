"""Problems for the C++ kernels, and what it means to agree with the reference."""

import math

import torch

from saccade.kv.view import KVView
from saccade.ops import Call, cpu, reference
from saccade.selection import Blocks


def problem(shape, head_dim, dtype, page=32, seed=0):
    """A query [H, Tq, d], and K, V paged in shuffled order; KVView.from_tensors fills unwritten rows with NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator)

    k = draw(shape.kv_heads, shape.k_len, head_dim)
    v = draw(shape.kv_heads, shape.k_len, head_dim)
    q = draw(shape.heads, shape.q_len, head_dim)
    # A strong key per row makes weights uneven, as they are in models: flat weights would hide a wrong key.
    rows = torch.randint(0, shape.q_start + 1, (shape.q_len,), generator=generator)
    q = q + k[:, rows].repeat_interleave(shape.group, 0)
    view = KVView.from_tensors(k.to(dtype), v.to(dtype), block_size=page, shuffle_seed=seed)
    return q.to(dtype), view


def random_blocks(shape, block_size, units, density=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q_blocks = (shape.q_start + shape.q_len - 1) // block_size - shape.q_start // block_size + 1
    k_blocks = -(-shape.k_len // block_size)
    return Blocks.from_block_mask(
        shape, block_size, torch.rand(units, q_blocks, k_blocks, generator=generator) < density
    )


def attend_cpu(q, view, selection, *, scale, softcap=None, threads=None):
    """The C++ kernels' (out, lse), whatever :func:`saccade.ops.run` would choose."""
    return cpu.attend(Call(q, view, selection, scale, softcap, threads))[:2]


def compare(q, view, selection, scale=None, softcap=None, **options):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    assert cpu.serves(q, view, selection) is None
    out, lse = attend_cpu(q, view, selection, scale=scale, softcap=softcap, **options)
    expected, expected_lse = reference.attend(q.double(), view, selection, scale=scale, softcap=softcap)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert not out.isnan().any()
    assert not lse.isnan().any()
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (out[empty] == 0).all()
    error = (out.double() - expected).abs()
    lse_error = (lse.double() - expected_lse)[~empty].abs()
    if q.dtype == torch.float32:
        assert float(error.max()) < 1e-5
        assert bool((lse_error <= 1e-5 + 1e-6 * expected_lse[~empty].abs()).all())
    else:
        assert float((error - 2e-2 * expected.abs()).max()) < 1e-2
        assert float(error.norm() / expected.norm().clamp(min=1e-9)) < 1e-2
        assert bool((lse_error <= 1e-4 + 1e-5 * expected_lse[~empty].abs()).all())
    return out, lse
