"""What goes wrong inside a C++ kernel reaches the caller as a Python exception, and the pool of threads lives on."""

import pytest
import torch

from saccade.kv.view import KVView
from saccade.ops import attend, cpu, reference
from saccade.selection import Dense, Shape

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")


def dense_answer(threads):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, 200, 32, generator=generator) for heads in (4, 2, 2))
    kv, selection = KVView.from_tensors(k, v), Dense(Shape.suffix(4, 2, 200, 200))
    got = attend(q, kv, selection, scale=0.2, threads=threads)[0]
    return got, reference.attend(q, kv, selection, scale=0.2)[0]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("in_worker", [False, True])
def test_a_task_that_finds_no_memory_is_a_memory_error_and_the_pool_lives_on(threads, in_worker):
    """On one of the pool's threads it ended the process; on the caller's, workers went on in a job that was gone."""
    from saccade import _kernels

    if in_worker and threads == 1:
        pytest.skip("one thread has no workers")
    for _ in range(3):
        with pytest.raises(MemoryError):
            _kernels.memory_fault(count=50, threads=threads, in_worker=in_worker)
        got, want = dense_answer(threads)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
