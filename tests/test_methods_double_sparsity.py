"""Double Sparsity and HShare against their definitions; calibrations; sharing between steps, heads and layers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engine_helpers import GREEDY, make, tokens
from helpers import planted_heads, run_method
from tiny_models import make_checkpoint, random_ids

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.labels import Labels
from saccade.methods.topk import TopK
from saccade_contrib.calibrations import ChannelMeans
from saccade_contrib.double_sparsity import DoubleSparsity
from saccade_contrib.hshare import HShare, donors

UNITS = {"q_head": [[0], [1], [2], [3]], "kv_head": [[0, 1], [2, 3]]}


def problem(n: int = 120, seed: int = 1, layer: int = 5):
    q, k, v = planted_heads(4, 2, n, seed=seed)
    view = KVView.from_tensors(k, v, shuffle_seed=seed)
    return q, k, view, Chunk.of(q[:, -40:], view, layer=layer, layers=layer + 1)


def quantized(values: list[float], bits: int) -> list[float]:
    """To the nearest of 2^bits levels from the least to the greatest."""
    low, high = min(values), max(values)
    step = (high - low) / (2**bits - 1)
    return [low + step * math.floor((x - low) / step + 0.5) for x in values]


def top(scores: list[float], count: int, forced: set[int] = frozenset()) -> list[int]:
    rest = sorted((i for i in range(len(scores)) if i not in forced), key=lambda i: (-scores[i], i))
    return sorted([*forced, *rest[: max(0, count - len(forced))]])


def label_scores(q, k, channels: list[int], heads: list[int], bits: int, both: bool = False) -> list[float]:
    kv_head = heads[0] // 2
    scores = []
    asked = {h: [float(q[h, -1, c]) for c in channels] for h in heads}
    if both and bits < 16:
        asked = {h: quantized(values, bits) for h, values in asked.items()}
    for i in range(k.shape[1]):
        label = [float(k[kv_head, i, c]) for c in channels]
        label = quantized(label, bits) if bits < 16 else label
        scores.append(sum(a * x for h in heads for a, x in zip(asked[h], label)) / len(heads))
    return scores


# --- Double Sparsity


@pytest.mark.parametrize("unit", list(UNITS))
@pytest.mark.parametrize(
    ("by", "bits", "sinks", "local", "both"),
    [
        ("qk", 4, 0, 0, False),
        ("qk", 4, 0, 0, True),
        ("q", 2, 2, 3, False),
        ("q", 2, 2, 3, True),
        ("k", 8, 0, 1, False),
        ("qk", 16, 0, 0, True),
    ],
)
def test_double_sparsity_scores_a_few_channels_in_a_few_bits(unit, by, bits, sinks, local, both):
    q, k, view, segment = problem()
    method = DoubleSparsity(
        dense_upto=0, k=20, by=by, bits=bits, source="prompt", unit=unit, sinks=sinks, local=local, quantize_query=both
    )
    selection = method.select_decode(Query.of(q[:, -1:], view, layer=5), method.begin(segment))
    otherwise = 0
    for heads, got in zip(UNITS[unit], selection.lists()):
        g = heads[0] // 2
        means_q = [sum(float(q[h, r, c].abs()) for h in (2 * g, 2 * g + 1) for r in range(80, 120)) for c in range(32)]
        means_k = [float(k[g, :, c].abs().sum()) for c in range(32)]
        weight = {"q": means_q, "k": means_k, "qk": [a * b for a, b in zip(means_q, means_k)]}[by]
        channels = sorted(range(32), key=lambda c: (-weight[c], c))[:8]
        scores = label_scores(q, k, channels, heads, bits, both)
        forced = {*range(sinks), *range(120 - local, 120)}
        assert got.tolist() == top(scores, 20, forced)
        otherwise += got.tolist() != top(label_scores(q, k, channels, heads, bits), 20, forced)
    assert (otherwise > 0) == (both and bits < 8)


def test_all_channels_unquantized_are_exact_top_k():
    q, _, view, segment = problem()
    method = DoubleSparsity(dense_upto=0, k=17, channels=1.0, bits=16, source="prompt", unit="q_head")
    ours = method.select_decode(Query.of(q[:, -1:], view, layer=5), method.begin(segment))
    exact = run_method(TopK(k=17), "decode", q, view, 1)[2]
    assert [a.tolist() for a in ours.lists()] == [a.tolist() for a in exact.lists()]


@pytest.mark.parametrize("bits", [4, 16])
def test_labels_that_grow_equal_labels_made_at_once(bits):
    _, k, view, _ = problem(130)
    channels = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(g))[:8] for g in range(2)])
    grown, whole = Labels(channels, bits), Labels(channels, bits)
    for length in (1, 2, 33, 34, 100, 130):
        grown.extend(view.upto(length))
    whole.extend(view)
    q = torch.randn(4, 32)
    torch.testing.assert_close(grown.scores(q), whole.scores(q))
    error = (
        whole.scores(q) - torch.cat([q[g * 2 : g * 2 + 2, channels[g]] @ k[g][:, channels[g]].T for g in (0, 1)])
    ).abs()
    steps = (k.gather(2, channels[:, None].expand(-1, 130, -1)).amax(-1) - k.amin(-1)).max() / (2**bits - 1)
    assert float(error.max()) <= (float(steps) * 0.5 * float(q.abs().sum(1).max()) if bits < 16 else 1e-5)


def test_the_first_layers_are_dense_and_costs_are_counted():
    q, _, view, segment = problem()
    method = DoubleSparsity(dense_upto=0, k=20, source="prompt")
    for layer, counted in ((0, 0), (1, 0), (2, 120)):
        query = Query.of(q[:, -1:], view, layer=layer)
        method.select_decode(query, method.begin(replace(segment, layer=layer)))
        assert (query.cost.scored, query.cost.estimated) == (0, counted)


# --- calibrations


def test_channel_means_are_those_of_all_rows_whatever_the_chunks():
    q, k, v = planted_heads(4, 2, 50, seed=3)
    whole, parts = ChannelMeans(), ChannelMeans()
    whole.add(Chunk.of(q, KVView.from_tensors(k, v)))
    for first, last in ((0, 7), (7, 8), (8, 50)):
        parts.add(Chunk.of(q[:, first:last], KVView.from_tensors(k[:, :last], v[:, :last])))
    for name in ("q", "k"):
        torch.testing.assert_close(whole.result()[name], parts.result()[name])
    assert float(whole.result()["k"][1, 3]) == pytest.approx(sum(abs(x) for x in k[1, :, 3].tolist()) / 50, rel=1e-5)
    both = [*q[2, :, 3].tolist(), *q[3, :, 3].tolist()]
    assert float(whole.result()["q"][1, 3]) == pytest.approx(sum(abs(x) for x in both) / 100, rel=1e-5)


POLICIES = {
    "channels": ("double_sparsity(dense_upto=0, k=24)", "hshare(heavy=24, sinks=2, local=8, rows=8)"),
    "skew": ("infinigen(dense_upto=0, alpha=1.0)",),
}


@pytest.mark.parametrize("kind", list(POLICIES))
def test_a_missing_calibration_names_its_command_which_makes_it(tmp_path, kind, monkeypatch, capsys):
    from saccade.cli.main import main

    folder = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=2048)
    for policy in POLICIES[kind]:
        with pytest.raises(PolicyError, match=f"saccade calibrate {kind} --model {folder}"):
            make(folder).generate(random_ids(200, seed=1), GREEDY, policy=policy)
    (tmp_path / "text.txt").write_text("the lighthouse keeper counts the waves. " * 30)
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", kind, "-m", str(folder), "-f", str(tmp_path / "text.txt"), "--tokens", "300"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == str(folder / "calibration" / f"{kind}.safetensors")
    llm = make(folder)
    for policy in POLICIES[kind]:
        output = llm.generate(random_ids(200, seed=1), GREEDY, policy=policy)[0]
        assert len(tokens(output)) == 10
        assert output.report["decode"]["density"] < 0.9
        assert output.report["decode"]["keys_estimated"] > 0
    assert tokens(llm.generate(random_ids(50, seed=1), GREEDY)[0])  # the folder still loads and runs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["masks"], "calibration 'masks' is unknown; known: channels, locality, patterns, skew"),
        (["skew", "--tokens", "1"], "tokens=1 must"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(arguments, says, capsys):
    from saccade.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_calibration_of_another_model_is_refused(tmp_path):
    from saccade.models.calibration import save_calibration

    folder = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=2048, head_dim=12)
    save_calibration(folder, "channels", [{"q": torch.ones(2, 99)} for _ in range(3)])
    with pytest.raises(PolicyError, match=r"another model.*saccade calibrate channels"):
        make(folder).generate(random_ids(20, seed=1), GREEDY, policy="double_sparsity")

    def stored(**odd):
        """Good tensors, but for those of layer 1."""
        layers = [{name: torch.ones(2, 12) for name in "qk"} for _ in range(3)]
        layers[1] = {name: one for name, one in {**layers[1], **odd}.items() if one is not None}
        save_calibration(folder, "channels", layers)

    for odd in ({"k": None}, {"k": torch.ones(2, 12, 1)}, {"x": torch.ones(2, 12)}, {"q": torch.ones(2)}):
        stored(**odd)
        with pytest.raises(PolicyError, match="another model"):
            make(folder).generate(random_ids(20, seed=1), GREEDY, policy="double_sparsity")
    for odd in (torch.full((2, 12), torch.nan), torch.ones(2, 12).double()):
        stored(k=odd)
        with pytest.raises(PolicyError, match=r"1\.k holds what are no finite float32 numbers; make it again"):
            make(folder).generate(random_ids(20, seed=1), GREEDY, policy="double_sparsity")
    (folder / "calibration" / "channels.safetensors").write_bytes(b"nothing")
    with pytest.raises(PolicyError, match="cannot be used"):
        make(folder).generate(random_ids(20, seed=1), GREEDY, policy="hshare")


# --- HShare


def test_donors_are_the_most_alike_and_chains_end():
    alike = torch.tensor([[0.0, 0, 0, 0], [0.9, 0, 0, 0], [0.1, 0.8, 0, 0], [0.3, 0.7, 0.2, 0]])
    assert donors(alike, 0) == [0, 1, 2, 3]
    assert donors(alike, 1) == [0, 0, 2, 3]
    # 1 takes part no more: its column, with 0.8 and 0.7, is out; 3 -> 0 is next, then 2 -> 0
    assert donors(alike, 2) == [0, 0, 2, 0]
    assert donors(alike, 3) == [0, 0, 0, 0]
    chained = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0.1, 0.9, 0]])
    assert donors(chained, 1) == [0, 1, 1]
    assert donors(chained, 2) == [0, 0, 0]  # 2 -> 1 -> 0


def hshare_steps(method: HShare, q, k, v, prompt: int, n: int):
    """(selection, query) of every decode step from a prompt of ``prompt`` keys on."""
    view = KVView.from_tensors(k[:, :prompt], v[:, :prompt])
    state = method.begin(Chunk.of(q[:, prompt - method.rows : prompt], view))
    for row in range(prompt, n):
        view = KVView.from_tensors(k[:, : row + 1], v[:, : row + 1])
        query = Query.of(q[:, row : row + 1], view, step=row - prompt)
        yield method.select_decode(query, state), query


@pytest.mark.parametrize("every", [1, 2, 3])
def test_sets_are_retrieved_at_multiples_and_reused_with_what_appeared_since(every):
    q, k, v = planted_heads(4, 2, 112, seed=4)
    method = HShare(heavy=10, sinks=3, local=6, every=every, head_share=1.0, source="exact", unit="q_head", rows=4)
    made: list[tuple[list[int], int]] = [([], 0)] * 4
    for selection, query in hshare_steps(method, q, k, v, 100, 112):
        n = query.shape.k_len
        fresh = n % every == 0 or n == 101
        for head, got in enumerate(selection.lists()):
            if fresh:
                logits = (q[head, n - 1] @ k[head // 2, :n].T).tolist()
                best = sorted(range(3, n - 6), key=lambda i: (-logits[i], i))[:10]
                made[head] = best, n - 6
            best, since = made[head]
            assert got.tolist() == sorted([*range(3), *best, *range(since, n)])
        assert query.cost.searches == (4 if fresh else 0)
        assert query.cost.scored == (n if fresh else 0)


def test_heads_that_look_alike_share_one_set():
    """Heads 0 and 1 ask the same, and so do 2 and 3: with half of them sharing, 1 takes 0's and 3 takes 2's."""
    _, k, v = planted_heads(4, 1, 90, seed=5)
    q = torch.randn(4, 90, 32, generator=torch.Generator().manual_seed(5))
    q[1], q[3] = q[0], q[2]
    q[1, -1], q[3, -1] = q[2, -1], q[0, -1]  # but for the step itself
    method = HShare(heavy=10, sinks=0, local=4, head_share=0.5, source="exact", unit="q_head", rows=8)
    (selection, query), *_ = hshare_steps(method, q, k, v, 89, 90)
    lists = [part.tolist() for part in selection.lists()]
    assert lists[1] == lists[0]
    assert lists[3] == lists[2]
    assert lists[0] != lists[2]
    assert query.cost.searches == 2
    assert query.cost.scored == 45


def test_layers_that_look_alike_share_their_sets():
    """Layers 0 and 2 see the same prompt; with a third of the layers sharing, 2 takes what 0 retrieves each time."""
    data = [planted_heads(4, 2, 90, seed=seed) for seed in (6, 7, 6)]
    method = HShare(heavy=10, sinks=2, local=4, every=2, head_share=1.0, layer_share=0.67, source="exact", rows=8)
    states: list = [None] * 3
    for layer, (q, k, v) in enumerate(data):
        view = KVView.from_tensors(k[:, :88], v[:, :88])
        states[layer] = method.begin(Chunk.of(q[:, 80:88], view, layer=layer, layers=3, states=states))
    assert [state.layer_donor for state in states] == [None, None, 0]
    assert all(state.critical is None for state in states)
    for n in (89, 90):
        read = []
        for layer, (q, k, v) in enumerate(data):
            asked = q if layer < 2 else -q  # whatever layer 2 itself would ask
            query = Query.of(
                asked[:, n - 1 : n], KVView.from_tensors(k[:, :n], v[:, :n]), layer=layer, layers=3, states=states
            )
            read.append([part.tolist() for part in method.select_decode(query, states[layer]).lists()])
            assert query.cost.searches == (0 if layer == 2 else 4)
        assert read[2] == read[0] != read[1]


@pytest.mark.parametrize("policy", ["hshare(heavy=24, sinks=2, local=8, rows=8, source=prompt, layer_share=0.34)"])
def test_shared_layers_in_the_engine_survive_a_second_turn_and_a_recomputation(tiny_llama, policy):
    llm, answers = make(tiny_llama), []
    for dropped in (False, True):
        with llm.session(policy) as session:
            session.generate(random_ids(150, seed=1), GREEDY)
            if dropped:
                session.sequence.drop_kv()
            output = session.generate(random_ids(40, seed=2), GREEDY)
            answers.append(tokens(output))
    assert answers[0] == answers[1]
    # 3 layers, of which 1 retrieves, at every second length
    assert output.report["decode"]["retrievals"] < 3 * 10
    assert output.report["decode"]["density"] < 0.5


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DoubleSparsity, {"k": 0}),
        (DoubleSparsity, {"channels": 0}),
        (DoubleSparsity, {"bits": 5}),
        (DoubleSparsity, {"by": "v"}),
        (DoubleSparsity, {"source": "file"}),
        (DoubleSparsity, {"unit": "layer"}),
        (DoubleSparsity, {"dense_layers": -1}),
        (HShare, {"heavy": 0}),
        (HShare, {"local": 0}),
        (HShare, {"every": 0}),
        (HShare, {"head_share": 0}),
        (HShare, {"layer_share": 1.5}),
        (HShare, {"source": "labels"}),
        (HShare, {"rows": 0}),
    ],
)
def test_bad_options(kind, options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        kind(**options)
