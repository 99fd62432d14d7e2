"""RULER's public samples, made again: against published ones, and against the generator's rules followed naively."""

from __future__ import annotations

import itertools
import random
import re
import string
from importlib import metadata

import pytest

from saccade.errors import RequestError
from saccade.eval.ruler import compat
from saccade.eval.ruler.public import fwe_length
from saccade.eval.ruler.wonder import VERSION, KeyWords, key_words

try:
    HAS_WORDS = metadata.version("wonderwords") == VERSION
except metadata.PackageNotFoundError:
    HAS_WORDS = False
words_needed = pytest.mark.skipif(not HAS_WORDS, reason="needs the extra 'ruler'")
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@words_needed
def test_published_niah_single_1():
    """Widely copied from the 4K set, sample 0: wandering-age, 8090293."""
    (record,) = compat("niah_single_1", haystack_size=150)
    needle = "One of the special magic numbers for wandering-age is: 8090293."
    start = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
    )
    end = (
        "\nWhat is the special magic number for wandering-age mentioned in the provided text? The special magic number "
        "for wandering-age mentioned in the provided text is"
    )
    assert record["outputs"] == ["8090293"]
    assert record["input"] == start + record["context"] + end
    lines = record["context"].split("\n")
    assert sorted(lines) == [needle] + [LINE] * 150


def test_published_niah_multikey_3():
    """A sample of the 4K set (README of github.com/vnchari/compactor_vllm): its head and its question."""
    record = list(compat("niah_multikey_3", haystack_size=50, samples=3))[2]
    assert record["input"].startswith(
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "uuid afterwards.\nOne of the special magic uuids for 3ce915e7-c9d6-463b-8a3c-6f5f5bb5c40c is: "
        "2c9b662e-040a-4aae-92e2-afd996bf10ab.\nOne of the special magic uuids for bde13c1b-2073-4f6d-8d6a-05b343ef2016"
        " is: bee3eb79-1d18-4ee9-86ad-8a8c6bc4123e.\n"
    )
    question = "What is the special magic uuid for a93b12cd-1c24-420e-acab-d7e7cc6b66e5 mentioned in the provided text?"
    assert question in record["input"]
    assert re.findall(r"for a93b12cd\S+ is: (\S+)\.", record["context"]) == record["outputs"]
    assert record["context"].count("\n") == 50


def test_published_vt():
    """A 64K sample quoted in a paper's appendix: the example's chain, the value asked for, the first variable."""
    (record,) = compat("vt", haystack_size=2710)
    assert (
        " VAR SEJ = VAR QPE  The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
        "again.\n" in record["input"]
    )
    example = ("QPE = 64886", "SEJ = VAR QPE ", "ZQO = VAR SEJ ", "RVU = VAR ZQO ", "FAI = VAR RVU ")
    assert re.findall(r"VAR ([A-Z]{3} = (?:\d+|VAR [A-Z]{3} ))", record["input"]) == list(example)
    assert f"VAR SGMLJ = 92018 {LINE}\n" in record["context"]
    assert record["outputs"][0] == "SGMLJ"
    assert record["input"].endswith(
        "\nQuestion: Find all variables that are assigned the value 92018 in the text above. Answer: According to the "
        "chain(s) of variable assignment in the text above, 5 variables are assgined the value 92018, they are: "
    )
    chain = [f"VAR {record['outputs'][0]} = 92018"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(record["outputs"])]
    places = [record["context"].index(statement) for statement in chain]
    assert places == sorted(places)
    noise = record["context"]
    for statement in chain:
        noise = noise.replace(statement + " ", "", 1)
    assert noise == " ".join([LINE + "\n"] * 2710)


# A 32K prompt (size 1370) that stands whole in a public repository: its ends, and the border between its two lists.
PUBLISHED_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n1. undertaker 2. dashboard 3. undertaker 4. mouth 5. health 6. real 7. saviour 8. raiment 9. "
    "silly 10. silly 11. company 12. appetizer 13. ovary 14. silly 15. rations 16. dashboard 17. pension",
    "185. gift 186. undertaker 187. health 188. real 189. voiceless 190. webpage\nQuestion: What are the 10 most "
    "common words in the above list? Answer: The top 10 words that appear most often in the list are:1. health 2. "
    "upgrade 3. undertaker 4. silly 5. dashboard 6. appetizer 7. real 8. gift 9. voiceless 10. octavo\nBelow is a "
    "numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
    "often.\n1. tramp 2. possess 3. eyeball 4. endure 5. delight 6. skate 7. littleneck 8. wire 9. chicory 10. solid "
    "11. squid 12. detention 13. plaintiff 14. wet-bar 15. adapter 16. expertise",
    "1151. boatload 1152. base 1153. pinkie 1154. delight 1155. zealous 1156. timer 1157. contact lens 1158. omelet",
    "3798. skip 3799. dolor 3800. councilor 3801. coordinate 3802. hotel 3803. pound 3804. restored 3805. skate",
    "4371. row 4372. wealthy 4373. passenger 4374. neon 4375. defeated 4376. dolor 4377. pinkie 4378. afterthought "
    "4379. armadillo 4380. mole\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:",
)


@words_needed
def test_published_cwe():
    """That prompt is sample 25 or later of its file: four samples before it were too long and drawn again, shorter."""
    search = list(range(10, 1381, 10))
    drawn = [1370] * 24 + [1360, 1370, 1370, 1360, 1350]
    (record,) = compat("cwe", haystack_size=1370, before=[*search, *drawn])
    assert record["input"].startswith(PUBLISHED_CWE[0])
    assert record["input"].endswith(PUBLISHED_CWE[-1])
    assert [part in record["input"] for part in PUBLISHED_CWE] == [True] * 5
    common = "row supreme plant pint armadillo walker abusive campus delight sardine".split()  # noqa: SIM905
    assert record["outputs"] == common
    listed = re.findall(r"\d+\. ([a-zA-Z -]*[a-zA-Z])", record["context"])
    assert {word for word in listed if listed.count(word) == 30} == set(common)


def test_fwe_followed_naively():
    stream = random.Random(42)

    def vocabulary():
        found = []
        while len(set(found)) < 81:  # 4096 // 50
            found.append("".join(stream.choices(string.ascii_lowercase, k=6)))
        found = sorted(set(found))
        random.Random(42).shuffle(found)
        return found

    vocabulary()  # the one draw of the search
    for record in compat("fwe", haystack_size=682 + 10 * 128, samples=2):
        ranked = vocabulary()
        assert record["outputs"] == ranked[1:4]
        words = ["..."] * int(1962 / 1.6449340668482264)
        for rank, word in enumerate(ranked[1:], 2):
            words += [word] * int(1962 / 1.6449340668482264 / rank**2)
        random.Random(42).shuffle(words)
        assert record["context"] == " ".join(words)
        assert record["input"].startswith("Read the following coded text and track")
        assert f"coded words. {record['context']}\nQuestion: Do not provide any explanation." in record["input"]


@words_needed
def test_niah_multikey_2_followed_naively():
    stream, keys = random.Random(43), key_words()
    (record,) = compat("niah_multikey_2", haystack_size=30, seed=43, length=2048)
    for size in (5, 10, 15, 20, 25, 30, 35, 30):
        pairs = []
        for _ in range(size + 1):
            key = keys[stream._randbelow(6_175_260)]
            pairs.append(f"One of the special magic numbers for {key} is: {stream.randint(10**6, 10**7 - 1)}.")
        needle, *lines = pairs
        (place,) = stream.sample(range(size), 1)
        stream.sample(range(1), 1)
    lines.insert(place, needle)
    assert record["context"] == "\n".join(lines)
    assert record["outputs"] == [needle[-8:-1]]


@words_needed
def test_short_cwe_repeats_words_less():
    (record,) = compat("cwe", haystack_size=40, length=1024)
    numbers = re.findall(r"(\d+)\. [a-zA-Z]", record["input"])
    assert [int(number) for number in numbers] == [*range(1, 41), *range(1, 11), *range(1, 91)]  # 3x10+10, 10, 6x10+30


def same(first, second):
    return list(first) == list(second)


def test_what_precedes_sample_0():
    task = "niah_multikey_3"
    assert same(compat(task, 50), compat(task, 50, before=[25, 50, 75]))
    assert same(compat(task, 50, length=2048), compat(task, 50, before=[*range(5, 56, 5)]))
    assert same(compat(task, 30), compat(task, 30, length=4095))  # 30 is no multiple of 25
    assert not same(compat(task, 50), compat(task, 50, before=[]))
    assert not same(compat(task, 50), compat(task, 50, seed=43))
    assert same(compat("vt", 20), compat("vt", 20, before=[10, 20, 30]))
    assert same(compat("fwe", 1322), compat("fwe", 1322, before=[5]))  # the size does not move the stream
    longer = list(compat(task, 50, samples=4))
    assert longer[:2] == list(compat(task, 50, samples=2))
    assert [record["index"] for record in longer] == [0, 1, 2, 3]
    assert list(compat(task, 50, samples=0)) == []


def test_few_noise_lines_are_cut_into_sentences():
    (record,) = compat("vt", 3)
    statements = [f"VAR {name} = " for name in record["outputs"]]
    assert all(record["context"].count(statement) == 1 for statement in statements)
    assert record["context"].count("The grass is green") == 3
    assert max(len(part) for part in record["context"].split("VAR")) < 3 * len(LINE)


def test_key_words_are_the_sorted_product():
    adjectives = ["old", "old-new", "old-", "a", "b", "a", "wide-eyed", "wide", "o"]
    nouns = ["x", "new-x", "n", "zz", "x", "a lens"]
    everything = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    words = KeyWords(adjectives, nouns)
    assert len(words) == len(everything)
    assert [words[number] for number in range(len(words))] == everything


@words_needed
def test_number_of_key_words():
    words = key_words()
    assert len(words) == 6_175_260
    picked = [words[number] for number in range(0, len(words), 10_007)]
    assert picked == sorted(set(picked))


def test_length_of_fwe():
    for length in (4096, 8192, 16384, 32768, 65536, 131072):
        for steps in range(4, 20):
            assert fwe_length(length // 6 + steps * (length // 32)) == length
    assert [fwe_length(size) for size in (50, 2000, 5000)] == [4096, 4096, 8192]  # no search passes through these
    with pytest.raises(RequestError, match="give length="):
        fwe_length(131_073)
    (record,) = compat("fwe", 2000, length=1000)
    assert len(set(record["context"].split())) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qa_1", 10), "is not one of niah_single_1, niah_multikey_2"),
        (("vt", 0), "at least 1"),
        (("cwe", 5), "at least 10"),
        (("fwe", 1962, 42, -1), "samples=-1"),
        (("fwe", 100, 42, 1, 100), "length=100 must be at least 200"),
    ],
)
def test_bad_requests(arguments, message):
    with pytest.raises(RequestError, match=message):
        compat(*arguments)


@words_needed
def test_cwe_ends_with_its_words():
    with pytest.raises(RequestError, match="at most 8169"):
        compat("cwe", 8170)


def test_a_missing_package_names_the_extra(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    key_words.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(RequestError, match=r"wonderwords 2\.2\.0 \(found: none\).*saccade-llm\[ruler\]"):
        compat("niah_single_1", 25)
    monkeypatch.setattr(metadata, "version", lambda name: "3.0.1")
    with pytest.raises(RequestError, match=r"found: 3\.0\.1"):
        compat("niah_single_1", 25)
    assert len(list(compat("vt", 10))) == 1
