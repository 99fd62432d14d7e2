"""Scorers against values worked out by hand, with the originals' odd cases; statistics against brute force."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from saccade.errors import RequestError
from saccade.eval import stats
from saccade.eval.metrics import METRICS, score
from saccade.eval.metrics.longbench import (
    classification_score,
    code_sim_score,
    count_score,
    dataset2metric,
    normalize_answer,
    qa_f1_score,
    retrieval_score,
    rouge_score,
)
from saccade.eval.metrics.longgen import LINE_METRICS
from saccade.eval.metrics.rouge import rouge_l, rouge_l_recall
from saccade.eval.samples import Turn
from saccade.eval.score import _score


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("The Cat!", "a cat", 1.0),  # case, punctuation and articles go
        ("co-op", "coop", 1.0),  # nothing is put where punctuation was
        ("co op", "co-op", 0.0),
        ("red red blue", "red blue blue", 2 / 3),  # a bag: red once, blue once, of three each
        ("cat", "the cat sat", 2 * 1 * 0.5 / 1.5),  # P 1, R 1/2
        ("", "", 0.0),
        ("the", "a", 0.0),  # both empty after normalising
        ("theater", "the ater", 0.0),  # articles only as whole words
        ("“cat”", "cat", 0.0),  # only ASCII punctuation goes
    ],
)
def test_f1(prediction, truth, expected):
    assert qa_f1_score(prediction, truth, all_classes=None) == pytest.approx(expected)


def test_normalising_puts_a_space_for_an_article_and_collapses():
    assert normalize_answer(" An  apple,\tthe a pie ") == "apple pie"


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("the the the", "the", 1.0),  # distinct words
        ("a b. c d", "c d. a b", 1.0),  # a union over sentence pairs
        ("The cat", "the cat", 0.5),  # case counts
        ("", "a", 0.0),
        ("...", "a", 0.0),
        ("a", ".", 0.0),
        (" ", "a", 0.0),  # one empty word
        ("a  b\n", "a b", 1.0),
        ("a b c d", "a c", 2 * 0.5 * 1 / 1.5),  # P 2/4, R 2/2
        ("b a", "a b", 0.5),  # an LCS of one word
        ("a.b", "a b", 1.0),  # split without white space
    ],
)
def test_rouge_l(prediction, truth, expected):
    assert rouge_score(prediction, truth) == pytest.approx(expected, abs=1e-7)
    assert rouge_score(prediction, truth, compat=True) == rouge_score(prediction, truth)


def test_rouge_l_scores_zero_where_the_original_fails_in_recursion():
    numbers = [str(number) for number in range(1200)]
    text = " ".join(numbers)
    assert rouge_l(text, text) == pytest.approx(1.0)
    assert rouge_l(text, text, compat=True) == 0.0
    edge = [" ".join(numbers[:words]) for words in (990, 991)]
    assert [rouge_l(each, each, compat=True) > 0 for each in edge] == [True, False]
    halves = " ".join(numbers[:600]) + ". " + " ".join(numbers[600:])
    assert rouge_l(halves, halves, compat=True) == pytest.approx(1.0)


def _longest_common(x, y):
    """By trying all subsequences of x."""
    for length in range(len(x), -1, -1):
        for chosen in itertools.combinations(x, length):
            rest = iter(y)
            if all(word in rest for word in chosen):
                return length
    raise AssertionError


def test_rouge_recall_is_the_lcs_over_the_reference():
    rng = random.Random(3)
    for _ in range(200):
        prediction = [rng.choice("abcd") for _ in range(rng.randrange(8))]
        truth = [rng.choice("abcd") for _ in range(rng.randrange(1, 9))]
        expected = _longest_common(prediction, truth) / len(truth)
        assert rouge_l_recall(" ".join(prediction), " ".join(truth)) == pytest.approx(expected)
        if len(set(prediction)) == len(prediction) and len(set(truth)) == len(truth) and prediction:
            common = _longest_common(prediction, truth)  # without repeated words F is the textbook's
            assert rouge_l(" ".join(prediction), " ".join(truth)) == pytest.approx(
                2 * common / (len(prediction) + len(truth)), abs=1e-7
            )
    assert rouge_l_recall("a", "") == 0.0


@pytest.mark.parametrize(
    ("prediction", "truth", "classes", "expected"),
    [
        ("City or Date", "City", ["City", "Date", "Color"], 0.5),
        ("Lasting time", "Lasting time", ["a", "time", "La", "Lasting time"], 0.5),  # "time" survives "a"
        ("Lasting time", "Lasting time", ["time", "Lasting time"], 1.0),
        ("city", "City", ["City"], 0.0),  # case counts
        ("Date", "City", ["City", "Date"], 0.0),
        ("", "City", ["City"], 0.0),
    ],
)  # fmt: skip
def test_classification(prediction, truth, classes, expected):
    assert classification_score(prediction, truth, all_classes=classes) == expected


def test_counting_and_retrieval():
    assert count_score("12 of 30", "12") == 0.5
    assert count_score("012", "12") == 0.0
    assert count_score("none", "12") == 0.0
    assert count_score("12 12 3", "12") == pytest.approx(2 / 3)
    assert retrieval_score("Paragraph 7, or 8", "Paragraph 7") == 0.5
    assert retrieval_score("Paragraph 17", "Paragraph 7") == 0.0
    with pytest.raises(RequestError, match="Paragraph N"):
        retrieval_score("7", "7")


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("return x+1", "return x + 1", 0.91),  # 2 * 10 / 22 = 0.909
        ("\n\n```python\n# note\nx = 1 // 2\nx = 2\nx = 3", "x = 2", 1.0),  # the first line without `, # or //
        ("# only", "", 1.0),  # no such line: the empty line equals the empty truth
        ("", "x", 0.0),
        ("ab", "ba", 0.5),
        (" \nx", "x", 0.0),  # a line of one space is the first line
    ],
)
def test_code_similarity(prediction, truth, expected):
    assert code_sim_score(prediction, truth) == expected


def test_longbench_has_a_scorer_for_each_set():
    assert len(dataset2metric) == 17


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "expected"),
    [
        ("string_match_all", "1234567", ["12345678"], 0.0),
        ("string_match_all", "12345678", ["1234567"], 1.0),
        ("string_match_all", " ABC\x00def\n", ["abc", "def", "abcdef"], 2 / 3),
        ("string_match_all", "a\tb", ["a\nb"], 1.0),
        ("string_match_part", "it is PARIS.", ["rome", "paris"], 1.0),
        ("string_match_part", "", ["x"], 0.0),
        ("exact", " a \n b ", ["c", "a b"], 1.0),
        ("exact", "A b", ["a b"], 0.0),
        ("prefix", "12 34 and more", ["12 34"], 1.0),
        ("prefix", "12 345", ["12 34"], 0.0),
        ("prefix", "x.", ["x"], 1.0),
        ("recall", "1234567, 99", ["123456", "99"], 0.5),
        ("recall", "amber\notter; red fox", ["amber otter", "red fox", "red"], 1.0),
        ("recall", "a+b (c)", ["a+b", "(c)", "d"], 2 / 3),
        ("iou", "AB, CD, XX.", ["CD", "AB"], 2 / 3),
        ("iou", "AB CD", ["AB", "CD"], 1.0),
        ("iou", "amber otter, red fox", ["red fox", "blue jay"], 1 / 3),
        ("iou", "AB AB", ["AB"], 1.0),
        ("iou", "", ["AB"], 0.0),
        ("ordered", "AB CD", ["AB", "CD"], 1.0),
        ("ordered", "CD AB", ["AB", "CD"], 0.0),
        ("ordered", "AB, AB, CD", ["AB", "CD"], 0.0),
        ("token_accuracy", "a b x d e f", ["a b c d"], 0.75),
        ("token_accuracy", "b c d", ["a b c d"], 0.0),
        ("token_accuracy", "1234067 then", ["1234567"], 6 / 7),
        ("token_accuracy", "123", ["1234567"], 3 / 7),
        ("token_accuracy", "", ["1234567"], 0.0),
        ("token_accuracy", "x y", ["a b", "x z"], 0.5),
        ("qa_f1_score", "the cat", ["dog", "cat"], 1.0),
        ("rouge_l_recall", "a c", ["a b c d"], 0.5),
        ("code_sim_score", "x = 2", ["x = 2"], 1.0),
    ],
)
def test_registry(metric, prediction, references, expected):
    assert score(metric, prediction, references) == pytest.approx(expected)
    assert METRICS[metric](prediction, references) == score(metric, prediction, references)


def test_options_reach_the_scorer():
    assert score("classification_score", "City or Date", ["City"], all_classes=["City", "Date"]) == 0.5
    text = " ".join(map(str, range(1000)))
    assert score("rouge_score", text, [text], compat=True) == 0.0


def test_bad_input_is_named():
    with pytest.raises(RequestError, match=r"'bleu' is unknown; known: exact, prefix"):
        score("bleu", "x", ["x"])
    with pytest.raises(RequestError, match="at least one"):
        score("exact", "x", [])
    with pytest.raises(RequestError, match="must be a list"):
        score("exact", "x", "x")
    with pytest.raises(RequestError, match="all_classes"):
        score("classification_score", "x", ["x"])


def test_every_metric_stays_between_0_and_1_and_a_perfect_answer_is_right():
    rng = random.Random(0)
    for name in METRICS:
        for _ in range(50):
            references = ["Paragraph " + str(rng.randrange(9)) for _ in range(rng.randrange(1, 4))]
            prediction = " ".join(rng.choice(["Paragraph", "3", "x.", ",", ""]) for _ in range(rng.randrange(6)))
            assert 0.0 <= score(name, prediction, references, all_classes=references) <= 1.0
        only = "7" if name in ("count_score", "first_digits", "first_number") else "Paragraph 7"
        only = "PARAGRAPH" if name in ("holds_word", "names_word") else only
        only = "7. oak: 1 + 1 = 2" if name in LINE_METRICS else only
        said = f"The answer is: {only}" if name == "marked_option" else only
        assert score(name, said, [only], all_classes=[only]) == pytest.approx(1.0)


def test_bootstrap_agrees_with_all_resamples_of_a_small_list():
    values = [0.0, 0.25, 1.0, 0.5, 1.0]
    means = sorted(math.fsum(chosen) / 5 for chosen in itertools.product(values, repeat=5))
    interval = stats.mean_interval(values, resamples=20_000)
    assert interval.mean == pytest.approx(0.55)
    assert interval.n == 5
    below, above = (sum(mean < bound for mean in means) / len(means) for bound in (interval.low, interval.high))
    assert 0.01 < below < 0.04 < 0.95 < above < 0.99  # the exact distribution has ties at both bounds


def test_pairing_cancels_what_is_common_to_both():
    rng = np.random.default_rng(0)
    dense = rng.random(100)
    interval = stats.paired_difference((dense - 0.1).tolist(), dense.tolist())
    assert (interval.low, interval.high) == pytest.approx((-0.1, -0.1))
    apart = stats.mean_interval(dense.tolist())
    assert apart.high - apart.low == pytest.approx(2 * 1.96 * dense.std() / 10, rel=0.1)  # the normal approximation


def test_bootstrap_is_seeded_and_does_not_depend_on_the_step(monkeypatch):
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 0.5]
    whole = stats.mean_interval(values, seed=5, resamples=999)
    monkeypatch.setattr(stats, "_CELLS", 60)
    assert stats.mean_interval(values, seed=5, resamples=999) == whole
    assert stats.mean_interval([0.3], resamples=10).low == 0.3


def test_mcnemar_counts_coin_flips():
    for better, worse in itertools.product(range(6), repeat=2):
        new = [1] * better + [0] * worse + [1, 0]
        old = [0] * better + [1] * worse + [1, 0]
        flips = better + worse
        outcomes = [sum(flip) for flip in itertools.product((0, 1), repeat=flips)]
        extreme = sum(abs(heads - flips / 2) >= abs(better - flips / 2) for heads in outcomes)
        assert stats.mcnemar(new, old) == pytest.approx(extreme / len(outcomes))
    assert stats.mcnemar([], []) == 1.0


def test_statistics_refuse_what_they_cannot_do():
    with pytest.raises(RequestError, match="same samples"):
        stats.paired_difference([1.0], [1.0, 0.0])
    with pytest.raises(RequestError, match="same samples"):
        stats.mcnemar([1.0], [])
    with pytest.raises(RequestError, match=r"0 and 1, not 0\.5"):
        stats.mcnemar([1.0, 0.5], [1.0, 0.0])
    with pytest.raises(RequestError, match="at least one"):
        stats.mean_interval([])
    with pytest.raises(RequestError, match="confidence=95"):
        stats.mean_interval([1.0], confidence=95)


def test_the_first_line_of_few_shot_sets_is_scored_by_the_best_answer():
    turn = Turn((), "?", ("Rome", "Paris"), "qa_f1_score", 4, meta={"first_line": True})
    assert _score(turn, "\nParis\nRome", METRICS["qa_f1_score"]) == 1.0
    assert _score(replace(turn, meta={}), "\nParis\nRome", METRICS["qa_f1_score"]) == pytest.approx(2 / 3)
    classes = {"first_line": True, "all_classes": ["City", "Date"]}
    named = replace(turn, answers=("City",), metric="classification_score", meta=classes)
    assert _score(named, "City\nDate", METRICS["classification_score"]) == 1.0
