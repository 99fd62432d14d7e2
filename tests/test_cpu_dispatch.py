"""Which kernels run, and what a user is told when they cannot."""

import os

import fork_server
import pytest
import torch
from cpu_helpers import attend_cpu

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import cpu, reference
from saccade.selection import Dense, Shape

needs_kernels = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")


@pytest.fixture(autouse=True)
def _restore_isa():
    yield
    cpu.set_isa(None)


def small_call(n=125, v=None):
    generator = torch.Generator().manual_seed(n)
    shape = Shape.suffix(2, 1, n, n)
    q, k, values = (torch.randn(heads, n, 32, generator=generator).bfloat16() for heads in (2, 1, 1))
    return q, KVView.from_tensors(k, values if v is None else v), Dense(shape)


@needs_kernels
def test_portable_is_always_there_and_the_best_comes_first():
    isas = cpu.supported_isas()
    assert isas[-1] == "portable"
    assert cpu.isa() == isas[0] or os.environ.get("SACCADE_ISA")
    for name in isas:
        cpu.set_isa(name)
        assert cpu.isa() == name


@needs_kernels
@pytest.mark.parametrize("name", ["avx1024", "", "AVX2"])
def test_unknown_isa_lists_what_there_is(name):
    with pytest.raises(SaccadeError, match="portable"):
        cpu.set_isa(name)


def run_python(code, **environment):
    return fork_server.run(["-c", code], env={**os.environ, **environment}, timeout=120)


@needs_kernels
def test_environment_chooses_the_isa():
    shown = run_python("from saccade.ops import cpu; print(cpu.isa())", SACCADE_ISA="portable")
    assert shown.stdout.strip() == "portable", shown.stderr
    wrong = run_python("from saccade.ops import cpu; print(cpu.isa())", SACCADE_ISA="sse9")
    assert wrong.returncode != 0
    assert "SaccadeError" in wrong.stderr
    assert "sse9" in wrong.stderr
    assert "portable" in wrong.stderr


def test_without_the_extension_everything_still_runs():
    code = """
import sys
sys.modules["saccade._kernels"] = None  # as if it had never been built
import torch
from saccade.ops import attend, cpu
assert not cpu.available() and cpu.supported_isas() == [] and cpu.isa() == ""
assert "reference" in cpu.why_unavailable()
out, lse = attend(torch.randn(4, 3, 32), (torch.randn(2, 9, 32), torch.randn(2, 9, 32)))
assert out.shape == (4, 3, 32) and bool(out.isfinite().all())
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@needs_kernels
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_scratch_of_an_earlier_call_does_not_leak(isa):
    """Kernel scratch is kept between calls: rows left there by a poisoned call must not meet a weight of zero."""
    cpu.set_isa(isa)
    q, poisoned, dense = small_call(128, torch.full((1, 128, 32), torch.nan).bfloat16())
    assert attend_cpu(q, poisoned, dense, scale=0.2, threads=1)[0].isnan().any()
    for n in range(125, 128):
        q, view, dense = small_call(n)
        out, _ = attend_cpu(q, view, dense, scale=0.2, threads=1)
        expected, _ = reference.attend(q.double(), view, dense, scale=0.2)
        assert float((out.double() - expected).abs().max()) < 2e-2


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own():
    code = """
import os, torch
from saccade.kv.view import KVView
from saccade.ops import attend
from saccade.selection import Dense, Shape
torch.set_num_threads(1)
q, kv = torch.randn(4, 600, 32), KVView.from_tensors(torch.randn(4, 600, 32), torch.randn(4, 600, 32))
call = lambda: attend(q, kv, Dense(Shape.suffix(4, 4, 600, 600)), scale=0.2, backend="cpu", threads=3)[0]
before = call()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(call(), before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(call(), before)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@needs_kernels
def test_calls_from_many_python_threads_agree():
    from concurrent.futures import ThreadPoolExecutor

    q, view, dense = small_call(300)
    expected = attend_cpu(q, view, dense, scale=0.2, threads=1)[0]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: attend_cpu(q, view, dense, scale=0.2, threads=2)[0], range(40)))
    assert all(torch.equal(out, expected) for out in results)
