"""MInference's search: a pattern for each head, found offline, stored beside the model and read by each head alone."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, make, tokens
from helpers import brute_force, generator, planted_heads
from tiny_models import make_checkpoint, random_ids

from saccade.cli.main import main
from saccade.errors import PolicyError, RequestError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.minference import A_SHAPE, BLOCKS, LINES, SIZES, MInference
from saccade.methods.offline import PatternSearch, candidates
from saccade.models.calibration import save_calibration
from saccade.selection import Band, Dense, Mixed

FORCED = {"keep_columns": 4, "keep_diagonals": 6, "block_size": 32}
METHOD = MInference(pattern="searched", **FORCED)


def chunk_of(rows: int = 150, n: int = 400, seed: int = 0) -> Chunk:
    q, k, v = planted_heads(4, 2, n, seed=seed)
    return Chunk.of(q[:, -rows:], KVView.from_tensors(k, v, shuffle_seed=seed))


def rows_read(selection, head: int) -> torch.Tensor:
    per_unit = selection.shape.heads // selection.units
    return selection.row_mask(head // per_unit, 0, selection.shape.q_len)


@pytest.mark.parametrize("rows", [150, 33, 1])
def test_each_head_reads_its_own_pattern(rows):
    sizes = torch.tensor([[A_SHAPE, 12, 40, 0], [LINES, 30, 50, 0], [BLOCKS, 0, 0, 3], [LINES, 2, 9, 0]]).float()
    chunk = chunk_of(rows)
    mixed = METHOD.of_sizes(chunk, sizes)
    assert isinstance(mixed, Mixed)
    mixed.check()
    alone = [
        Band(chunk.shape, sinks=12, window=40),
        MInference(vertical=30, slash=50, **FORCED).select_prefill(chunk),
        MInference(pattern="block_sparse", blocks=3, **FORCED).select_prefill(chunk),
        MInference(vertical=4, slash=9, **FORCED).select_prefill(chunk),  # what is forced is read
    ]
    for head, expected in enumerate(alone):
        assert torch.equal(rows_read(mixed, head), rows_read(expected, head)), head


def test_sizes_of_all_keys_are_dense_and_only_what_was_scored_counts():
    chunk = chunk_of(64)
    everything = torch.tensor([[LINES, 400, 10, 0], [BLOCKS, 0, 0, 13], [A_SHAPE, 0, 400, 0], [LINES, 0, 999, 0]])
    assert isinstance(METHOD.of_sizes(chunk, everything), Dense)
    assert (chunk.cost.scored, chunk.cost.estimated) == (0, 0)
    METHOD.of_sizes(chunk, torch.tensor([[LINES, 40, 40, 0], *[[BLOCKS, 0, 0, 2]] * 3]))
    assert chunk.cost.scored == 64 * 400 / 4
    assert chunk.cost.estimated == round(3 * 13 * 3 / 4)  # rows 336 .. 399 lie in 3 blocks of queries


def test_the_search_takes_what_is_nearest_dense_attention_over_all_chunks():
    n, keys = 300, 64
    q, k, v = planted_heads(4, 2, n, seed=5)
    search, errors = PatternSearch(keys), torch.zeros(6, 4, dtype=torch.float64)
    for first, last in ((0, 180), (180, n)):
        chunk = Chunk.of(q[:, first:last], KVView.from_tensors(k[:, :last], v[:, :last]))
        search.add(chunk)
        dense = brute_force(chunk.q, k[:, :last], v[:, :last], Dense(chunk.shape).mask(), chunk.scale)[0]
        for at, one in enumerate(candidates(keys, 64)):
            read = MInference(pattern="searched").of_sizes(chunk, torch.tensor([one] * 4))
            out = brute_force(chunk.q, k[:, :last], v[:, :last], read.mask(), chunk.scale)[0]
            errors[at] += (out - dense).double().square().sum((1, 2))
    found = search.result()[SIZES]
    assert [tuple(row) for row in found.long().tolist()] == [candidates(keys, 64)[at] for at in errors.argmin(0)]


def test_a_head_of_columns_and_one_of_distances_differ():
    n = 512
    made = generator(3)
    k, v = torch.randn(1, n, 32, generator=made), torch.randn(1, n, 32, generator=made)
    liked = torch.randperm(n // 2, generator=made)[:40]
    k[0, :, 0] = 0.0
    k[0, liked, 0] = 3.0  # what every row of head 0 looks for, wherever it stands
    by_place, by_distance = torch.zeros(n, 32), torch.zeros(n, 32)
    by_place[:, 0] = 30.0
    turn = 2 * torch.pi * torch.arange(n) / n
    k[0, :, 1], k[0, :, 2] = 4 * turn.cos(), 4 * turn.sin()
    asked = turn - 2 * torch.pi * 60 / n  # keys around a distance of 60, most of them within 50 of it
    by_distance[:, 1], by_distance[:, 2] = 5 * asked.cos(), 5 * asked.sin()
    search = PatternSearch(128)
    search.add(Chunk.of(torch.stack([by_place, by_distance]), KVView.from_tensors(k, v)))
    columns, distances = search.result()[SIZES].long().tolist()
    assert columns[0] == LINES == distances[0]
    assert columns[1] >= 40
    assert distances[2] > distances[1]


@pytest.mark.parametrize("keys", [64, 100, 512, 4096])
def test_candidates_read_equally_many_keys(keys):
    for kind, columns, distances, blocks in candidates(keys, 64):
        assert (columns + distances == keys) if kind != BLOCKS else (keys - 64 < 64 * blocks <= keys)


def test_a_model_without_patterns_names_the_command_that_finds_them(tmp_path, capsys):
    folder = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=2048)
    policy, ids = "minference(pattern=searched)", random_ids(400, seed=1)
    with pytest.raises(PolicyError, match=f"saccade calibrate patterns --model {folder}"):
        make(folder).generate(ids, GREEDY, policy=policy)
    (tmp_path / "text.txt").write_text("the lighthouse keeper counts the waves. " * 30)
    text = ["-m", str(folder), "-f", str(tmp_path / "text.txt"), "--tokens", "300"]
    for arguments, says in (
        (["patterns", *text], "keys=512 must be below half of the 300 tokens"),
        (["patterns", *text, "--keys", "10"], "keys=10 must be at least 64"),
        (["skew", *text, "--keys", "64"], "--keys is for patterns; skew has no such number"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", *arguments])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "patterns", *text, "--keys", "64", "--prefill-chunk", "128"])
    assert ended.value.code == 0
    llm = make(folder)
    for both in (policy, f"{policy}+double_sparsity(dense_upto=0, source=prompt, k=24)"):
        output = llm.generate(ids, GREEDY, policy=both)[0]
        assert len(tokens(output)) == 10
        assert 0.1 < output.report["prefill"]["density"] < 0.8
    spec = llm.model.spec
    channels = [{name: torch.ones(spec.kv_heads, spec.head_dim) for name in "qk"} for _ in range(spec.layers)]
    save_calibration(folder, "channels", channels)
    both = make(folder).generate(ids, GREEDY, policy=f"{policy}+double_sparsity(dense_upto=0, k=24)")[
        0
    ]  # a kind for each phase
    assert both.report["prefill"]["density"] == pytest.approx(output.report["prefill"]["density"])


def test_the_search_refuses_a_text_that_it_would_read_whole():
    search = PatternSearch(keys=300)
    search.add(chunk_of(100, 400))
    with pytest.raises(RequestError, match="keys=300 must be below half of the 400 tokens"):
        search.result()


def test_stand_ins_for_unread_blocks_do_not_go_with_it():
    with pytest.raises(PolicyError, match="pattern=searched reads lines"):
        MInference(pattern="searched", tail="mean")
