"""The backends of attention: plain torch, which is the meaning, C++ on a CPU, Triton on a GPU, and FlashAttention-4
beside it where that optional extra is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

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

    def kernel(self, call: Call) -> Callable[[Call], Result]:
        return self.attend

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


class Cpu:
    """The C++ kernels."""

    name = "cpu"

    # By kind of selection: why not, and the kernel.
    _kernels: ClassVar[dict[type[Selection], tuple[Callable[..., str | None], Callable[[Call], Result]]]] = {
        Candidates: (cpu_decode.serves, cpu_decode.attend),
        Ranking: (cpu_blocks.serves, cpu_blocks.attend_ranking),
        Sampled: (cpu_sampled.serves, cpu_sampled.attend),
        Tokens: (cpu_decode.serves, cpu_decode.attend),
    }
    _others = cpu.serves, cpu.attend

    def serves(self, call: Call) -> str | None:
        serves, _ = self._kernels.get(type(call.selection), self._others)
        return serves(call.q, call.kv, call.selection)

    def kernel(self, call: Call) -> Callable[[Call], Result]:
        return self._kernels.get(type(call.selection), self._others)[1]


class Triton:
    """The Triton kernels."""

    name = "triton"

    def serves(self, call: Call) -> str | None:
        return triton.serves(call.q, call.kv, call.selection)

    def kernel(self, call: Call) -> Callable[[Call], Result]:
        return self.attend

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

    def kernel(self, call: Call) -> Callable[[Call], Result]:
        return self.attend

    def attend(self, call: Call) -> Result:
        selection = call.selection.to(call.q.device)
        done = fa4.attend(call.q, call.kv, selection, scale=call.scale)  # type: ignore[arg-type]
        return TRITON.attend(call) if done is None else Result(*done, call.selection, self.name)


CPU, REFERENCE, TRITON, FA4 = Cpu(), Reference(), Triton(), FlashAttention4()
NAMED: dict[str, Backend] = {backend.name: backend for backend in (CPU, REFERENCE, TRITON, FA4)}
