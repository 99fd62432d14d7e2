"""The natural tasks: a reader that knows English answers them, lengths are those of the prompts, and what is bad is
named."""

from __future__ import annotations

import json
import re

import pytest
from test_eval_ruler import Templated, count_tokens

from saccade import prose
from saccade.errors import RequestError
from saccade.eval import runner
from saccade.eval.lengths import Lengths, fit
from saccade.eval.metrics import METRICS
from saccade.eval.natural import TASKS, make
from saccade.eval.render import render
from saccade.eval.samples import Sample
from saccade.eval.sources import Given

CHAT, PLAIN = Lengths(count_tokens, Templated(True)), Lengths(count_tokens, Templated(False))


def sample(task: str, index: int = 0, length: int = 2048, seed: int = 0, lengths: Lengths = CHAT, **given) -> Sample:
    return make(task, length, index, seed, lengths=lengths, **given)


def told(text: str) -> dict[str, str]:
    return dict(re.findall(r"The ((?:secret|telephone|favourite|birthplace)[^.]*? of the [^.]*?) is ([^.]+)\.", text))


@pytest.mark.parametrize("lengths", [CHAT, PLAIN], ids=["chat", "plain"])
@pytest.mark.parametrize("task", TASKS)
def test_a_reader_finds_the_answers(task, lengths):
    for index in range(9):
        one = sample(task, index, lengths=lengths)
        read, texts = {}, []
        for turn in one.turns:
            texts.append(turn.message())
            read |= told(turn.message())
            asked = re.search(r"What is the (.+?)\?", turn.question)[1]
            assert turn.answers == (read[asked],)
            for said in (read[asked], f"Sure! The {asked} is {read[asked]}, as the text says.", f'"{read[asked]}"'):
                assert METRICS[turn.metric](said, turn.answers) == 1.0
            others = [value for subject, value in read.items() if subject != asked]
            assert METRICS[turn.metric](" ".join(others) + turn.question + turn.prefix, turn.answers) == 0.0
            if lengths is PLAIN:  # the beginning of the sentence, on a line of its own
                assert turn.prefix == f"\nThe {asked} is"
                assert f"{turn.prefix[1:]} {turn.answers[0]}." in texts[turn.meta["about"]]
            else:
                assert turn.prefix == ""
        assert len(one.turns) == {"facts": 1, "questions": 8}.get(task, 3)
        assert len(read) == {"facts": 4, "questions": 8}.get(task, 12)
        kinds = [subject.split(" of the ")[0] for subject in read]
        assert len(set(kinds)) == 4  # of each as many
        assert len(kinds) == 4 * kinds.count("birthplace")


def test_where_facts_lie_and_what_turns_ask_about():
    deep = [sample("facts", index).turns[0] for index in range(16)]
    for index, turn in enumerate(deep):
        text = turn.context[-1]
        assert text.index(turn.answers[0]) / len(text) == pytest.approx(turn.meta["depth"], abs=0.05)
        assert turn.meta["depth"] == pytest.approx((index % 4 + 0.5) / 4, abs=0.2)  # a quarter of the text each
    many = sample("questions")
    assert many.shared
    assert [turn.context for turn in many.turns[1:]] == [()] * 7
    depths = [turn.meta["depth"] for turn in many.turns]
    assert depths == sorted(depths)
    assert len({turn.answers for turn in many.turns}) == 8
    for position in ("begin", "middle", "end"):
        talks = [sample(f"turns_{position}", index) for index in range(3)]
        assert [turn.position for turn in talks[0].turns] == [position] * 3
        assert [[turn.meta["about"] for turn in talk.turns] for talk in talks] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
        for talk in talks:
            messages = [turn.message() for turn in talk.turns]
            for turn in talk.turns:
                where = [number for number, text in enumerate(messages) if f"is {turn.answers[0]}." in text]
                assert where == [turn.meta["about"]]
            before = [
                message.index(turn.question.strip()) / len(message) for message, turn in zip(messages, talk.turns)
            ]
            low, high = {"begin": (0, 0.01), "middle": (0.35, 0.65), "end": (0.8, 1)}[position]
            assert all(low <= share <= high for share in before)


@pytest.mark.parametrize("length", [512, 2048, 16384])
@pytest.mark.parametrize("lengths", [CHAT, PLAIN, Lengths(count_tokens)], ids=["chat", "plain", "texts"])
@pytest.mark.parametrize("task", TASKS)
def test_the_length_is_that_of_the_conversation(task, lengths, length):
    """Template and answers included: counted here turn by turn, with answers that take all the room they have."""
    for index in range(3 if length < 16384 else 1):
        one = sample(task, index, length, lengths=lengths)
        messages = [count_tokens(turn.message()) for turn in one.turns]
        prefixes = [count_tokens(turn.prefix) for turn in one.turns]
        frame = 0 if lengths.tokenizer is None else 40 if lengths is CHAT else 2
        if one.shared:
            context = count_tokens("".join(one.turns[0].context))
            tokens = context + frame + max(
                count_tokens(turn.question) + prefix + turn.max_new_tokens for turn, prefix in zip(one.turns, prefixes)
            )  # fmt: skip
        else:
            tokens = frame + sum(messages) + sum(prefixes) + sum(turn.max_new_tokens for turn in one.turns)
        assert one.meta["tokens"] == pytest.approx(tokens, abs=2)
        assert 0.99 * length <= one.meta["tokens"] <= length


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_its_key_and_the_tokenizer_alone(task):
    one = sample(task, 2)
    assert sample(task, 2) == one
    assert Sample.from_dict(json.loads(json.dumps(one.as_dict()))) == one
    others = [sample(task, 3), sample(task, 2, seed=1), sample(task, 2, length=2049)]
    assert len({tuple(turn.answers for turn in other.turns) for other in (one, *others)}) == 4


def book(tmp_path, sentences: int, text: str = "Whale number {} swam past the ship, and nobody spoke."):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(text.format(number) for number in range(sentences)), encoding="utf-8")
    return path


@pytest.mark.parametrize("task", TASKS)
def test_a_users_text_is_the_haystack(task, tmp_path):
    """Sentences in the book's order, from a random one on, around its end; a conversation's texts share none."""
    path = book(tmp_path, 500)
    starts = set()
    for index in range(4):
        one = sample(task, index, haystack=f"file:{path}")
        assert 0.99 * 2048 <= one.meta["tokens"] <= 2048
        numbers = [[int(n) for n in re.findall(r"Whale number (\d+)", turn.message())] for turn in one.turns]
        parts = [part for part in numbers if part]
        assert len(parts) == (3 if task.startswith("turns") else 1)
        for part in parts:
            assert part == [(part[0] + step) % 500 for step in range(len(part))]
        assert len({number for part in parts for number in part}) == sum(map(len, parts))
        starts.add(parts[0][0])
    assert len(starts) >= 3


def test_bad_requests_are_named(tmp_path):
    short = book(tmp_path, 20)
    for task, length, haystack, says in (
        ("fact", 2048, "prose", "task='fact' is unknown; known: facts, questions"),
        ("facts", 100, "prose", r"facts at length=100: \d+ tokens at least do not fit the 100 there are"),
        ("facts", 2048, f"file:{short}", r"reaches only \d+ of length=2048 tokens: its text runs out"),
        ("turns_end", 2048, f"file:{short}", "its text runs out"),
        ("facts", 2048, "essays", "haystack='essays' is unknown; known: prose, file:PATH"),
        ("facts", 2048, "file:/nowhere/x.txt", "cannot be read as UTF-8 text"),
    ):
        with pytest.raises(RequestError, match=says):
            sample(task, length=length, haystack=haystack)
    (tmp_path / "zh.txt").write_text("他走了。" * 4000, encoding="utf-8")
    with pytest.raises(RequestError, match="has 1 sentences"):
        sample("facts", haystack=f"file:{tmp_path / 'zh.txt'}")
    with pytest.raises(RequestError, match="natural tasks fit a length to a tokenizer; name its model with --model"):
        runner.prepare(tmp_path / "out", ["natural:facts"], [512], 1)


def test_fitting_takes_few_tries_and_never_leaves_the_budget():
    for per_unit, budget, most in ((1, 1000, None), (1.3, 4096, None), (17, 1000, None), (0.2, 99, None), (3, 900, 50)):
        tried: list[int] = []

        def measure(size: int, per_unit: float = per_unit, tried: list[int] = tried) -> int:
            tried.append(size)
            return 20 + int(per_unit * size)

        size, tokens = fit(measure, budget, 0, most)
        assert tokens == 20 + int(per_unit * size) <= budget
        assert tokens >= 0.99 * budget or size == most or 20 + int(per_unit * (size + 1)) > budget
        assert len(tried) <= 12
        assert len(tried) == len(set(tried))
    with pytest.raises(RequestError, match="20 tokens at least do not fit the 19"):
        fit(lambda size: 20 + size, 19)


def test_what_a_model_is_asked_where_no_task_is_named():
    assert runner.default_tasks(("single", "vt"), None) == runner.default_tasks(("single", "vt"), "reference")
    assert runner.default_tasks(("single", "vt"), "reference") == ["single", "vt"]
    assert runner.default_tasks(("all",), "retriever") == ["facts:all"]
    assert runner.default_tasks(("all",), "some/checkpoint") == ["natural:all", "ruler:all", "long:all"]
    assert (
        runner.data_name("smoke", ["natural:all", "ruler:all", "long:all"], None, None, 0, "my/Model-1B")
        == "smoke-Model-1B"
    )
    name = runner.data_name("core", ["natural:facts"], [4096], 3, 1, "my/Model-1B", "file:/x/dracula.txt")
    assert name == "core-natural_facts-4096-n3-seed1-Model-1B-dracula"
    assert runner.data_name("smoke", ["facts:all"], None, None, 0, "retriever") == "smoke-facts_all"


def test_samples_fitted_to_another_tokenizer_or_text_are_not_taken(tmp_path):
    class Hf:
        chat_template = None

        def __init__(self, words: int) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {str(number): number for number in range(self.words)}

    class Known(Templated):
        def __init__(self, words: int) -> None:
            super().__init__(True)
            self.hf = Hf(words)

    def prepare(words: int, haystack: str = "prose"):
        given = Given(count_tokens, lambda: Known(words), haystack=haystack)
        return runner.prepare(tmp_path / "data", ["natural:facts"], [512], 1, given=given)

    data = prepare(3)
    assert prepare(3) == data
    with pytest.raises(RequestError, match=r"holds other samples: fitted_to\.tokenizer is '.*Give another --out"):
        prepare(4)
    with pytest.raises(RequestError, match=r"fitted_to\.haystack is 'prose' there"):
        prepare(3, f"file:{book(tmp_path, 500)}")


def test_prompts_of_a_base_model_are_plain_text(tiny_llama):
    """As the model reads them: the text, the question, and the sentence to go on with, on lines of their own."""
    from saccade.models.tokenizer import Tokenizer, load_tokenizer

    class Base(Tokenizer):
        has_chat_template = False

    tokenizer = Base(load_tokenizer(tiny_llama).hf)
    lengths = Lengths(lambda text: len(tokenizer.encode(text, add_special_tokens=False)), tokenizer)
    one = make("turns_end", 4096, 0, lengths=lengths)
    prompt = render(tokenizer, [], one.turns[0])
    text = tokenizer.decode(prompt.ids)
    assert re.search(r"\n\nWhat is the .+\? Answer with the value alone\.\nThe .+ is$", text)
    assert prompt.question_last
    assert text.startswith(prose_head := "Read this text")
    assert prose_head not in prose.generate(5000, 1)
