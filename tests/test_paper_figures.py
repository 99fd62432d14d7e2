"""The statistics of benchmarks/paper_figures.py against loops over tiny tensors, and the page of their rows."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

import pytest
import torch
from engine_helpers import make
from tiny_models import random_ids

from saccade.engine.observing import observing
from saccade.kv.view import KVView
from saccade.methods.policy import Policy, parse_method
from saccade.outputs import finished

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import paper_captures
import paper_figures
import paper_measures
import paper_page
import paper_prefill
import paper_stats as stats


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_sets(*shape: int, share: float = 0.3, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=rng(seed)) < share


def test_history_is_what_steps_before_read_by_place_and_by_distance():
    heads, steps, n, back = 2, 7, 13, 3
    sets = drawn_sets(heads, steps, n)
    position, distance = stats.history(sets, back)
    for head in range(heads):
        for step in range(back, steps):
            at, moved = set(), set()
            for ago in range(1, back + 1):
                keys = sets[head, step - ago].nonzero()[:, 0].tolist()
                at |= set(keys)
                moved |= {key + ago for key in keys if key + ago < n}
            assert set(position[head, step - back].nonzero()[:, 0].tolist()) == at
            assert set(distance[head, step - back].nonzero()[:, 0].tolist()) == moved


@pytest.mark.parametrize("distance", [1, 2])
def test_near_keys_and_clusters_are_those_of_a_loop(distance):
    before, after = drawn_sets(5, 40, seed=1), drawn_sets(5, 40, seed=2)
    after[4] = False  # nothing at all
    close, met = stats.near(after, distance), stats.clusters_met(before, after, distance)
    for row in range(5):
        keys, given = after[row].nonzero()[:, 0].tolist(), before[row].nonzero()[:, 0].tolist()
        near = [any(0 < abs(key - other) <= distance for other in keys) for key in keys]
        assert close[row] == pytest.approx(sum(near) / max(1, len(keys)))
        groups: list[list[int]] = []
        for key in keys:
            if groups and key - groups[-1][-1] <= distance:
                groups[-1].append(key)
            else:
                groups.append([key])
        hit = [any(abs(key - other) <= distance for key in group for other in given) for group in groups]
        assert met[row] == pytest.approx(sum(hit) / max(1, len(groups)))


def test_spread_keeps_within_the_keys():
    mask = torch.tensor([[True, False, False, False, True]])
    assert stats.spread(mask, stats.NEIGHBOURS).tolist() == [[True, True, True, True, True]]
    assert stats.spread(mask, (2,)).tolist() == [[True, False, True, False, True]]


def test_line_share_counts_the_heaviest_columns_and_diagonals_once():
    rows, n = torch.tensor([9, 14, 19]), 20
    distance = rows[:, None] - torch.arange(n)
    weights = torch.rand(3, n, generator=rng(3), dtype=torch.float64) * (distance >= 0)
    sums = {("column", key): float(weights[:, key].sum()) for key in range(n)}
    for back in range(n):
        sums["diagonal", back] = float(weights[distance == back].sum())
    best = sorted(sums, key=lambda line: -sums[line])[:4]
    kept = sum(
        float(weights[row, key])
        for row in range(3)
        for key in range(n)
        if distance[row, key] >= 0 and (("column", key) in best or ("diagonal", int(distance[row, key])) in best)
    )
    assert stats.line_share(weights, distance, 0.1) == pytest.approx(kept / float(weights.sum()))


def test_bounds_of_pages_and_the_best_mass():
    q, keys = torch.randn(3, 8, generator=rng(4)), torch.randn(21, 8, generator=rng(5))
    scores = stats.page_scores(q, keys, 4)
    products = q @ keys.T
    assert (scores >= products - 1e-5).all()
    for key in range(21):
        page = keys[key // 4 * 4 : key // 4 * 4 + 4]
        bound = torch.maximum(q * page.amin(0), q * page.amax(0)).sum(-1)
        torch.testing.assert_close(scores[:, key], bound)
    weights = torch.softmax(products.double(), -1)
    for count in (0, 1, 5, 21):
        torch.testing.assert_close(stats.best_masses(weights)[:, count], weights.topk(count, -1).values.sum(-1))
    assert stats.variation(weights[0], weights[1]) == pytest.approx(float((weights[0] - weights[1]).clamp(min=0).sum()))


def test_patterns_of_intervals_are_sums_of_their_steps():
    weights, shares = (
        torch.rand(7, 5, generator=rng(6)),
        torch.tensor([0.0, 0.05, 0.051, 0.9, 0.91, 0.97, 1.0]).double(),
    )
    sums, high = stats.by_interval(weights.double(), shares.round(decimals=6), 0.05)
    groups = [[0, 1], [2], [3], [4], [5, 6]]  # (0, 0.05], (0.05, 0.1], (0.85, 0.9], (0.9, 0.95], (0.95, 1]
    torch.testing.assert_close(sums, torch.stack([weights[group].sum(0) for group in groups]).double())
    assert high.tolist() == [False, False, False, True, True]


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return make(tiny_llama)


def test_own_rows_are_the_greedy_answer(llm):
    text = "the quick brown fox jumps over the lazy dog " * 20
    given = paper_captures.tokens_of(llm, text, 48, 8, own=False)
    own = paper_captures.tokens_of(llm, text, 48, 8, own=True)
    params = paper_captures.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (answer,) = llm.generate([given[:40]], params, policy="dense")
    assert own == given[:40] + answer.outputs[0].token_ids
    assert own != given


@pytest.fixture(scope="module")
def run(llm):
    return paper_captures.captured(llm, random_ids(200, seed=7), 24, None)


def test_a_capture_has_the_attention_that_ran(run, llm):
    ids, seen = random_ids(200, seed=7), {}

    def look(call):
        if call.phase == "decode":
            seen[call.layer, call.selection.shape.q_start] = call.out[:, 0].double().clone()

    message = paper_captures.AddRequest(
        paper_captures.new_request_id(),
        ids,
        paper_captures.SamplingParams(temperature=0, max_tokens=1),
        Policy(),
        decoded=24,
    )
    with observing(llm.engine, look), llm.loop.asked([message]) as streams:
        finished(streams)
    assert run.context == 176
    for layer in run.layers:
        out = layer.outputs(layer.weights(run.steps))
        for at, row in enumerate(run.steps.tolist()):
            torch.testing.assert_close(out[:, at], seen[layer.number, row], atol=1e-5, rtol=1e-4)


def test_methods_decode_over_it_as_they_say(run):
    layer = run.layers[1]
    weights = layer.weights(run.steps)
    for at, step in enumerate(paper_captures.decoded(run, layer, parse_method("topk(k=9, unit=q_head)"))):
        own = weights[:, at, : step.row + 1]
        assert torch.equal(step.mask(), stats.heaviest(own, 9))
    ratio = {}
    for s in (1, 4):
        method = parse_method(f"cis(k=16, sinks=0, local=1, tau=-1, s={s})")
        ratio[s] = [step.query.cost.searches / len(layer.q) for step in paper_captures.decoded(run, layer, method)]
    assert ratio[1] == [1] * 24
    assert ratio[4] == [float(step % 4 == 0) for step in range(24)]


def test_every_part_measures_and_the_bias_bounds_what_is_lost(run):
    found = paper_measures.measure(run, list(paper_measures.PARTS), 64)
    assert found
    by_figure = defaultdict(set)
    for (figure, what), values in found.items():
        by_figure[figure].add(what)
        assert all(torch.isfinite(one.double()).all() for one in values), (figure, what)
    least = torch.cat(found["PrHS Fig. 1b", "top-k oracle"]).double().mean()
    for name in ("CIS, r=1", "Quest", "H2O", "SnapKV", "shared for 2 steps", "random keys"):
        lost = torch.stack([one.double() for one in found["PrHS eq. 8 mass dropped", name]])
        assert (lost >= -1e-12).all()
        assert torch.cat(found["PrHS Fig. 1b", name]).double().mean() > least
    for one in found["PrHS eq. 8 beyond the oracle's", "top-k oracle"]:
        torch.testing.assert_close(one, torch.zeros_like(one), atol=1e-9, rtol=0)


def test_what_methods_take_for_the_weights_is_a_distribution_that_bounds_what_they_drop(run):
    """PrHS, Lemma 3: the best keys of a distribution drop at most the oracle's mass and twice its distance."""
    layer = run.layers[2]
    weights = layer.weights(run.steps)
    best = stats.best_masses(weights)
    known = 0
    for name, text in paper_measures.methods(64).items():
        surrogate = paper_measures.surrogate_of(parse_method(text), layer, run)
        if surrogate is None:
            continue
        known += 1
        for at, step in enumerate(paper_captures.decoded(run, layer, parse_method(text))):
            guess = surrogate(step, weights)
            assert guess.shape == (4, step.row + 1)
            assert (guess >= 0).all()
            torch.testing.assert_close(guess.sum(-1), torch.ones(4, dtype=torch.float64))
            own = weights[:, at, : step.row + 1]
            dropped = 1 - (own * stats.heaviest(guess, 20)).sum(-1)
            assert (dropped <= 1 - best[:, at, 20] + 2 * stats.variation(own, guess) + 1e-9).all(), name
    assert known >= 12


DOCS = Path(__file__).parents[1] / "docs"
TRIPLE = re.compile(r"(?<![\d./])(\d+(?:\.\d+)?) / (\d+(?:\.\d+)?) / (\d+(?:\.\d+)?)( %)?(?![\d./])")


def means() -> dict[tuple[str, ...], dict[str, float]]:
    """By figure, line, length and kind of rows the models' means over texts."""
    found = defaultdict(lambda: defaultdict(list))
    for row in paper_figures.read_rows(DOCS / "results/paper-figures.csv"):
        if row["mean"]:
            length = "" if row["figure"].endswith("perplexity") else row["length"]  # which has one a model
            key = row["figure"], row["what"], length, row["rows"]
            found[key][row["model"]].append(float(row["mean"]))
    return {key: {model: fmean(values) for model, values in own.items()} for key, own in found.items()}


def test_the_page_is_that_of_its_rows():
    rows = paper_figures.read_rows(DOCS / "results/paper-figures.csv")
    assert (DOCS / "results/paper-figures.md").read_text(encoding="utf-8") == paper_page.page(rows)


def claims() -> dict[str, list[list[str]]]:
    """The rows of every claim, as cells, by the heading of their table."""
    found: dict[str, list[list[str]]] = {}
    for page in ("claims-prefill.md", "claims-decode.md"):
        for part in (DOCS / "results" / page).read_text(encoding="utf-8").split("\n## Every claim of ")[1:]:
            title, _, body = part.partition("\n")
            table = [line for line in body.splitlines() if line.startswith("| ") and not line.startswith("| claim")]
            found[title] = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table]
    return found


def test_figures_of_three_models_in_the_claims_are_measured_ones():
    """``0.69 / 0.69 / 0.58``: SmolLM2, Qwen2.5-Coder and Gemma-3 of one line of the data."""
    known = [own for own in means().values() if len(own) == len(paper_page.MODELS)]
    rows = TRIPLE.findall("\n".join(cell for table in claims().values() for row in table for cell in row))
    assert len(rows) > 60
    said = TRIPLE.findall((DOCS / "claims.md").read_text(encoding="utf-8"))
    assert said
    for *numbers, percent in [*rows, *said]:
        factor = 100 if percent else 1
        assert any(
            all(
                abs(float(text) - factor * own[model]) <= 0.5000001 * 10 ** -len(text.partition(".")[2])
                for text, model in zip(numbers, paper_page.MODELS)
            )
            for own in known
        ), " / ".join(numbers)


def test_every_row_of_the_claims_says_on_what_it_was_measured():
    rows = [cells for table in claims().values() for cells in table]
    assert len(rows) > 70
    kinds = {"SmolLM2", "Qwen", "Gemma", "toy", "synthetic", "random weights", "costs"}
    for cells in rows:
        assert len(cells) == 6, cells[0]
        on = {re.sub(r" \(.*?\)", "", one) for one in cells[3].split(", ")}
        assert on <= kinds or on == {"-"}, cells[0]
        if on == {"-"}:
            assert cells[4] in ("*larger*", "*not measured*", "*not built*", "*a picture*", "no"), cells[0]
            assert cells[5], cells[0]


def test_verdicts_are_counted_right():
    """The summary's table counts the verdicts of the rows; its first paragraph adds them up."""
    verdicts = ("yes", "partly", "no")
    counted = {}
    for title, rows in claims().items():
        own = Counter(cells[4] if cells[4] in verdicts else "other" for cells in rows)
        counted[title.lower()] = [own[one] for one in (*verdicts, "other")]
    page = (DOCS / "claims.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\w+)[^|]*\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert {name.lower(): list(map(int, numbers)) for name, *numbers in table} == counted
    yes, partly, no, other = map(sum, zip(*counted.values()))
    said = re.search(r"papers' (\d+) claims.*? (\d+) hold.*?, (\d+) in direction.*? for (\d+)\s", page, re.DOTALL)
    assert [*map(int, said.groups())] == [yes + partly + no + other, yes, partly, no]


def test_lines_and_what_a_selection_keeps_are_those_of_loops(run):
    layer, rows = run.layers[0], torch.tensor([9, 60, 130])
    weights = layer.weights(rows)[..., :150]
    lines = paper_prefill.lines_of(weights, rows, 40)
    for head in range(len(weights)):
        columns, distances = [0.0] * 40, [0.0] * 40
        for at, row in enumerate(rows.tolist()):
            for key in range(row + 1):
                weight = float(weights[head, at, key])
                if key < 40:
                    columns[key] += weight
                if row - key < 40:
                    distances[row - key] += weight
        assert lines[head].tolist() == pytest.approx([*columns, *distances])
    chunk = paper_captures.prompt_chunk(layer, KVView.from_tensors(layer.k, layer.v), 150)
    picked = parse_method("streaming(sinks=3, window=20)").select_prefill(chunk)
    mass = paper_prefill.kept(picked, weights, rows)
    for at, row in enumerate(rows.tolist()):
        read = [key for key in range(row + 1) if key < 3 or row - key < 20]
        torch.testing.assert_close(mass[:, at], weights[:, at, read].sum(-1))


def test_two_inputs_have_all_lines_in_common_if_they_are_one(run):
    found = defaultdict(list)
    paper_prefill.inputs(run, run, found)
    ((_, values),) = found.items()
    assert len(values) == len(run.layers)
    assert all((one == 1).all() for one in values)
