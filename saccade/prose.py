"""Readable English of any length from a seed: a haystack that needs no download and no licence.

A small context-free grammar, expanded at random. ``[noun]`` in a rule stands for a random expansion of that symbol.
Only ``random.Random.random`` is used, whose stream is promised to be the same on every platform and Python version.
No sentence is used twice in one text.
"""

from __future__ import annotations

import random
import re

PARAGRAPH_SENTENCES = 7  # the longest paragraph

_RULES: dict[str, str] = {
    "sentence": "[scene] | [event] | [event] | [report] | [reason] | [habit] | [contrast]",
    "scene": (
        "[when], [the person] [moved] [where] | [when] there was [a thing] [where] | [where], [a thing] [stood] "
        "[where] | The [place] [seemed] [quality], and the [place] beyond it [seemed] [quality] [when late]"
    ),
    "event": (
        "[the person] [did] the [adjective] [object] [where] | [the person] and [the person] [moved] [where], "
        "[doing] as they went | [when], [the person] [did] [a thing] and [moved] [where] | [the person], [doing], "
        "[did] the [object] of [the person]"
    ),
    "report": (
        '"[claim]," said [the person], [doing] | [the person] [told] [the person] that [clause] | Nobody in the '
        "[place] could say whether [clause] | It was [known] that [clause]"
    ),
    "reason": "Because [clause], [clause] | [clause], for [clause] | Since [the person] [did] the [object], [clause]",
    "habit": (
        "Every [time], [the person] [did] the [object] [where] and [did] [a thing] | On [day] [the person] always "
        "[did] the [adjective] [object], [doing] | For [number] years [the person] had kept [a thing] [where]"
    ),
    "contrast": (
        "[clause], but [clause] | Although [clause], [clause] | [clause]; [clause] | [clause], and so [clause]"
    ),
    "claim": (
        "You will find [a thing] [where] | I have not seen the [adjective] [object] since [day] | There are "
        "[number] [objects] [where], and none of them is [quality] | Ask [the person] about the [object]"
    ),
    "clause": (
        "[the person] [did] the [object] | the [object] [where] [seemed] [quality] | [the person] [moved] [where] "
        "| there were [number] [objects] [where] | [the person] had [hidden] the [adjective] [object] | the "
        "[adjective] [place] [seemed] [quality] | [a thing] [stood] [where]"
    ),
    "the person": "the [person] | the [trait] [person] | the [person] from the [place] | [name] | [name] the [person]",
    "a thing": (
        "<a> [adjective] [object] | <a> [object] | <a> [object] of [stuff] | <a> [adjective] [object] of [stuff]"
    ),
    "where": (
        "by the [place] | behind the [adjective] [place] | near the [place] | under the [place] | across the "
        "[adjective] [place] | on the far side of the [place] | between the [place] and the [place] | at the "
        "[place]"
    ),
    "when": (
        "In the [time] | Before the [time] was over | That [time] | On [day] | Late on [day] | After [number] days "
        "| When the [weather] came | Toward the end of the [season] | One [season] [time] | During the [weather]"
    ),
    "when late": "in the [weather] | by [time] | all through the [season] | as the [weather] passed",
    "doing": (
        "[counting] [number] [objects] | [carrying] the [object] | thinking of [the person] | looking toward the "
        "[place] | humming an old tune about the [place] | complaining of the [weather] | without a word to [the "
        "person]"
    ),
    "hidden": "hidden | forgotten | mended | borrowed | described | lost | measured | promised away | drawn | weighed",
    "told": "told | wrote to | assured | reminded | whispered to | explained to | admitted to | repeated to",
    "known": "well known | an old joke | often said | quite possible | no great secret | agreed by everyone | plain",
    "seemed": "seemed | looked | was | remained | grew | had always been | was said to be | turned | appeared",
    "stood": "stood | lay | rested | waited | was kept | could be seen | leaned | hung | gathered dust",
    "moved": (
        "walked | hurried | wandered | rode | went down | climbed | set out | turned back | lingered | waited | "
        "crept | came home | sat down | danced | slept | rowed | stopped | argued | sang"
    ),
    "did": (
        "found | carried | mended | painted | sold | counted | weighed | described | borrowed | polished | buried "
        "| measured | remembered | admired | unwrapped | copied | traded | inspected | returned | washed | lifted "
        "| drew"
    ),
    "counting": "counting | sorting | stacking | weighing | listing | dropping | wrapping | comparing",
    "carrying": "carrying | holding | dragging | guarding | turning over | repairing | hiding | shaking",
    "person": (
        "miller | weaver | clerk | captain | gardener | doctor | baker | teacher | shepherd | carpenter | tailor | "
        "painter | farmer | judge | smith | cook | mason | postman | sailor | widow | student | printer | potter | "
        "hunter | innkeeper | beekeeper | glazier | fiddler | surveyor | ferryman | brewer | cobbler | stranger | "
        "orphan | magistrate"
    ),
    "trait": (
        "old | young | tall | quiet | patient | stubborn | cheerful | weary | careful | curious | proud | nervous "
        "| honest | forgetful | generous | sleepy | talkative | clever | solemn | limping"
    ),
    "name": (
        "Agnes | Tobias | Marta | Edmund | Clara | Jonas | Hester | Silas | Ida | Rufus | Nora | Felix | Greta | "
        "Amos | Lydia | Oscar | Beatrice | Hugo | Winifred | Caleb | Dorothea | Magnus | Philippa | Edgar | "
        "Rosalind | Barnaby"
    ),
    "place": (
        "mill | orchard | harbour | bridge | market | chapel | quarry | well | barn | forest | river | meadow | "
        "tower | kitchen | stable | garden | cellar | courtyard | school | dock | hill | crossroads | canal | inn "
        "| workshop | marsh | ravine | vineyard | brewery | cemetery | gatehouse | lagoon | pasture | granary | "
        "terrace | causeway | dairy | forge"
    ),
    "adjective": (
        "small | heavy | broken | blue | crooked | polished | narrow | bright | rusty | painted | hollow | silver "
        "| woven | yellow | smooth | ancient | plain | striped | dusty | carved | square | green | faded | round | "
        "costly | red | damp | elegant | iron | oval | empty | odd | tattered | gilded | borrowed | shallow | "
        "black | wooden"
    ),
    "quality": (
        "quiet | strange | empty | larger than before | beyond repair | full of smoke | cold | beautiful | useless "
        "| out of place | almost new | too small | dangerous | familiar | worth the trouble | covered in moss | "
        "deserted | brighter than usual | older than the town | heavy with rain | half finished | in good order | "
        "warm | forgotten"
    ),
    "object": (
        "lantern | barrel | ladder | ledger | clock | basket | rope | hammer | cart | letter | umbrella | kettle | "
        "violin | mirror | chest | anchor | bell | blanket | map | wheel | candle | book | boat | table | apron | "
        "bucket | compass | curtain | drum | envelope | flute | gate | hat | inkwell | jar | key | loaf | net | "
        "oar | plough | quilt | saddle | telescope | urn | vase | whistle | axe | brooch | chair | easel | fiddle "
        "| grindstone | hourglass"
    ),
    "objects": (
        "lanterns | barrels | ladders | ledgers | baskets | ropes | hammers | carts | letters | kettles | mirrors "
        "| chests | bells | blankets | maps | wheels | candles | books | boats | buckets | drums | envelopes | "
        "jars | keys | loaves | nets | oars | saddles | vases | whistles | chairs | sheep | geese | apples | "
        "stones | coins | buttons"
    ),
    "stuff": (
        "brass | oak | wool | clay | glass | copper | leather | straw | silk | marble | tin | linen | bone | slate "
        "| wax"
    ),
    "weather": (
        "rain | fog | first snow | thunder | wind | frost | long drought | hail | thaw | heat | drizzle | storm"
    ),
    "season": "spring | summer | autumn | winter | harvest | lambing season | fair | fishing season",
    "time": "morning | afternoon | evening | night | noon | dawn | week | dusk | market day | midnight",
    "day": "Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday | the feast day | the first of May",
    "number": (
        "two | three | four | five | six | seven | eight | nine | ten | eleven | twelve | fifteen | twenty | "
        "thirty | forty | a hundred | several | a few | too many | nineteen"
    ),
}
_OPTIONS = {symbol: [option.strip() for option in rule.split(" | ")] for symbol, rule in _RULES.items()}
_SYMBOL = re.compile(r"\[([a-z ]+)\]")
_ARTICLE = re.compile(r"<a> (\w)")


def generate(chars: int, seed: int) -> str:
    """Paragraphs of English, cut at the last sentence that fits into ``chars`` characters (ASCII only)."""
    if chars < 0:
        raise ValueError(f"chars={chars} must not be negative")
    rng = random.Random(seed)
    paragraphs: list[str] = []
    used: set[str] = set()
    left = chars
    while True:
        sentences: list[str] = []
        for _ in range(2 + _below(rng, PARAGRAPH_SENTENCES - 1)):
            sentence = _new_sentence(rng, used)
            left -= len(sentence) + 1  # the space or the line break before it
            if left < -1:  # the very first sentence has none
                return "\n".join([*paragraphs, " ".join(sentences)] if sentences else paragraphs)
            sentences.append(sentence)
        paragraphs.append(" ".join(sentences))


def _new_sentence(rng: random.Random, used: set[str]) -> str:
    while True:
        sentence = _expand(rng, "sentence")
        sentence = _ARTICLE.sub(lambda match: ("an " if match[1] in "aeiou" else "a ") + match[1], sentence)
        first = 1 if sentence.startswith('"') else 0
        sentence = sentence[:first] + sentence[first].upper() + sentence[first + 1 :] + "."
        if sentence not in used:
            used.add(sentence)
            return sentence


def _expand(rng: random.Random, symbol: str) -> str:
    options = _OPTIONS[symbol]
    return _SYMBOL.sub(lambda match: _expand(rng, match[1]), options[_below(rng, len(options))])


def _below(rng: random.Random, bound: int) -> int:
    return int(rng.random() * bound)
