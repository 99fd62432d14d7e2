"""Many requests at once against a server in a process of its own: answers are the library's, and nothing is left.

``make storm-server SHORT=100000 STREAMED=10000``: a tenth of them goes away on the way.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

POLICIES = ("dense", "streaming(sinks=2, window=40)", "topk(k=24)", "psa(epsilon=0.4, block_size=16, microbatch=1)")
PROMPTS = 12
AT_ONCE = 32


async def ask(address: tuple[str, int], body: dict[str, object], leave: int | None) -> tuple[int, str | None]:
    """Status and text of an answer; None for one that was left after ``leave`` bytes."""
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        if leave is not None:
            await reader.read(leave) if leave else None
            return 0, None
        answer = (await reader.read()).decode()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    status = int(answer.split(" ", 2)[1])
    if status != 200:
        return status, None
    if not body.get("stream"):
        return status, json.loads(answer.partition("\r\n\r\n")[2])["choices"][0]["text"]
    events = [json.loads(found) for found in re.findall(r"^data: (\{.*\})$", answer, re.MULTILINE)]
    assert answer.rstrip().rstrip("0").rstrip().endswith("data: [DONE]"), answer[-200:]
    choices = [event["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices].count("length") == 1
    return status, "".join(choice["text"] for choice in choices)


async def storm(address: tuple[str, int], count: int, streamed: bool, want: dict, prompts: list, seed: int) -> Counter:
    """``count`` requests, ``AT_ONCE`` of them at a time; each answer is the library's."""
    seen: Counter[int] = Counter()
    numbers = iter(range(count))

    async def worker(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        for _ in numbers:
            index, policy = rng.randrange(PROMPTS), rng.choice(POLICIES)
            body = {"prompt": prompts[index], "policy": policy, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
            body["stream"] = streamed
            leave = rng.choice((0, 50, 300)) if rng.random() < 0.1 else None
            status, text = await ask(address, body, leave)
            seen[status] += 1
            if status == 200:
                assert text == want[index, policy], (index, policy, text, want[index, policy])
            else:
                assert status in (0, 429), status

    await asyncio.gather(*[worker(number) for number in range(AT_ONCE)])
    return seen


def resident(pid: int) -> int:
    """MiB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


async def get(address: tuple[str, int], path: str) -> str:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


def main(short: int, streamed: int) -> None:
    from engine_helpers import make
    from tiny_models import make_checkpoint, random_ids

    from saccade import SamplingParams

    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint("llama", Path(name) / "model", max_position_embeddings=2048)
        prompts = [random_ids(20 + 15 * index, seed=index) for index in range(PROMPTS)]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        with make(folder) as llm:
            want = {
                (index, policy): llm.generate([ids], params, policy=policy)[0].outputs[0].text
                for index, ids in enumerate(prompts)
                for policy in POLICIES
            }
        command = [sys.executable, "-m", "saccade", "serve", str(folder), "--port", "0", "--max-requests", "16"]
        command += ["--dtype", "float32", "--prefill-chunk", "64", "--log-level", "info", "--kv-memory", "64MiB"]
        command += ["--no-prefix-caching"]  # so that no block is left at the end
        log = Path(name) / "log"
        with log.open("w") as stream, subprocess.Popen(command, stderr=stream) as process:
            while '"serving"' not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            url = re.search(r'"address": "http://([\d.]+):(\d+)"', log.read_text())
            assert url is not None
            address = (url[1], int(url[2]))
            parts = [(short, False), (streamed, True)]
            for count, as_stream in parts:
                done, size = 0, max(1, min(5000, count))
                while done < count:
                    seen = asyncio.run(storm(address, min(size, count - done), as_stream, want, prompts, done))
                    done += size
                    kind = "streamed" if as_stream else "short"
                    print(f"{min(done, count)} {kind}: {dict(seen)}, {resident(process.pid)} MiB", flush=True)
            for _ in range(100):
                metrics = asyncio.run(get(address, "/metrics"))
                left = re.findall(
                    r"^saccade:(?:num_requests_\w+|kv_cache_usage_perc)\{.*\} (\S+)$", metrics, re.MULTILINE
                )
                if set(left) == {"0.0"}:
                    break
                time.sleep(0.1)
            else:
                raise AssertionError(f"something is left: {left}")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert "traceback" not in log.read_text()
    print("every answer was the library's; no block, no request is left")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
