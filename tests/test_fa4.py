"""FlashAttention-4's adapter without the package: its lists against brute force, and when our own kernels serve."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import Call, fa4, run
from saccade.ops.backends import FA4
from saccade.ops.triton.block_rows import block_rows
from saccade.selection import Blocks, Dense, Mixed, Shape


def random_blocks(shape: Shape, size: int, units: int, share: float, seed: int = 0) -> Blocks:
    rng = torch.Generator().manual_seed(seed)
    q_blocks = (shape.k_len - 1) // size - shape.q_start // size + 1
    return Blocks.from_block_mask(
        shape, size, torch.rand(units, q_blocks, -(-shape.k_len // size), generator=rng) < share
    )


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "k_len", "units"),
    [(500, 500, 8), (333, 1001, 2), (128, 40000, 1), (77, 640, 8)],  # a list longer than a program copies at once
)
def test_lists_are_those_of_brute_force(q_len, k_len, units, size, share):
    shape = Shape.suffix(8, 2, q_len, k_len)
    blocks = random_blocks(shape, size, units, share)
    room = torch.cat([blocks.indices, torch.full((9,), -7, dtype=torch.int32)])  # as a device's lists have
    lists = block_rows(Blocks(shape, size, blocks.offsets, room))
    assert all(part.dtype == torch.int32 for part in lists)
    q_blocks = blocks.q_blocks
    assert lists.rows.shape == (8, q_blocks, -(-k_len // size))
    mask = blocks.block_mask().repeat_interleave(8 // units, 0)
    for head in range(8):
        for j in range(q_blocks):
            own = blocks.first_q_block + j
            wanted = mask[head, j].nonzero()[:, 0].tolist()
            assert lists.rows[head, j, : lists.counts[head, j]].tolist() == [one for one in wanted if one < own]
            assert lists.diagonal_counts[head, j] == (own in wanted)
            assert lists.diagonals[head, j].tolist() == [own]


def call(rows: int, selection=None, **options) -> Call:
    heads, kv_heads, head_dim = 8, 2, 64
    q = torch.zeros(heads, rows, head_dim, dtype=torch.bfloat16)
    kv = KVView.from_tensors(*torch.zeros(2, kv_heads, rows, head_dim, dtype=torch.bfloat16))
    return Call.of(q, kv, selection, **options)


def test_each_reason_is_named(monkeypatch):
    shape = Shape.suffix(8, 2, 8192, 8192)
    blocks = Blocks.from_lists(shape, 128, [torch.tensor([0])] * 64)
    assert FA4.serves(call(100)) == "100 rows over 100 keys are too few to lay the keys out for"
    assert "not for Mixed" in FA4.serves(call(8192, Mixed(shape, (Dense(shape), blocks), torch.zeros(8))))
    monkeypatch.setattr(fa4, "_missing", lambda: "flash-attn-4 is not installed (pip install 'saccade-llm[fa4]')")
    assert "pip install 'saccade-llm[fa4]'" in FA4.serves(call(8192))
    with pytest.raises(SaccadeError, match=r"backend 'fa4' cannot run Dense .* flash-attn-4 is not installed"):
        run(call(8192), "fa4")
    monkeypatch.setattr(fa4, "_missing", lambda: None)
    monkeypatch.setattr(fa4, "LEAST", {Dense: (1, 1), Blocks: (1, 1)})
    assert "runs on a Hopper GPU, not on cpu" in FA4.serves(call(8192, blocks))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    assert "measured on Hopper GPUs alone, not on NVIDIA B200" in fa4.why_not(torch.device("cuda"))
    monkeypatch.setattr(fa4, "why_not", lambda device: None)
    assert FA4.serves(call(8192, softcap=2.0)) == "it is called without softcap and with a scale above 0"
    odd = Blocks.from_lists(shape, 32, [torch.tensor([0])] * 256)
    assert "not of 32" in FA4.serves(call(8192, odd))


def test_few_rows_go_only_over_many_keys(monkeypatch):
    monkeypatch.setattr(fa4, "why_not", lambda device: None)

    def reason(rows, keys, selection):
        q = torch.zeros(8, rows, 64, dtype=torch.bfloat16)
        shape = Shape.suffix(8, 2, rows, keys)
        lists = Dense(shape) if selection is Dense else Blocks(shape, 128, torch.zeros(1), torch.zeros(1))
        return fa4.serves(q, lists, 0.1, None)

    assert reason(1024, 32768, Dense) is None
    assert "1024 rows over 32000 keys" in reason(1024, 32000, Dense)
    assert "1000 rows over 131072 keys" in reason(1000, 131072, Dense)
    assert reason(4096, 32768, Blocks) is None
    assert "8192 rows over 8192 keys" in reason(8192, 8192, Blocks)


def test_kernels_are_compiled_ahead(monkeypatch):
    asked = []
    monkeypatch.setattr(fa4, "_attend", lambda q, k, v, selection, scale: asked.append((q.shape, k.shape, selection)))
    fa4.prepare(8, 2, 80, torch.bfloat16, torch.device("cpu"))
    assert not asked  # what it does not serve
    fa4.prepare(8, 2, 64, torch.bfloat16, torch.device("cpu"))
    assert [(q, k) for q, k, _ in asked] == [((8, 256, 64), (2, 256, 64))] * 2
    assert [type(one) for _, _, one in asked] == [Dense, Blocks]
    asked[1][2].check()


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(fa4, "version", lambda name: "4.0.0b7")
    fa4._missing.cache_clear()
    try:
        assert fa4.why_not(torch.device("cuda")).startswith("flash-attn-4 4.0.0b7 is installed, 4.0.0b36 is known")
    finally:
        fa4._missing.cache_clear()


def test_a_package_that_fails_is_left_and_says_so(monkeypatch):
    """The call runs in Triton; the device is not asked again."""

    def broken(*given):
        raise RuntimeError("ptxas is missing\nand more")

    monkeypatch.setattr(fa4, "_attend", broken)
    monkeypatch.setattr(fa4, "_missing", lambda: None)
    monkeypatch.setattr(fa4, "_failed", {})
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(4, 130, 64, generator=rng)
    kv = KVView.from_tensors(*torch.randn(2, 2, 130, 64, generator=rng))
    with pytest.warns(
        UserWarning, match="FlashAttention-4 is not used any more on cpu: RuntimeError: ptxas is missing"
    ):
        ran = FA4.attend(Call.of(q, kv))
    assert ran.backend == "triton"
    torch.testing.assert_close(ran.out, run(Call.of(q, kv), "reference").out, rtol=1e-4, atol=1e-4)
    assert fa4._failed == {"cpu": "a call failed: RuntimeError: ptxas is missing"}


def test_an_engine_uses_it_where_asked_and_reports_it(tmp_path, monkeypatch):
    folder = make_checkpoint("llama", tmp_path)
    with pytest.raises(SaccadeError, match=r"fa4=True cannot run: .*; leave it out"):
        LLM(folder, kv_memory="8MiB", device="cpu", fa4=True, enable_prefix_caching=False)
    monkeypatch.setattr(fa4, "why_not", lambda device: None)
    many = "8 rows are needed"
    monkeypatch.setattr(FA4, "serves", lambda call: None if call.q.shape[1] >= 8 else many, raising=False)
    monkeypatch.setattr(FA4, "attend", lambda call: run(call, "reference")._replace(backend="fa4"), raising=False)
    found = []
    for asked, backend in ((True, "auto"), (None, "auto"), (False, "auto"), (None, "reference")):
        with LLM(
            folder,
            dtype="float32",
            kv_memory="8MiB",
            device="cpu",
            fa4=asked,
            backend=backend,
            enable_prefix_caching=False,
        ) as llm:
            found.append(llm.generate(random_ids(40, seed=1), SamplingParams(temperature=0, max_tokens=4))[0])
    assert all(one.outputs[0].token_ids == found[0].outputs[0].token_ids for one in found)
    for one, wanted in zip(found, (True, True, False, False)):
        assert ("fa4" in one.report["prefill"]["backends"]) == wanted
        assert "fa4" not in one.report["decode"]["backends"]
