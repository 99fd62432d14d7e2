"""The backends of attention: plain torch, which is the meaning, C++ on a CPU, Triton on a GPU, and FlashAttention-4
beside it where that optional extra is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from saccade.ops import cpu, cpu_blocks, cpu_decode, cpu_sampled, fa4, reference, triton
from saccade.ops.call import Backend, Call, Result
from saccade.ops.candidates import choose
from saccade.ops.progressive import attend_ranking
from saccade.selection import Candidates, Ranking, Sampled, Selection, Tokens


class Reference:
    """torch: any selection, on any device."""

    name = "reference"

    def serves(self, call: Call) -> str | None:
        return None

    def attend(self, call: Call) -> Result:
        q, kv, scale, softcap = call.q, call.kv, call.scale, call.softcap
        selection, used = call.selection.to(q.device), call.selection
        if isinstance(selection, Ranking):
            out, lse, used, coverage = attend_ranking(q, kv, selection.whole(), scale=scale, softcap=softcap)
            return Result(out, lse, used, self.name, coverage=coverage)
        if isinstance(selection, Candidates):
            selection = used = choose(q, kv, selection, scale=scale, softcap=softcap)
        out, lse = reference.attend(q, kv, selection, scale=scale, softcap=softcap)
        return Result(out, lse, used, self.name)


def _attend(call: Call) -> Result:
    out, lse = cpu.attend(call.q, call.kv, call.selection, **_options(call))
    return Result(out, lse, call.selection, _cpu_name())


def _attend_lists(call: Call) -> Result:
    lists: Any = call.selection
    out, lse, used, weights = cpu_decode.attend(
        call.q, call.kv, lists, want_weights=call.want_weights, **_options(call)
    )
    return Result(out, lse, used, _cpu_name(), weights)


def _attend_ranking(call: Call) -> Result:
    ranking: Any = call.selection
    out, lse, used, coverage = cpu_blocks.attend_ranking(call.q, call.kv, ranking, **_options(call))
    return Result(out, lse, used, _cpu_name(), coverage=coverage)


def _attend_sampled(call: Call) -> Result:
    sampled: Any = call.selection
    out, lse = cpu_sampled.attend(call.q, call.kv, sampled, **_options(call))
    return Result(out, lse, call.selection, _cpu_name())


def _options(call: Call) -> dict[str, Any]:
    return {"scale": call.scale, "softcap": call.softcap, "threads": call.threads}


def _cpu_name() -> str:
    return f"cpu/{cpu.isa()}"


class Cpu:
    """The C++ kernels."""

    name = "cpu"

    # By kind of selection: why not, and the call.
    _kernels: ClassVar[dict[type[Selection], tuple[Callable[..., str | None], Callable[[Call], Result]]]] = {
        Candidates: (cpu_decode.serves, _attend_lists),
        Ranking: (cpu_blocks.serves, _attend_ranking),
        Sampled: (cpu_sampled.serves, _attend_sampled),
        Tokens: (cpu_decode.serves, _attend_lists),
    }
    _others = cpu.serves, _attend

    def serves(self, call: Call) -> str | None:
        serves, _ = self._kernels.get(type(call.selection), self._others)
        return serves(call.q, call.kv, call.selection)

    def attend(self, call: Call) -> Result:
        _, attend = self._kernels.get(type(call.selection), self._others)
        return attend(call)


class Triton:
    """The Triton kernels."""

    name = "triton"

    def serves(self, call: Call) -> str | None:
        return triton.serves(call.q, call.kv, call.selection)

    def attend(self, call: Call) -> Result:
        from saccade.ops.triton import dispatch

        q, kv, selection, scale, softcap = call.q, call.kv, call.selection, call.scale, call.softcap
        if isinstance(selection, Ranking):
            out, lse, blocks, coverage = dispatch.attend_ranking(q, kv, selection.whole(), scale=scale, softcap=softcap)
            return Result(out, lse, blocks, self.name, coverage=coverage)
        if isinstance(selection, Candidates):  # which torch chooses
            selection = choose(q, kv, selection.to(q.device), scale=scale, softcap=softcap)
        out, lse = dispatch.attend(q, kv, selection, scale=scale, softcap=softcap)
        return Result(out, lse, selection, self.name)


class FlashAttention4:
    """FlashAttention-4's kernels, an extra. A call that fails there runs in Triton."""

    name = "fa4"

    def serves(self, call: Call) -> str | None:
        reason = fa4.serves(call.q, call.selection, call.scale, call.softcap)
        return reason or TRITON.serves(call)

    def attend(self, call: Call) -> Result:
        selection = call.selection.to(call.q.device)
        done = fa4.attend(call.q, call.kv, selection, scale=call.scale)  # type: ignore[arg-type]
        return TRITON.attend(call) if done is None else Result(*done, call.selection, self.name)


CPU, REFERENCE, TRITON, FA4 = Cpu(), Reference(), Triton(), FlashAttention4()
NAMED: dict[str, Backend] = {backend.name: backend for backend in (CPU, REFERENCE, TRITON, FA4)}
