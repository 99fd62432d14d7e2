"""What a long prompt does to others: the longest stop of a running stream, first tokens of short requests, and what the
long one pays, for each prefill method.

    python benchmarks/token_gap.py [--model random] [--tokens 7000] [--gap 0.5 --gap none] [--policy dense ...]
        [--every 1.0] [--threads 2] [--dtype auto] [--markdown]

Starts ``saccade serve`` once for each ``--gap``. A stream runs; a prompt of ``--tokens`` token ids comes beside it, and
one of 40 every ``--every`` seconds until the long one has its first token. Before that the long prompt, of other ids,
has run alone. Times are a client's, over HTTP. ``--policy`` may be given often, ``every-prefill`` is one of each
prefill method.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from prefixes import PREFILLS
from tiny_models import make_checkpoint

STREAM, SHORT = 6000, 40  # tokens of a stream, which is left; of a short prompt
COLUMNS = (
    "policy",
    "gap",
    "alone s",
    "beside s",
    "times",
    "longest stop s",
    "short, median s",
    "short, worst s",
    "stops",
)


@contextmanager
def serving(model: str, gap: str, given: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A server of ``model``; where it answers."""
    command = [sys.executable, "-m", "saccade", "serve", model, "--port", "0", "--max-token-gap", gap]
    command += ["--threads", str(given.threads), "--dtype", given.dtype, "--kv-memory", given.kv_memory]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(json.loads(line)["address"] for line in server.stderr if '"serving"' in line)
        threading.Thread(target=deque, args=(server.stderr, 0), daemon=True).start()
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


class Asked(threading.Thread):
    """A completion that streams: ``began``, and when each token came. ``left`` ends it early."""

    def __init__(self, address: tuple[str, int], prompt: list[int], tokens: int, policy: str) -> None:
        super().__init__(daemon=True)
        self.address, self.left, self.times, self.error = address, False, list[float](), ""
        self.body = json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "policy": policy, "temperature": 0, "ignore_eos": True}
            | {"stream": True}
        )
        self.began = time.perf_counter()
        self.start()

    def run(self) -> None:
        client = http.client.HTTPConnection(*self.address)
        client.request("POST", "/v1/completions", self.body, {"content-type": "application/json"})
        answer = client.getresponse()
        if answer.status != 200:
            self.error = answer.read().decode()
        while not self.left and (line := answer.readline()):
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    self.error = line.decode()
                self.times.append(time.perf_counter())
        client.close()

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        if self.error or not self.times:
            raise RuntimeError(self.error or "no token came")
        return self.times[0] - self.began


def ids(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(10, 250) for _ in range(count)]


def suspensions(address: tuple[str, int]) -> float:
    """How often prefills of the server have stopped."""
    client = http.client.HTTPConnection(*address)
    client.request("GET", "/metrics")
    text = client.getresponse().read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("saccade:prefill_suspensions_"))


def wait_for(one: Asked, tokens: int) -> None:
    while len(one.times) < tokens and one.is_alive():
        time.sleep(0.002)


def measure(address: tuple[str, int], policy: str, tokens: int, every: float, rng: random.Random) -> list[float]:
    """Columns of the table after the gap's."""
    for count in (SHORT, tokens):  # the first of all warms up
        alone = Asked(address, ids(count, rng), 1, policy)
        alone.join()
    before = suspensions(address)
    stream = Asked(address, ids(SHORT, rng), STREAM, "dense")
    wait_for(stream, 20)
    long = Asked(address, ids(tokens, rng), 1, policy)
    shorts: list[Asked] = []
    while not long.times and long.is_alive():
        if time.perf_counter() - long.began > every * (len(shorts) + 0.5):
            shorts.append(Asked(address, ids(SHORT, rng), 1, policy))
        time.sleep(0.005)
    long.join()
    for one in shorts:
        one.join()
    wait_for(stream, len(stream.times) + 3)
    during = [at for at in stream.times if at >= long.began - 0.5]
    stop = max(after - at for at, after in itertools.pairwise(during))
    stream.left = True
    stream.join()
    firsts = [one.first for one in shorts] or [float("nan")]
    found = [alone.first, long.first, long.first / alone.first, stop]
    return [*found, statistics.median(firsts), max(firsts), suspensions(address) - before]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="A checkpoint, or random: a small Llama.")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--gap", action="append")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", default="2GiB")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    policies = list[str]()
    for one in given.policy or ["every-prefill"]:
        policies += PREFILLS.get(one, (one,))
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {given.threads} threads, {given.model}")
    line = "| {} |".format if given.markdown else "{}".format
    between = " | " if given.markdown else "  "
    print(line(between.join(COLUMNS)))
    if given.markdown:
        print("|---" * len(COLUMNS) + "|")
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if model == "random":
            shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24, "head_dim": 64}
            model = str(make_checkpoint("llama", Path(folder), max_position_embeddings=given.tokens + 30_000, **shape))
        for gap in given.gap or ["none", "0.5"]:
            with serving(model, gap, given) as address:
                for number, policy in enumerate(policies):
                    row = measure(address, policy, given.tokens, given.every, random.Random(number))
                    print(line(between.join([policy, gap, *(f"{value:.2f}" for value in row)])), flush=True)


if __name__ == "__main__":
    main()
