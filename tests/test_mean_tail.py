"""tail=mean: blocks that are not read count by their means, whatever reads the others."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import make
from helpers import generator, random_selection
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import SamplingParams
from saccade.errors import PolicyError
from saccade.kv import KVView
from saccade.methods import Chunk, Policy, Query, parse_method
from saccade.ops import Call, run
from saccade.selection import Corrected, Dense, Shape, without

DECODE = (
    "quest(budget=96, dense_layers=0, tail=mean)",
    "arkvale(budget=160, tail=mean)",
    "psa(epsilon=0.3, tail=mean)",
)
PREFILL = (
    "xattention(threshold=0.4, block_size=32, tail=mean)",
    "flashprefill(alpha=0.9, block_size=32, window_blocks=2, tail=mean)",
    "sampled_rows(threshold=0.2, gamma=0.3, block_size=32, tail=mean)",
    "flexprefill(gamma=0.3, block_size=64, min_budget=0, lines=block, tail=mean)",
    "minference(pattern=block_sparse, blocks=2, tail=mean)",
)


def problem(heads: int, kv_heads: int, rows: int, n: int, d: int = 32, dtype=torch.float32, shuffle: int | None = 3):
    """Queries and keys whose blocks differ, so that methods have something to leave out."""
    rng = generator(n + rows)
    k, v, q = (torch.randn(h, m, d, generator=rng) for h, m in ((kv_heads, n), (kv_heads, n), (heads, rows)))
    k += 1.5 * torch.randn(kv_heads, -(-n // 16), d, generator=rng).repeat_interleave(16, 1)[:, :n]
    q, k, v = (part.to(dtype) for part in (q, k, v))
    return q, KVView.from_tensors(k, v, shuffle_seed=shuffle)


def brute(q, view, selection, size: int, scale: float, softcap=None, gone=None):
    """Row by row in float64: keys that are read, and the mean of every whole block of which none is."""
    shape, mask = selection.shape, selection.mask()
    keys, values = view.keys().double(), view.values().double()
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    for head in range(shape.heads):
        k, v = keys[head // shape.group], values[head // shape.group]
        for row in range(shape.q_len):
            read = mask[head, row].nonzero()[:, 0]
            blocks = [b for b in range((shape.q_start + row + 1) // size) if not ((read // size) == b).any()]
            if gone is not None:
                lost = gone[head * gone.shape[0] // shape.heads].nonzero()[:, 0] // size
                blocks = [b for b in blocks if b not in lost.tolist()]
            spans = [slice(b * size, (b + 1) * size) for b in blocks]
            all_k = torch.cat([k[read], *(k[span].mean(0)[None] for span in spans)])
            all_v = torch.cat([v[read], *(v[span].mean(0)[None] for span in spans)])
            scores = q[head, row].double() @ all_k.T * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            scores[read.numel() :] += math.log(size)
            out[head, row], lse[head, row] = scores.softmax(0) @ all_v, scores.logsumexp(0)
    return out, lse


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("kind", "rows", "n", "units"),
    [
        ("blocks", 77, 203, 6),
        ("blocks", 203, 203, 2),
        ("blocks", 1, 203, 1),
        ("ranking", 1, 299, 2),
        ("tokens", 1, 140, 6),
    ],
)
def test_selections_with_a_tail_are_as_brute_force_says(kind, rows, n, units, softcap, backend):
    """Chunks that begin within a block, lists of all granularities and empty ones, a partial last block."""
    q, view = problem(6, 2, rows, n)
    shape = Shape.suffix(6, 2, rows, n)
    inner = random_selection(kind, shape, units, generator(rows))
    call = Call.of(q, view, Corrected(inner, 32), softcap=softcap)
    ran = run(call, backend)
    out, lse = brute(q, view, ran.used, 32, call.scale, softcap)
    torch.testing.assert_close(ran.out.double(), out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ran.lse.double(), lse, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", [*DECODE, *PREFILL])
def test_every_block_method_takes_a_tail(text, dtype):
    """The tail goes with what was really read, of a ranking that stopped too, and it is counted."""
    method = parse_method(text)
    decodes = method.phases == ("decode",)
    q, view = problem(4, 2, 1 if decodes else 110, 421, dtype=dtype)
    chunk = Query.of(q, view) if decodes else Chunk.of(q, view)
    selection = method.select_decode(chunk, None) if decodes else method.select_prefill(chunk)
    assert isinstance(selection, Corrected)
    assert method.stands_in
    ran = run(Call.of(q, view, selection, threads=1))
    assert ran.used.density() < 0.9
    plain = run(Call.of(q, view, selection.inner, threads=1))
    assert (ran.lse > plain.lse + 1e-3).any()
    out, lse = brute(q, view, ran.used, selection.block_size, chunk.scale)
    loose = {} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(ran.out.double(), out, **(loose or {"atol": 2e-5, "rtol": 1e-4}))
    torch.testing.assert_close(ran.lse.double(), lse, **(loose or {"atol": 2e-5, "rtol": 1e-4}))
    assert sum("tail=mean" in note for note in chunk.cost.notes) == 1
    without_tail = parse_method(text.replace(", tail=mean", ""))
    other = Query.of(q, view) if decodes else Chunk.of(q, view)
    _ = without_tail.select_decode(other, None) if decodes else without_tail.select_prefill(other)
    assert chunk.cost.estimated > other.cost.estimated
    assert not without_tail.stands_in


@pytest.mark.parametrize(
    "text", ["quest(budget=64, dense_layers=0, tail=mean)", "xattention(threshold=0.2, block_size=32, tail=mean)"]
)
def test_equal_keys_within_blocks_lose_nothing(text):
    """A mean stands exactly for keys and values that are all alike."""
    rng = generator(5)
    k, v = (torch.randn(2, 13, 32, generator=rng).repeat_interleave(32, 1)[:, :405] for _ in range(2))
    method = parse_method(text)
    decodes = method.phases == ("decode",)
    q, view = torch.randn(4, 1 if decodes else 200, 32, generator=rng), KVView.from_tensors(k, v)
    selection = method.select_decode(Query.of(q, view), None) if decodes else method.select_prefill(Chunk.of(q, view))
    out, lse = (getattr(run(Call.of(q, view, selection)), name) for name in ("out", "lse"))
    dense = run(Call.of(q, view, Dense(selection.shape)))
    torch.testing.assert_close(out, dense.out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, dense.lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("kind", "rows"), [("blocks", 1), ("blocks", 70)])
def test_evicted_keys_are_not_represented(kind, rows):
    """Neither read nor in a mean: their block has none."""
    q, view = problem(4, 2, rows, 203)
    shape = Shape.suffix(4, 2, rows, 203)
    gone = torch.zeros(2, 150, dtype=torch.bool)
    gone[0, [3, 40]] = gone[1, 64:96] = True
    corrected = without(Corrected(random_selection(kind, shape, 2, generator(1)), 32), gone)
    assert isinstance(corrected, Corrected)
    ran = run(Call.of(q, view, corrected))
    assert not (ran.used.mask()[:2, :, [3, 40]]).any()
    out, lse = brute(q, view, ran.used, 32, 32**-0.5, gone=gone)
    torch.testing.assert_close(ran.out.double(), out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ran.lse.double(), lse, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_an_engine_serves_tails_and_says_so(tmp_path):
    """Chunked prefill and decode; answers are not those without a tail."""
    llm = make(make_checkpoint("llama", tmp_path), chunk=64)
    prompt, params = random_ids(190, seed=2), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    policy = "xattention(threshold=0.2, block_size=32, stride=4{t})+quest(budget=32, block_size=8, dense_layers=0{t})"
    plain, tailed = (llm.generate([prompt], params, policy=policy.format(t=tail))[0] for tail in ("", ", tail=mean"))
    assert tailed.outputs[0].token_ids != plain.outputs[0].token_ids
    assert any("tail=mean" in note for note in tailed.report["notes"])
    assert not any("tail=mean" in note for note in plain.report["notes"])


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("quest(tail=median)", "tail=median is out of range: none or mean"),
        ("flexprefill(tail=mean)", "give lines=block"),
        ("minference(tail=mean)", "give pattern=block_sparse"),
        ("quest(tail=mean)+psaw", "does not go with the window 'psaw'"),
        ("topk(tail=mean)", "no option 'tail'"),
    ],
)
def test_what_has_no_tail_is_refused(policy, why):
    with pytest.raises(PolicyError, match=why):
        Policy.parse(policy)


def test_tails_are_an_option_like_others():
    assert Policy.parse("quest(tail=mean)").text == "quest(tail=mean)"
    assert Policy.parse("quest(tail=none)").text == "quest"
