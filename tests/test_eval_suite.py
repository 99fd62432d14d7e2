"""The offline suite: answers are worked out again from the text, by a reader that shares no code with the maker."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest

from saccade.errors import RequestError
from saccade.eval.metrics import METRICS, score
from saccade.eval.samples import Sample, Turn
from saccade.eval.suite import DROPPED, TASKS, make, worlds
from saccade.eval.suite.rng import Rng
from saccade.models.reference import vocabulary as v
from train.tokenizer import build_tokenizer

ALL = {**TASKS, **DROPPED}
KEY = r"([a-z]+ [a-z]+)"


def read(context: str, question: str) -> list[str]:
    """The answers, by regular expressions over what a person would read."""
    command, rest = re.fullmatch(r"\n\? ([a-z]+) ?(.*)\n", question).groups()  # type: ignore[union-attr]
    if command in ("value", "values", "latest", "find"):
        said = re.findall(rf"\n {KEY}:([0-9a-f]+);", context)
        values = {key: [value for other, value in said if other == key] for key, _ in said}
        if command == "latest":
            return values[rest][-1:]
        return values[rest] if command != "find" else [value for key in rest.split(", ") for value in values[key]]
    if command in ("names", "equal"):
        parent = dict(re.findall(r"\n([A-Z]{2})=([A-Z]{2}|\d{4});", context))
        found = [rest]
        if command == "equal":
            while found[-1] in parent:
                found.append(parent[found[-1]])
        else:
            child = {value: name for name, value in parent.items()}
            while found[-1] in child:
                found.append(child[found[-1]])
        return found[1:]
    if command in ("often", "common"):
        nouns = Counter(word for word in context.split() if word in NOUNS)
        return [noun for noun, _ in nouns.most_common(3 if command == "often" else 5)]
    if command == "code":
        kind = re.search(rf"\n {rest} ([a-z]+):\?;", context).group(1)  # type: ignore[union-attr]
        return [f"{kind}:{re.search(rf' rule {kind}>([A-Z]);', context).group(1)}"]  # type: ignore[union-attr]
    if command == "copy":
        return [re.search(rf"\n\[ {rest}\] ([^\n]*)\n", context).group(1)]  # type: ignore[union-attr]
    if command == "row":
        return [re.search(rf"\n {rest}\| ([^\n]*)\n", context).group(1)]  # type: ignore[union-attr]
    assert command == "topic"
    return [key for key, text in re.findall(rf"\n\[ {KEY}\]([^\n]*)\n", context) if rest in re.findall("[a-z]+", text)]


NOUNS = {v.text([index]).strip() for index in range(v.NOUN, v.FILLER)}


def conversation(sample: Sample) -> list[tuple[str, Turn]]:
    """Each turn with all context that has been given when it is answered."""
    out, before = [], ""
    for turn in sample.turns:
        before += "".join(turn.context)
        out.append((before, turn))
    return out


@pytest.mark.parametrize("task", ALL)
@pytest.mark.parametrize("length", [256, 700, 2048, 8192])
def test_a_reader_finds_the_answers(task: str, length: int) -> None:
    for index in range(6):
        for context, turn in conversation(make(task, length, index, seed=3)):
            assert read(context, turn.question) == list(turn.answers), (task, index, turn.question)


@pytest.mark.parametrize("task", ALL)
def test_the_gold_reply_scores_one_and_another_samples_reply_does_not(task: str) -> None:
    turns = [make(task, 1024, index).turns[-1] for index in range(4)]
    for turn in turns:
        assert turn.metric in METRICS
        assert score(turn.metric, turn.meta["gold"], turn.answers) == 1.0
        wrong = [other.meta["gold"] for other in turns if other is not turn]
        assert min(score(turn.metric, reply, turn.answers) for reply in wrong) < 1.0


@pytest.mark.parametrize("task", ALL)
def test_the_conversation_takes_the_length_in_tokens(task: str) -> None:
    tokenizer = build_tokenizer()
    for length in (256, 1000, 4096):
        sample = make(task, length, 1)
        messages = []
        for turn in sample.turns:
            messages += [{"role": "user", "content": turn.message()}]
            messages += [{"role": "assistant", "content": turn.meta["gold"]}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert len(ids) == length, (task, length)
        assert max(ids) < v.SIZE


@pytest.mark.parametrize("task", ALL)
def test_samples_depend_on_their_coordinates_alone(task: str) -> None:
    one = make(task, 512, 5, seed=2)
    assert make(task, 512, 5, seed=2) == one
    assert Sample.from_dict(one.as_dict()) == one
    others = [make(task, 512, 6, seed=2), make(task, 512, 5, seed=3), make(task, 513, 5, seed=2)]
    assert all(other.turns != one.turns for other in others)


def test_the_bytes_are_those_of_this_version() -> None:
    """A change of generator, word list or random stream has to come with a new suite version."""
    import hashlib

    text = "".join(turn.message() + "|".join(turn.answers) for task in TASKS for turn in make(task, 512, 0).turns)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == FINGERPRINT


FINGERPRINT = "4248a8d73e50c308"


def test_depths_are_spread_over_the_context() -> None:
    for task in ("single", "multikey", "multikey_all"):
        places = []
        for index in range(10):
            turn = make(task, 2048, index).turns[0]
            text = "".join(turn.context)
            places.append(text.index(f":{turn.answers[0]};") / len(text))
        assert [int(10 * place) for place in sorted(places)] == pytest.approx(list(range(10)), abs=1)


def test_hard_negatives_share_a_word_with_another_key() -> None:
    keys = re.findall(rf"\n {KEY}:", "".join(make("multikey_all", 4096, 0).turns[0].context))
    assert len(keys) > 400
    assert len(set(keys)) == len(keys)
    adjectives, nouns = Counter(key.split()[0] for key in keys), Counter(key.split()[1] for key in keys)
    sharing = sum(adjectives[a] > 1 or nouns[n] > 1 for a, n in map(str.split, keys))
    assert sharing > 0.4 * len(keys)


def test_a_frequent_word_stands_out_by_a_fifth() -> None:
    for task, ranks in (("words", 3), ("common", 5)):
        for length in (512, 4096):
            text = "".join(make(task, length, 2).turns[0].context)
            counts = [count for _, count in Counter(w for w in text.split() if w in NOUNS).most_common(ranks + 1)]
            assert all(5 * higher >= 6 * lower for higher, lower in pairwise(counts)), counts


def test_three_turns_ask_about_turns_so_far_and_are_paired_over_positions() -> None:
    for index in range(8):
        begin, middle, end = (make(f"three_turn_{position}", 1024, index) for position in ("begin", "middle", "end"))
        assert [t.answers for t in begin.turns] == [t.answers for t in middle.turns] == [t.answers for t in end.turns]
        assert ["".join(t.context) for t in begin.turns] == ["".join(t.context) for t in end.turns]
        for turn in begin.turns:
            assert turn.message().startswith(turn.question)
        for turn in middle.turns:
            assert 0.2 < turn.message().index(turn.question) / len(turn.message()) < 0.8
        for turn in end.turns:
            assert turn.message().endswith(turn.question)


def test_an_update_changes_the_answer() -> None:
    first, second = make("update", 1024, 4).turns
    assert first.metric == second.metric == "exact"
    for context, turn in conversation(make("update", 1024, 4)):
        assert read(context, turn.question) == list(turn.answers)
    changed = [read(context, second.question) for context, _ in conversation(make("update", 1024, 4))]
    assert changed[0] != changed[1] == list(second.answers)


def test_training_never_shows_the_held_out_keys() -> None:
    from saccade.eval.suite.filler import prose

    kept = worlds.Plan(Rng("a"), 1000, 4, prose("t"), held_out=False).keys(5000)
    numbers = [(a - v.ADJECTIVE) * (v.FILLER - v.NOUN) + n - v.NOUN for a, n in kept]
    assert len(set(numbers)) == 5000
    assert not any(worlds.held_out(number) for number in numbers)
    share = sum(map(worlds.held_out, range(36_000))) / 36_000
    assert share == pytest.approx(0.1, abs=0.01)


def test_bad_requests_name_the_way_out() -> None:
    with pytest.raises(RequestError, match=r"'haystack' is unknown; known: single, "):
        make("haystack", 512, 0)
    with pytest.raises(RequestError, match=r"length=64 must be from 256 to"):
        make("single", 64, 0)


def test_the_random_stream_is_pinned() -> None:
    """PCG64 of a BLAKE2b key, worked out again from its definition."""
    import hashlib

    import numpy as np

    digest = hashlib.blake2b(b"a|1", digest_size=16).digest()
    raw = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(256)
    expected = [(int(word) >> 11) / 2**53 for word in raw]
    rng = Rng("a", 1)
    assert [rng.random() for _ in range(256)] == expected[::-1]
    assert sorted(Rng("b").distinct(10, 10)) == list(range(10))
    counts = Counter(Rng("c", i).below(4) for i in range(2000))
    assert all(400 < counts[value] < 600 for value in range(4))
