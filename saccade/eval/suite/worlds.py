"""What the tasks plant in a context and what they ask about it, as token ids.

A world has items (to be spread over the context) and questions. One question makes an evaluation sample; training asks
many of them over one context.
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.eval.suite.filler import NEWLINE
from saccade.eval.suite.rng import Rng
from saccade.eval.suite.world import ADJECTIVES, NOUNS, Item, Key, Plan, Question, World, ask, held_out
from saccade.models.reference import vocabulary as v

_COLON, _SEMICOLON, _COMMA, _EQUAL, _SPACE = (v.char(symbol) for symbol in ":;,= ")
_GREATER, _ASK = (v.char(symbol) for symbol in ">?")
_DIGIT = v.char("0")
_LETTER = v.char("A")
_HEX = [v.char(symbol) for symbol in "0123456789abcdef"]


def _digits(rng: Rng, count: int = 4) -> list[int]:
    return [_DIGIT + rng.below(10) for _ in range(count)]


def _needle(key: Key, value: list[int]) -> Item:
    return Item([NEWLINE, *key, _COLON, *value, _SEMICOLON])


def _joined(keys: Sequence[Key]) -> list[int]:
    out = list(keys[0])
    for key in keys[1:]:
        out += [_COMMA, *key]
    return out


def _value_question(key: Key, value: list[int], item: int) -> Question:
    return Question(ask("value", key), [value], "exact", [item])


def single(plan: Plan) -> World:
    """Needles ``adjective noun:dddd;`` in the background; the value of one is asked."""
    rng = plan.rng
    hexadecimal = rng.random() < 0.25
    keys = plan.keys(max(1, plan.wanted))
    values = [[rng.choice(_HEX) for _ in range(8)] if hexadecimal else _digits(rng) for _ in keys]
    questions = [_value_question(key, value, i) for i, (key, value) in enumerate(zip(keys, values))]
    return World([_needle(*pair) for pair in zip(keys, values)], questions, repeat=rng.random() < 0.33)


def _crowd(plan: Plan, count: int) -> list[Key]:
    """Keys of which about half share their adjective or noun with another."""
    rng = plan.rng
    keys = plan.keys(max(1, count - count // 2))
    known = set(keys)
    roots = len(keys)
    while len(keys) < count:
        adjective, noun = keys[rng.below(roots)]
        if rng.random() < 0.5:
            noun = v.NOUN + rng.below(NOUNS)
        else:
            adjective = v.ADJECTIVE + rng.below(ADJECTIVES)
        number = (adjective - v.ADJECTIVE) * NOUNS + noun - v.NOUN
        if (adjective, noun) not in known and (plan.held_out or not held_out(number)):
            known.add((adjective, noun))
            keys.append((adjective, noun))
    rng.shuffle(keys)
    return keys


def _needles(plan: Plan, count: int) -> World:
    keys = _crowd(plan, count)
    values = [_digits(plan.rng) for _ in keys]
    questions = [_value_question(key, value, i) for i, (key, value) in enumerate(zip(keys, values))]
    plan.rng.shuffle(questions)
    return World([_needle(*pair) for pair in zip(keys, values)], questions)


def multikey(plan: Plan) -> World:
    """Four needles whose keys share words; one is asked."""
    return _needles(plan, max(4, 2 * plan.wanted))


def multikey_all(plan: Plan) -> World:
    """Nothing but needles, half of whose keys share a word with another."""
    return _needles(plan, max(4, plan.budget // 9))


def multivalue(plan: Plan) -> World:
    """A key with four values; all are asked, in the order of the text."""
    rng = plan.rng
    keys = _crowd(plan, max(2, plan.wanted))
    world = World([])
    for key in keys:
        values = [_digits(rng) for _ in range(4)]
        first = len(world.items)
        world.items += [_needle(key, value) for value in values]
        needs = list(range(first, first + 4))
        world.groups.append(needs)
        world.questions.append(Question(ask("values", key), values, "ordered", needs))
    return world


def multiquery(plan: Plan) -> World:
    """Four of eight keys are asked at once."""
    rng = plan.rng
    keys = _crowd(plan, max(8, 2 * plan.wanted))
    values = [_digits(rng) for _ in keys]
    world = World([_needle(*pair) for pair in zip(keys, values)])
    for _ in range(max(1, plan.wanted)):
        chosen = rng.distinct(len(keys), 4)
        text = ask("find", _joined([keys[i] for i in chosen]))
        world.questions.append(Question(text, [values[i] for i in chosen], "ordered", chosen))
    return world


def vt(plan: Plan) -> World:
    """Variable tracking: ``XY=4719;`` then ``PQ=XY;`` and so on, chains of two to four hops, statements in any order.
    Asked by value for the names, or by the last name for the way back to the value."""
    rng = plan.rng
    chains = max(1 + rng.below(4), min(40, plan.wanted))
    hops = [rng.between(2, 4) for _ in range(chains)]
    names = [[_LETTER + n // 26, _LETTER + n % 26] for n in rng.distinct(676, sum(hops))]
    world = World([])
    for count in hops:
        chain, names = names[:count], names[count:]
        value = _digits(rng)
        first = len(world.items)
        before = value
        for name in chain:
            world.items.append(Item([NEWLINE, *name, _EQUAL, *before, _SEMICOLON]))
            before = name
        needs = list(range(first, first + count))
        if rng.random() < 0.5:
            world.questions.append(Question(ask("names", [_SPACE, *value]), chain, "iou", needs))
        else:
            back = [*chain[-2::-1], value]
            world.questions.append(Question(ask("equal", [_SPACE, *chain[-1]]), back, "ordered", needs))
    rng.shuffle(world.questions)
    return world


def _stream(plan: Plan, ranks: int, share: float, command: str) -> World:
    """A stream of nouns in which the first ``ranks`` stand out, each at least a quarter more frequent than the next."""
    rng = plan.rng
    size = max(60, plan.budget)
    words = [v.NOUN + n for n in rng.distinct(NOUNS, min(NOUNS, ranks + max(8, size // 12)))]
    weights = [0.75**i for i in range(ranks)]
    counts = [max(ranks + 2 - i, int(size * share * w / sum(weights))) for i, w in enumerate(weights)]
    for i in range(ranks - 2, -1, -1):  # rounding must not blur the order
        counts[i] = max(counts[i], -(-counts[i + 1] * 5 // 4))
    rest = words[ranks:]
    ceiling = max(1, counts[-1] * 3 // 5)
    filler = [rest[rng.below(len(rest))] for _ in range(max(0, size - sum(counts)))]
    seen: dict[int, int] = {}
    stream: list[int] = []
    for noun in filler:
        seen[noun] = seen.get(noun, 0) + 1
        if seen[noun] <= ceiling:
            stream.append(noun)
    for noun, count in zip(words, counts):
        stream += [noun] * count
    rng.shuffle(stream)
    question = Question(ask(command, []), [[noun] for noun in words[:ranks]], "ordered", [0])
    return World([Item([NEWLINE, *stream, NEWLINE])], [question])


def words(plan: Plan) -> World:
    """Frequent words: the three most frequent nouns of a skewed stream, most frequent first."""
    return _stream(plan, 3, 0.5, "often")


def common(plan: Plan) -> World:
    """Common words: the five nouns that stand out among many, most frequent first."""
    return _stream(plan, 5, 0.6, "common")


def legend(plan: Plan) -> World:
    """Rules ``rule adjective>K;`` declared once; lines ``noun adjective:K;`` follow them. The code of a line that
    leaves it out is asked: first the line's adjective, then its code."""
    rng = plan.rng
    kinds = [v.ADJECTIVE + n for n in rng.distinct(ADJECTIVES, rng.between(4, 8))]
    codes = {kind: _LETTER + rng.below(26) for kind in kinds}
    rules = Item([NEWLINE])
    for kind in kinds:
        rules.ids += [v.word("rule"), kind, _GREATER, codes[kind], _SEMICOLON]
    lines = min(NOUNS, max(4, 2 * plan.wanted, plan.budget // 40))
    nouns = [v.NOUN + n for n in rng.distinct(NOUNS, lines)]
    world = World([rules])
    for index, noun in enumerate(nouns):
        kind = rng.choice(kinds)
        bare = index < max(1, plan.wanted)
        world.items.append(
            Item([NEWLINE, noun, kind, _COLON, _ASK if bare else codes[kind], _SEMICOLON], () if bare else (4,))
        )
        if bare:
            world.questions.append(
                Question(ask("code", [noun]), [[kind, _COLON, codes[kind]]], "exact", [0, len(world.items) - 1])
            )
    return world


def update(plan: Plan) -> World:
    """Keys that are set again later; the latest value is asked before and after."""
    rng = plan.rng
    keys = _crowd(plan, max(4, plan.wanted))
    world = World([])
    depths: list[tuple[float, float]] = []
    for key in keys:
        first, second = _digits(rng), _digits(rng)
        at = len(world.items)
        world.items += [_needle(key, first), _needle(key, second)]
        depths += [(0.0, 0.5), (0.5, 1.0)]
        world.questions.append(Question(ask("latest", key), [first], "exact", [at], before=at + 1))
        world.questions.append(Question(ask("latest", key), [second], "exact", [at, at + 1]))
    world.depths = depths
    return world


def three_turn(plan: Plan) -> World:
    """Three thirds of a conversation with four needles each. A question of turn j asks for one key out of each of s of
    the first j thirds, s from 1 to j (the relevance rule of LoopServe's multi-turn benchmark)."""
    rng = plan.rng
    keys = _crowd(plan, 12)
    values = [_digits(rng) for _ in keys]
    world = World([_needle(*pair) for pair in zip(keys, values)])
    world.depths = [((i // 4) / 3, (i // 4 + 1) / 3) for i in range(12)]
    for turn in (3, 2, 1) * max(1, plan.wanted // 3):
        third = rng.distinct(turn, rng.between(1, turn))
        if turn > 1 and max(third) < turn - 1 and rng.random() < 0.5:
            third[0] = turn - 1
        chosen = [4 * t + rng.below(4) for t in third]
        text = ask("find", _joined([keys[i] for i in chosen]))
        world.questions.append(Question(text, [values[i] for i in chosen], "ordered", chosen))
    return world
