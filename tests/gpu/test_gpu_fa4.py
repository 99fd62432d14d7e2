"""FlashAttention-4 where the extra is installed: equal to float64 and to our kernel on odd lengths, chunks on and off
the grid of blocks, empty lists, lists of one head, of KV heads and of query heads."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import BOUND, data, random_blocks
from helpers import brute_force

from saccade import LLM, SamplingParams
from saccade.errors import SaccadeError
from saccade.eval.suite import make
from saccade.ops import Call, fa4, run
from saccade.selection import Blocks, Dense

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and fa4.why_not(torch.device("cuda")) is not None,
    reason=f"the extra: {fa4.why_not(torch.device('cuda')) if torch.cuda.is_available() else 'no GPU'}",
)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(fa4, "LEAST", {Dense: (1, 1), Blocks: (1, 1)})


def served(q, k, v, view, selection) -> None:
    ran = run(Call.of(q, view, selection), "fa4")
    assert ran.backend == "fa4"
    expected, expected_lse = brute_force(q.cpu(), k.cpu(), v.cpu(), selection.mask())
    assert torch.isfinite(ran.out).all()
    assert float((ran.out.cpu().double() - expected).norm() / expected.norm()) < BOUND[q.dtype]
    torch.testing.assert_close(ran.lse.cpu().double(), expected_lse, atol=2e-2, rtol=1e-2)
    ours = run(Call.of(q, view, selection), "triton")
    torch.testing.assert_close(ran.out, ours.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(ran.lse, ours.lse, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "keys", "head_dim", "dtype"),
    [
        (32, 8, 333, 1000, 128, torch.bfloat16),
        (8, 2, 1025, 1025, 128, torch.bfloat16),
        (8, 8, 130, 771, 64, torch.float16),
    ],
)
def test_dense(heads, kv_heads, rows, keys, head_dim, dtype, structured):
    q, k, v, view, shape = data(heads, kv_heads, rows, keys, head_dim, dtype, structured)
    served(q, k, v, view, Dense(shape))


@pytest.mark.parametrize(("size", "units"), [(128, 32), (64, 32), (128, 8), (128, 1)])
@pytest.mark.parametrize(("rows", "keys"), [(1000, 1000), (777, 2000), (512, 1536), (129, 1999)])
def test_blocks(rows, keys, size, units):
    q, k, v, view, shape = data(32, 8, rows, keys, 128, structured=units == 8)
    served(q, k, v, view, random_blocks(shape, size, units))


def test_rows_without_keys_give_nothing():
    q, k, v, view, shape = data(8, 2, 500, 1500, 128)
    lists = random_blocks(shape, 128, 8, share=0.3)
    mask = lists.block_mask().clone()
    mask[3, 1] = mask[5] = False
    served(q, k, v, view, Blocks.from_block_mask(shape, 128, mask))


def test_views_of_other_strides():
    q, k, v, view, shape = data(8, 2, 300, 900, 128)
    wide = torch.randn(300, 8, 3, 128, device="cuda").to(torch.bfloat16)
    wide[:, :, 1] = q.transpose(0, 1)
    served(wide[:, :, 1].transpose(0, 1), k, v, view, random_blocks(shape, 128, 2))
    served(wide[:, :, 1].transpose(0, 1), k, v, view, Dense(shape))


def test_what_it_does_not_serve_is_refused():
    q, _, _, view, shape = data(8, 2, 200, 500, 128)
    for call in (
        Call.of(q, view, softcap=4.0),
        Call.of(q.float(), view),
        Call.of(q, view, random_blocks(shape, 32, 8)),
    ):
        with pytest.raises(SaccadeError, match="backend 'fa4' cannot run"):
            run(call, "fa4")


def test_a_report_says_which_served():
    turn = make("multikey", 1024, 1).turns[0]
    found = []
    for asked in (True, False):
        with LLM("reference", dtype="bfloat16", device="cuda", fa4=asked, enable_prefix_caching=False) as llm:
            ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": turn.message()}])
            out = llm.generate(ids, SamplingParams(temperature=0, max_tokens=8), policy="dense")[0]
            found.append((out.outputs[0].token_ids, out.report["prefill"]["backends"]))
    assert found[0][0] == found[1][0]
    assert "fa4" in found[0][1]
    assert set(found[1][1]) == {"triton"}
