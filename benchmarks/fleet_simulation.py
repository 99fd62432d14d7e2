"""A fleet of many replicas, simulated: what routing finds cached, what failures and drains cost.

    python benchmarks/fleet_simulation.py [--replicas 1000] [--minutes 10] [--seed 1]

Conversations begin at random times (Poisson), each under one of many system prompts (Zipf), and go on for several turns
with pauses for thought. A turn's prompt is the whole conversation. A replica keeps the contexts that were used last, as
many tokens as it has room for, and a turn computes what its replica does not keep. It takes so many turns at once; more
go to the next replica on the ring, as Ray's router does. Half way, some replicas die at once, their streams break and
are asked again; a quarter later as many are drained. The rates below are assumptions, and none was measured on a GPU:
an 8B model on one, 20,000 prompt tokens a second, 50 answer tokens a second of each stream, contexts read from a shared
disk at 100,000 tokens a second.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import heapq
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

PREFILL, DECODE, DISK = 20_000.0, 50.0, 100_000.0  # tokens a second
ROOM = 400_000  # tokens of keys and values of a replica
AT_ONCE = 32  # turns of a replica
PROMPTS = 2_000  # system prompts, of which the first is asked for most
LIVELY = 0.35  # of all that replicas can take, that clients ask for where half of their tokens are cached


class Ring:
    """Consistent hashing of routes over replicas, by their names, as in Ray's router (Karger et al., STOC 1997).
    ``points``: of each replica on the ring; the more, the evener are the shares."""

    def __init__(self, replicas: Iterable[str], points: int = 100) -> None:
        placed = sorted((_place(f"{name}:{number}"), name) for name in set(replicas) for number in range(points))
        self._places = [place for place, _ in placed]
        self._names = [name for _, name in placed]

    def ranked(self, route: str, most: int = 3) -> Sequence[str]:
        """The owner of a route, and then those that take its place while it cannot."""
        ranked: list[str] = []
        start = bisect.bisect(self._places, _place(route))
        for offset in range(len(self._names)):
            name = self._names[(start + offset) % len(self._names)]
            if name not in ranked:
                ranked.append(name)
                if len(ranked) == most:
                    break
        return ranked


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass
class Talk:
    """One conversation. ``turns`` are left, each of ``new`` tokens and an answer of ``answer``."""

    number: int
    system: int
    turns: int
    context: int = 0


@dataclass
class Replica:
    """``kept``: tokens of each context, the one used last at the end. ``ends``: of the turns that it has at work."""

    kept: OrderedDict[str, int] = field(default_factory=OrderedDict)
    stored: int = 0
    ends: list[float] = field(default_factory=list)
    work: float = 0.0

    def keep(self, name: str, tokens: int) -> None:
        self.stored += tokens - self.kept.pop(name, 0)
        self.kept[name] = tokens
        while self.stored > ROOM and len(self.kept) > 1:
            self.stored -= self.kept.popitem(last=False)[1]

    def has(self, name: str) -> int:
        if name in self.kept:
            self.kept.move_to_end(name)
        return self.kept.get(name, 0)


@dataclass(frozen=True)
class Setting:
    replicas: int
    seconds: float
    seed: int
    routing: str = "session"  # session, system or random
    disk: bool = False
    lost: float = 0.01  # share of replicas that die, and that are drained


@dataclass
class Result:
    turns: int = 0
    prompt: int = 0
    cached: int = 0
    loaded: int = 0
    elsewhere: int = 0  # turns that another than their owner took
    turned_away: int = 0
    broken: int = 0
    after: list[int] = field(default_factory=lambda: [0, 0])  # prompt and cached tokens in the minute after the deaths
    moved: int = 0
    longest_drain: float = 0.0
    uneven: float = 0.0
    first: list[float] = field(default_factory=list)  # seconds to the first token


def simulate(setting: Setting) -> Result:
    draw, result = random.Random(setting.seed), Result()
    names = [f"replica-{number}" for number in range(setting.replicas)]
    fleet = {name: Replica() for name in names}
    ring = Ring(names)
    weights = [1 / (rank + 1) for rank in range(PROMPTS)]
    lengths = [draw.randrange(500, 6_000) for _ in range(PROMPTS)]
    seconds_a_turn = 0.5 * 6_000 / PREFILL + 300 / DECODE  # by the averages of what is drawn below
    rate = LIVELY * setting.replicas * AT_ONCE / (seconds_a_turn * 6)
    events: list[tuple[float, int, Talk]] = []
    now, number = 0.0, 0
    while now < setting.seconds:
        now += draw.expovariate(rate)
        system = draw.choices(range(PROMPTS), weights)[0]
        heapq.heappush(events, (now, number, Talk(number, system, 1 + min(30, int(draw.expovariate(1 / 5))))))
        number += 1
    deaths, drain = setting.seconds / 2, setting.seconds * 0.75
    going = max(1, round(setting.lost * setting.replicas))
    owners: dict[int, str] = {}
    while events:
        now, order, talk = heapq.heappop(events)
        if now > setting.seconds:
            break
        if deaths is not None and now >= deaths:
            gone = [names.pop(draw.randrange(len(names))) for _ in range(going)]
            at_work = sum(sum(end > now for end in fleet.pop(name).ends) for name in gone)
            result.broken, ring, deaths = at_work, Ring(names), None
        if drain is not None and now >= drain:
            gone = [names.pop(draw.randrange(len(names))) for _ in range(going)]
            left = [end - now for name in gone for end in fleet.pop(name).ends]
            result.longest_drain, ring, drain = max(left, default=0.0), Ring(names), None
        route = {
            "session": f"talk-{talk.number}",
            "system": f"system-{talk.system}",
            "random": f"{draw.getrandbits(60)}",
        }[setting.routing]
        chosen = None
        for place, name in enumerate(ring.ranked(route)):
            replica = fleet[name]
            while replica.ends and replica.ends[0] <= now:
                heapq.heappop(replica.ends)
            if len(replica.ends) < AT_ONCE:
                chosen, result.elsewhere = name, result.elsewhere + (place > 0)
                break
        if chosen is None:
            result.turned_away += 1
            heapq.heappush(events, (now + 1.0, order, talk))
            continue
        result.moved += owners.get(talk.number, chosen) != chosen
        owners[talk.number] = chosen
        replica, base, new, answer = fleet[chosen], lengths[talk.system], 50 + int(draw.expovariate(1 / 400)), 0
        answer = 20 + int(draw.expovariate(1 / 280))
        known = max(replica.has(f"talk-{talk.number}"), min(replica.has(f"system-{talk.system}"), base))
        prompt = (talk.context or base) + new
        stored = talk.context if setting.disk else 0
        loaded = max(0, stored - known)
        wait = loaded / DISK + (prompt - known - loaded) / PREFILL
        result.turns += 1
        result.prompt += prompt
        result.cached += known
        result.loaded += loaded
        result.first.append(wait)
        if deaths is None and now < setting.seconds / 2 + 60:
            result.after[0] += prompt
            result.after[1] += known + loaded
        end = now + wait + answer / DECODE
        replica.work += wait + answer / DECODE
        heapq.heappush(replica.ends, end)
        talk.context, talk.turns = prompt + answer, talk.turns - 1
        replica.keep(f"talk-{talk.number}", talk.context)
        replica.keep(f"system-{talk.system}", base)
        if talk.turns:
            heapq.heappush(events, (end + 5 + draw.expovariate(1 / 40), order, talk))
    work = sorted(fleet[name].work for name in names)
    result.uneven = work[-1] / (sum(work) / len(work))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    base = Setting(given.replicas, 60 * given.minutes, given.seed)
    rows = [
        ("random", replace(base, routing="random")),
        ("random, shared disk", replace(base, routing="random", disk=True)),
        ("system prompt", replace(base, routing="system")),
        ("session", base),
        ("session, shared disk", replace(base, disk=True)),
    ]
    print(
        f"{'routing':22}{'turns':>9}{'cached':>8}{'read':>7}{'TTFT p50':>10}{'p99':>8}{'busiest':>9}"
        f"{'elsewhere':>11}{'away':>7}{'broken':>8}{'cached after':>14}{'drain':>8}"
    )
    for name, setting in rows:
        got = simulate(setting)
        first = sorted(got.first)
        print(
            f"{name:22}{got.turns:9}{got.cached / got.prompt:8.1%}{got.loaded / got.prompt:7.1%}"
            f"{1000 * first[len(first) // 2]:7.0f} ms{1000 * first[int(0.99 * len(first))]:5.0f} ms"
            f"{got.uneven:8.2f}x{got.elsewhere / got.turns:11.2%}{got.turned_away:7}{got.broken:8}"
            f"{got.after[1] / max(1, got.after[0]):14.1%}{got.longest_drain:6.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
