"""Whether an installed wheel works: `python tests/wheel_smoke.py kernels`, or `pure` for the one without kernels."""

import sys

import torch

import saccade
from saccade.ops import attend, cpu


def main(kind: str) -> None:
    assert cpu.available() == (kind == "kernels"), cpu.why_unavailable() or "kernels in the pure wheel"
    q, k, v = (torch.randn(heads, 300, 64) for heads in (4, 2, 2))
    k2, v2 = (x.repeat_interleave(2, 0) for x in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k2, v2, is_causal=True)
    for isa in cpu.supported_isas() or [None]:
        if isa:
            cpu.set_isa(isa)
        out, lse = attend(q, (k, v))
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        one, _ = attend(q[:, -1:], (k, v))
        torch.testing.assert_close(one, wanted[:, -1:], rtol=1e-4, atol=1e-4)
        assert bool(lse.isfinite().all())
    print(
        f"saccade {saccade.__version__} from {saccade.__path__[0]}: {', '.join(cpu.supported_isas()) or 'no kernels'}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
