"""How InfiniteBench counts an answer as right, task by task, and its Rouge-Lsum (Lin 2004, as ``rouge-score`` has it).

Scorers take all references of an item at once. Those of four options get (the option's text, its letter).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

_MARKS = "\n:\"'.,?!{}"
_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def first_digits(prediction: str, references: Sequence[str], **options: Any) -> float:
    """Whether the first run of digits is the reference (Retr.PassKey, Retr.Number)."""
    found = re.search(r"[0-9]+", prediction)
    return float((found.group(0) if found else "") == references[0])


def first_number(prediction: str, references: Sequence[str], **options: Any) -> float:
    """Whether the first number, whole or with a decimal point, is the reference; signs do not count (Math.Find)."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    try:
        return float(found is not None and float(found.group(0)) == float(references[0]))
    except ValueError:
        return 0.0


def holds_word(prediction: str, references: Sequence[str], **options: Any) -> float:
    """Whether the reference is one of the words (Retr.KV)."""
    return float(references[0] in _without(prediction, _MARKS).split())


def names_word(prediction: str, references: Sequence[str], **options: Any) -> float:
    """The same in capitals, in which scripts write names (En.Dia)."""
    return holds_word(prediction.upper(), references)


def option_letter(prediction: str, references: Sequence[str], **options: Any) -> float:
    """Whether the right one of four options is named (En.MC): by a letter that begins the answer, by the option's text
    alone, behind words such as 'answer is', or else by the first letter that stands alone."""
    said = prediction.strip()
    if not said:
        return 0.0
    if said[0] in "ABCD":
        return float(said[0] in references)
    if said in references:
        return 1.0
    said = _without(said, _MARKS.replace(":", ""))
    behind = _behind(said, ("answer is:", "answer:", "answer is", "option is"))
    if behind is not None:
        return float(behind.startswith(tuple(references)))
    alone = next((word for word in said.split() if word in "ABCD"), None)
    return float(alone in references)


def marked_option(prediction: str, references: Sequence[str], **options: Any) -> float:
    """Whether the right one of four options is named (Code.Debug): by its letter with a point or colon at the start, or
    by letter or name behind words such as 'answer is:'."""
    name, letter = references[0], references[-1]
    said = prediction.strip()
    if said[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    said = _without(said.replace("Option", " ").replace("option", " "), "\n`'\"-*")
    behind = _behind(said, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(behind is not None and behind.startswith((letter, name)))


def qa_f1_characters(prediction: str, references: Sequence[str], **options: Any) -> float:
    """The best F1 over the references of the characters, without marks and white space (Zh.QA)."""
    return max(_f1(_characters(prediction), _characters(one)) for one in references)


def rouge_lsum(prediction: str, references: Sequence[str], **options: Any) -> float:
    """The best F of summary-level Rouge-L over the references (En.Sum): lines are sentences, words runs of a-z and 0-9.

    The words of a reference's sentence that lie on its longest common subsequence with any sentence of the prediction
    count, each as often as both texts have it.
    """
    return max(_rouge_lsum(prediction, one) for one in references)


def _without(text: str, marks: str) -> str:
    return text.translate({ord(mark): " " for mark in marks})


def _behind(text: str, openings: Sequence[str]) -> str | None:
    """What follows the first of ``openings`` that ``text`` has, and a space; None where it has none."""
    text = re.sub(" +", " ", text)
    for opening in openings:
        _, found, rest = text.partition(opening)
        if found:
            return rest[1:]
    return None


def _characters(text: str) -> str:
    dropped = set(string.punctuation + _CHINESE_MARKS)
    return "".join("".join(mark for mark in text.lower() if mark not in dropped).split())


def _f1(words: Sequence[str], target: Sequence[str]) -> float:
    same = sum((Counter(words) & Counter(target)).values())
    return 2.0 * same / (len(words) + len(target)) if same else 0.0


def _rouge_lsum(prediction: str, reference: str) -> float:
    said, target = (
        [re.findall("[a-z0-9]+", line) for line in text.lower().split("\n")] for text in (prediction, reference)
    )
    left = [Counter(word for line in lines for word in line) for lines in (said, target)]
    sizes = [sum(counts.values()) for counts in left]
    hits = 0
    for line in target:
        places = set().union(*(_common(line, other) for other in said))
        for word in (line[at] for at in sorted(places)):
            if all(counts[word] > 0 for counts in left):
                hits += 1
                for counts in left:
                    counts[word] -= 1
    return 2.0 * hits / sum(sizes) if hits else 0.0


def _common(line: Sequence[str], other: Sequence[str]) -> set[int]:
    """Places of ``line`` on one longest common subsequence with ``other``: the one that is walked from the ends, a step
    back in ``other`` only where that is longer."""
    table = [[0] * (len(other) + 1)]
    for word in line:
        row = [0]
        for column, one in enumerate(other):
            row.append(table[-1][column] + 1 if word == one else max(table[-1][column + 1], row[column]))
        table.append(row)
    i, j, places = len(line), len(other), set()
    while i and j:
        if line[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            places.add(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return places
