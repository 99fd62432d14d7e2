"""The gated delta rule on a CPU by the C++ kernel, of the meaning of transformers' torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.ops import cpu

_READ = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [sequences, tokens, value heads, d_v] in the query's dtype, and the states after the last token.

    ``query``, ``key`` [sequences, tokens, key heads, d_k]; ``value`` as the outputs; ``g`` (the logarithm of the decay)
    and ``beta`` [sequences, tokens, value heads]. A contiguous float32 ``initial_state`` [sequences, value heads, d_k,
    d_v] is changed in place. Computed token by token in float32, on ``torch.get_num_threads()`` threads.
    """
    sequences, tokens, key_heads, d_k = key.shape
    value_heads, d_v = value.shape[-2:]
    shape = sequences, value_heads, d_k, d_v
    state = value.new_zeros(shape, dtype=torch.float32) if initial_state is None else initial_state.float().contiguous()
    if state.shape != shape or query.shape != key.shape:
        raise ValueError(f"states {tuple(state.shape)} must be {shape}, queries {tuple(query.shape)} shaped as keys")
    q, k, v, decay, rate = (one.float().contiguous() for one in (query, key, value, g, beta))
    out = torch.empty_like(v)
    cpu.kernels().delta_rule(
        threads=torch.get_num_threads(), q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), g=decay.data_ptr(),
        beta=rate.data_ptr(), state=state.data_ptr(), out=out.data_ptr(), sequences=sequences, tokens=tokens,
        key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v, normalize=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out.to(query.dtype), state if output_final_state else None


def on_cpu(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel where the tensors are on a CPU that has it, and no argument asks for what it has not (packed sequences
    of ``cu_seqlens``, say); else ``reference``, of the same arguments."""

    def call(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Any:
        read = {name: one for name, one in named.items() if name in _READ}
        more = any(one is not None for name, one in named.items() if name not in _READ)
        if query.device.type != "cpu" or more or not cpu.available():
            return reference(query, key, value, **named)
        return gated_delta_rule(query, key, value, **read)

    return call
