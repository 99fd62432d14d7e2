"""What layers that keep a state call, by transformers' names and with its arguments, over states in slots of a pool:
our kernels, Triton's on a GPU and those of C++ on a CPU, which change the slots themselves. Given anything else they
are what they stand for.

These are transformers' functions too where ``flash-linear-attention`` or ``causal-conv1d`` is installed: those take
states as tensors, which every step would have to gather and scatter, so they serve only where these kernels do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from saccade.ops import cpu, cpu_keeping, triton
from saccade.ops.slots import NewRows, Slots

ACTIVATIONS = (None, "silu", "swish")  # of convolutions


def serves(device: torch.device) -> bool:
    """Whether the kernels run on tensors of ``device``."""
    return on_host(device) or (device.type == "cuda" and triton.available())


def on_host(device: torch.device) -> bool:
    """Whether the kernels on ``device`` are those of C++."""
    return device.type == "cpu" and cpu.available()


def _hosted(slots: Slots) -> bool:
    return on_host(slots.pool.device)


def _conv_step(
    hidden_states: Tensor, conv_state: Slots, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return _conv(NewRows(hidden_states, conv_state), weight, bias, activation)


def _conv(
    hidden_states: NewRows, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    if _hosted(hidden_states.slots):
        return cpu_keeping.convolve(hidden_states, weight, bias, activation is not None)
    from saccade.ops.triton.causal_conv import convolve

    return convolve(hidden_states, weight, bias, activation is not None)


def _delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Slots,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    by_token: bool,
    **_: Any,
) -> tuple[Tensor, Slots]:
    """``by_token``: for a token of each sequence, else for a prompt."""
    given = query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel
    if _hosted(initial_state):
        return cpu_keeping.delta_rule(*given), initial_state
    if by_token:
        from saccade.ops.triton.delta_rule import step

        return step(*given), initial_state
    from saccade.ops.triton.delta_chunks import prompt

    return prompt(*given), initial_state


def _space_step(
    state: Slots,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """All but ``hidden_states``, ``B`` and ``C`` come the same for each of a head's channels."""
    skip, bias = (None if one is None else one[:, 0] for one in (D, dt_bias))
    if _hosted(state):
        x, times, b, c = (one[:, None] for one in (hidden_states, dt[..., 0], B, C))
        out = cpu_keeping.state_space(x, times, A[:, 0, 0], b, c, skip, bias, state, softplus=dt_softplus)[:, 0]
    else:
        from saccade.ops.triton.state_space import step

        out = step(hidden_states, dt[..., 0], A[:, 0, 0], B, C, skip, bias, dt_softplus, state)
    return out if z is None else out * torch.nn.functional.silu(z)


def _space_chunks(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    initial_states: Slots,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Slots]:
    if _hosted(initial_states):
        out = cpu_keeping.state_space(
            hidden_states, dt, A, B, C, D, dt_bias, initial_states, softplus=dt_softplus, limits=dt_limit
        )
        return out, initial_states
    from saccade.ops.triton.state_space import prompt

    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    dt = dt.clamp(*dt_limit)
    return prompt(hidden_states, dt, A, B, C, D, initial_states), initial_states


@dataclass(frozen=True)
class _Kernel:
    """``slots``: the argument that is slots, ``place`` its place where modules give it by place. ``rows``: the
    arguments with a dimension of rows, which is their ``dimension``; none where a call has but one row."""

    slots: str
    place: int | None
    run: Callable[..., Any]
    rows: tuple[str, ...] = ()
    dimension: int = 1

    def again(self, given: tuple[Any, ...], named: dict[str, Any], slot: int, rows: int) -> None:
        """Do what a call did with its first ``rows`` rows to the state in ``slot``."""
        asked = signature(self.run).bind(*given, **named).arguments
        asked |= asked.pop("_", {})
        for name in self.rows:
            asked[name] = asked[name].narrow(self.dimension, 0, rows)
        asked[self.slots] = asked[self.slots].only(slot)
        self.run(**asked)


def _limited(step: Callable[..., Any], limits: tuple[float, float]) -> Callable[..., Any]:
    """A step of Mamba-2 whose times, which come the same for each of a head's channels, lie within ``limits``."""

    @wraps(step)
    def call(
        state: Any,
        hidden_states: Tensor,
        dt: Tensor,
        *others: Any,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **named: Any,
    ) -> Any:
        own = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[:, 0].to(dt.dtype)
        own = torch.nn.functional.softplus(own) if dt_softplus else own
        return step(state, hidden_states, own.clamp(*limits)[..., None].expand(dt.shape), *others, **named)

    return call


_KERNELS = {
    "causal_conv1d_update": _Kernel("conv_state", 1, _conv_step),
    "causal_conv1d_fn": _Kernel("hidden_states", 0, _conv, ("hidden_states",), 2),
    "torch_recurrent_gated_delta_rule": _Kernel("initial_state", None, partial(_delta, by_token=True)),
    "torch_chunk_gated_delta_rule": _Kernel(
        "initial_state", None, partial(_delta, by_token=False), ("query", "key", "value", "g", "beta")
    ),
    "mamba2_selective_state_update": _Kernel("state", 0, _space_step),
    "mamba2_chunk_scan": _Kernel("initial_states", None, _space_chunks, ("hidden_states", "dt", "B", "C")),
}
NAMES = tuple(_KERNELS)


def in_slots(
    name: str, otherwise: Callable[..., Any], limits: tuple[float, float] = (0.0, float("inf"))
) -> Callable[..., Any]:
    """The kernel of this name where its state is in slots; else ``otherwise``, of the same arguments. ``limits``: of
    Mamba-2's time steps, which transformers keeps in prompts alone: a token would then be another one by itself."""
    kernel = _KERNELS[name]
    if name == "mamba2_selective_state_update" and tuple(limits) != (0.0, float("inf")):
        kernel, otherwise = replace(kernel, run=_limited(kernel.run, limits)), _limited(otherwise, limits)
    place = kernel.place

    def call(*given: Any, **named: Any) -> Any:
        state = given[place] if place is not None and place < len(given) else named.get(kernel.slots)
        if not isinstance(state, (Slots, NewRows)):
            return otherwise(*given, **named)
        made = kernel.run(*given, **named)
        if state.notes is not None:
            state.notes.append(partial(kernel.again, given, named))
        return made

    return call
