"""LOCKS on a GPU: its kernels against torch's records and scores, recorded steps against steps launched one by one."""

from __future__ import annotations

import pytest
import torch
from device_helpers import device_of, take_off_device
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.kv.low_rank import packed, unpacked
from saccade.kv.summaries import summarize_view
from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.locks import Locks, combined, page_weights
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.low_rank import record_pages, score_records


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (9, 3, 64), (32, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_records_and_weights_are_torchs(heads, kv_heads, dim, size):
    """Of keys with few strong directions, as trained models have them: records of pages that a row fills say the same
    keys, and pages weigh the same to 1e-4 of each head's heaviest."""
    rng = torch.Generator(device="cuda").manual_seed(dim + size)
    length = 40 * size
    strong = torch.randn(kv_heads, 6, dim, generator=rng, device="cuda")
    keys = torch.randn(kv_heads, length, 6, generator=rng, device="cuda") @ strong
    keys = (keys + 0.1 * torch.randn(keys.shape, generator=rng, device="cuda")).to(torch.bfloat16)
    pool = keys.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()  # [blocks, kv_heads, 16, dim]
    table = torch.arange(len(pool), dtype=torch.int32, device="cuda")[None, None]
    records = torch.stack([packed(page) for page in keys.float().unflatten(1, (-1, size)).unbind(1)])
    made = records.clone()
    for page in (0, 7, 39):
        made[page] = 255
        lengths = torch.tensor([(page + 1) * size], dtype=torch.int32, device="cuda")
        pages = Pages(pool, pool, table, lengths, length)
        record_pages(pages, torch.tensor([made.data_ptr()], device="cuda"), size)
    basis, coefficients, mean = unpacked(made, size)
    wanted = keys.float().unflatten(1, (-1, size))
    own = coefficients @ basis + mean[..., None, :]
    basis, coefficients, mean = unpacked(records, size)
    theirs = coefficients @ basis + mean[..., None, :]
    far = (theirs - wanted).norm(dim=(-2, -1))
    assert ((own - wanted).norm(dim=(-2, -1)) <= 1.03 * far + 2e-3 * wanted.norm(dim=(-2, -1))).all()
    assert torch.equal(made[1], records[1])

    method = Locks(budget=10 * size, block_size=size)
    spec = type("Spec", (), {"layers": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "windows": (None,)})
    choice = method.device_plan(spec).layers[0]
    lengths = torch.tensor([length, 0, 23 * size + 3], dtype=torch.int32, device="cuda")
    pages = Pages(pool, pool, table.expand(3, -1, -1).contiguous(), lengths, length)
    pointers = torch.full([3], made.data_ptr(), device="cuda")
    q = torch.randn(3, heads, dim, generator=rng, device="cuda").to(torch.bfloat16)
    scores = score_records(q, pages, pointers, choice, dim**-0.5, None)
    assert torch.isneginf(scores[1]).all()
    for row in (0, 2):
        kept = int(lengths[row])
        stop = -(-kept // size) - 1
        assert torch.isneginf(scores[row, :, :1]).all()
        assert torch.isneginf(scores[row, :, stop:]).all()
        view = KVView.from_tensors(keys[:, :kept], keys[:, :kept], 16)
        query = Query.of(q[row][:, None], view)
        expected = combined(page_weights(query, made[1:stop], size), "mass", kv_heads)
        torch.testing.assert_close(scores[row, :, 1:stop], expected, atol=1e-4 * heads, rtol=2e-3)


def test_recorded_steps_read_the_pages_that_the_host_path_reads(tmp_path):
    """Tokens are the row path's until a page that the answer filled may be ranked, and those of steps launched one by
    one to the end."""
    folder = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=2048, head_dim=64)
    made = [
        LLM(
            folder,
            kv_memory="64MiB",
            prefill_chunk=256,
            device="cuda",
            exact=False,
            cuda_graphs=graphs,
            enable_prefix_caching=False,
        )
        for graphs in (False, False, True)
    ]
    take_off_device(made[0])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (400, 37, 513, 290)]
    own, plain, recorded = (one.generate(prompts, params, policy="locks(budget=128)") for one in made)
    for left, middle, right in zip(own, plain, recorded):
        assert left.error is middle.error is right.error is None
        assert tokens(middle) == tokens(right)
        assert tokens(left)[:16] == tokens(right)[:16]
        assert left.report["decode"]["keys_attended"] == right.report["decode"]["keys_attended"]
        assert left.report["decode"]["keys_estimated"] == right.report["decode"]["keys_estimated"]
    assert device_of(made[2]).graphs.recorded > 0


def test_a_prompts_records_are_made_by_torch():
    """Of many pages at once its batched eigenvectors are: no kernel is asked."""
    keys = torch.randn(2, 100, 64, device="cuda")
    view = KVView.from_tensors(keys, keys, 16)
    made = summarize_view(view, "low_rank", 16, 0, 6)
    assert made.dtype == torch.uint8
    basis, coefficients, mean = unpacked(made, 16)
    back = coefficients @ basis + mean[..., None, :]
    true = keys[:, :96].unflatten(1, (6, 16))
    assert ((back - true).norm() / true.norm()) < 0.7
