"""Saccade beside llama.cpp on a CPU, one after the other in one run: prefill and decode by length and threads, and
whether both answer alike.

    python benchmarks/llama_cpp.py --llama-server BIN [--model random] [--types bf16,q8_0] [--threads 1,16]
        [--prefill 4096,32768] [--decode 32768,131072] [--tokens 16] [--slow 60] [--json FILE]
    python benchmarks/llama_cpp.py --llama-server BIN --same 4 --model reference

BIN is ``llama-server`` of a llama.cpp built for this machine; the model is written for it with the ``gguf`` package
(``benchmarks/llama_gguf.py``). Both sides have weights and keys of 16 bits (q8_0: llama.cpp's weights of 8), flash
attention, and the same number of threads. Prefill is a prompt of random tokens. Decode follows keys and values that
are made up: a step takes the same time whatever they are, and llama.cpp would take minutes to compute them; it gets
them as a saved slot. Nothing of which a shorter length lets expect more than ``--slow`` seconds (four times as long
for twice the tokens) is begun; its row says so.

``--same N``: N prompts of the suite's retrieval task, answered greedily by llama.cpp in float32 and in bfloat16; then
Saccade scores every token of these answers. A token is a tie where Saccade's likeliest one is at most 0.001 (float32)
or 0.25 (bfloat16) likelier, in natural logarithms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from llama_gguf import write_gguf
from serve_peers import HOST, free_port, running

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.eval.suite import make
from saccade.models.tokenizer import load_tokenizer

HERE = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
TIES = {"f32": 1e-3, "bf16": 0.25}  # nats
CACHE = {"f32": "f32", "bf16": "f16", "q8_0": "f16"}  # how llama.cpp holds keys and values


@dataclass
class Row:
    """One measurement, in ms: of a whole prompt, or of one decoded token. None where it was left out."""

    phase: str
    tokens: int
    threads: int
    engine: str
    ms: float | None
    density: float = 1.0


class Llama:
    """One llama-server with one slot."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"http://{HOST}:{self._port}{path}", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=3600) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def complete(self, ids: list[int], tokens: int, cached: bool, **more: Any) -> dict[str, Any]:
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "cache_prompt": cached, "return_tokens": True}
        return self.ask("/completion", {**body, **more})


@contextmanager
def llama(given: argparse.Namespace, folder: Path, kind: str, threads: int, positions: int) -> Iterator[Llama]:
    """A server of the model in ``folder`` as ``kind``."""
    file = folder / f"{kind}.gguf"
    if not file.exists():
        write_gguf(folder / "model" if given.model.startswith("random") else given.path, file, kind)
    port = free_port()
    command = [given.llama_server, "--model", str(file), "--host", HOST, "--port", str(port), "--parallel", "1"]
    command += ["--ctx-size", str(positions), "--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--flash-attn", "on", "--cache-ram", "0", "--slot-save-path", str(folder)]
    command += ["--cache-type-k", CACHE[kind], "--cache-type-v", CACHE[kind]]
    with running(command, port, folder / "llama.log"):
        yield Llama(port)


def write_slot(file: Path, config: dict[str, Any], ids: list[int]) -> None:
    """A slot as llama-server saves it, version 3 of its sequences' state: ``ids`` with random keys and values of
    16 bits, rows of all KV heads."""
    layers, width = config["num_hidden_layers"], config["num_key_value_heads"] * config["head_dim"]
    count, some = len(ids), 4096
    cells = numpy.zeros((count, 3), numpy.int32)  # position, number of sequences, sequence
    cells[:, 0], cells[:, 1] = numpy.arange(count), 1
    rows = numpy.random.default_rng(0).standard_normal((some, width)).astype(numpy.float16).tobytes()
    whole, rest = divmod(count, some)
    with file.open("wb") as out:
        out.write(numpy.array([0x67677371, 3, count, *ids], numpy.uint32).tobytes())
        out.write(numpy.array([1, count], numpy.uint32).tobytes())  # streams, cells
        out.write(cells.tobytes())
        out.write(numpy.array([0, layers], numpy.uint32).tobytes())  # values are not transposed
        for _ in range(2 * layers):  # all keys, then all values
            out.write(numpy.array([1], numpy.int32).tobytes() + numpy.array([2 * width], numpy.uint64).tobytes())
            for _ in range(whole):
                out.write(rows)
            out.write(rows[: 2 * width * rest])


def llama_rows(given: argparse.Namespace, folder: Path, config: dict[str, Any], threads: int) -> Iterator[Row]:
    longest = max(given.prefill + given.decode) + given.tokens + 64
    vocab = config["vocab_size"]
    for kind in given.types:
        name = f"llama.cpp {kind}"
        with llama(given, folder, kind, threads, longest) as server:
            server.complete(prompt(256, vocab, seed=1), 4, False)
            before: Row | None = None
            for length in sorted(given.prefill):
                row = Row("prefill", length, threads, name, None)
                if before is None or _likely(before, length) <= given.slow:
                    found = server.complete(prompt(length, vocab), 1, False)["timings"]
                    assert found["prompt_n"] == length, found
                    row.ms = found["prompt_ms"]
                    before = row
                yield row
            for length in sorted(given.decode):
                ids = prompt(length, vocab)
                write_slot(folder / "slot", config, ids)
                restored = server.ask("/slots/0?action=restore", {"filename": "slot"})
                assert restored["n_restored"] == length, restored
                found = server.complete([*ids, ids[0]], given.tokens + 1, True, ignore_eos=True)["timings"]
                assert found["prompt_n"] <= 2 and found["predicted_n"] == given.tokens + 1, found  # noqa: PT018
                yield Row("decode", length, threads, name, found["predicted_ms"] / given.tokens)
                (folder / "slot").unlink()


def _likely(before: Row, length: int) -> float:
    """Seconds of a prefill whose attention grows with the square of its length."""
    assert before.ms is not None
    return before.ms / 1000 * (length / before.tokens) ** 2


def saccade_rows(given: argparse.Namespace, folder: Path, threads: int) -> Iterator[Row]:
    for command, lengths, policies, more in (
        ("ttft", given.prefill, given.prefill_policies, []),
        ("generate", given.decode, given.decode_policies, ["--synthetic-kv", "--tokens", str(given.tokens)]),
    ):
        if not lengths:
            continue
        file = folder / "saccade.json"
        model = str(folder / "model") if given.model.startswith("random") else given.model
        line = [sys.executable, "-m", "saccade", "bench", command, "--model", model, "--threads", str(threads)]
        line += ["--contexts", ",".join(map(str, lengths)), "--methods", policies, "--limit", str(given.slow)]
        done = subprocess.run([*line, *more, "--json", str(file)], capture_output=True, text=True, env=HERE)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        for row in json.loads(file.read_text())["rows"]:
            took = 1000 * row["seconds"] if command == "ttft" else row["ms_per_token"]
            phase = "prefill" if command == "ttft" else "decode"
            yield Row(phase, row["context"], threads, f"saccade `{row['method']}`", took, row["density"])
        file.unlink()


def table(rows: list[Row]) -> str:
    lines = ["| phase | tokens | threads | engine | density | ms | tokens/s |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row.phase == "decode", row.tokens, row.threads)):
        if row.ms is None:
            said = "left out | "
        else:
            rate = 1000 * (row.tokens if row.phase == "prefill" else 1) / row.ms
            said = f"{row.ms:.1f} | {rate:.1f}"
        lines.append(f"| {row.phase} | {row.tokens} | {row.threads} | {row.engine} | {row.density:.3f} | {said} |")
    return "\n".join(lines)


def same(given: argparse.Namespace, folder: Path) -> None:
    """llama.cpp's greedy answers, scored by Saccade."""
    for kind, dtype in (("f32", "float32"), ("bf16", "bfloat16")):
        prompts, answers = [], []
        with LLM(given.path, dtype=dtype, device="cpu", threads=max(given.threads), enable_prefix_caching=False) as llm:
            tokenizer = load_tokenizer(given.path)
            for index in range(given.same):
                said = make("single", given.same_tokens, index).turns[0].message()
                prompts.append(tokenizer.apply_chat_template([{"role": "user", "content": said}], True, {}))
            with llama(given, folder, kind, max(given.threads), given.same_tokens + 256) as server:
                answers = [server.complete(ids, 24, False)["tokens"] for ids in prompts]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
            scored = llm.generate([ids + answer for ids, answer in zip(prompts, answers)], params)
            behind = []
            for one, ids, answer in zip(scored, prompts, answers):
                assert one.error is None and one.prompt_logprobs is not None, one.error  # noqa: PT018
                for token, entry in zip(answer, one.prompt_logprobs[len(ids) :]):
                    assert entry is not None
                    behind.append(max(found.logprob for found in entry.values()) - entry[token].logprob)
        ours, ties = sum(gap == 0 for gap in behind), sum(0 < gap <= TIES[kind] for gap in behind)
        print(
            f"{kind}: {len(prompts)} prompts of {given.same_tokens} tokens, {len(behind)} tokens of answers: {ours} "
            f"are Saccade's likeliest, {ties} ties, {len(behind) - ours - ties} others; "
            f"most behind: {max(behind):.4f} nats"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(one) for one in text.split(",") if one]  # noqa: E731
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--model", default="random")
    parser.add_argument("--types", type=lambda text: text.split(","), default=["bf16", "q8_0"])
    parser.add_argument("--threads", type=numbers, default=[1])
    parser.add_argument("--prefill", type=numbers, default=[4096, 32768])
    parser.add_argument("--decode", type=numbers, default=[32768, 131072])
    parser.add_argument("--prefill-policies", default="dense;flexprefill@0.1")
    parser.add_argument("--decode-policies", default="dense;lfps(unit=kv_head, blocks=0);psa;quest")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--slow", type=float, default=60.0)
    parser.add_argument("--same", type=int, default=0)
    parser.add_argument("--same-tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        longest = max(given.decode, default=0) + given.tokens + 64
        given.path = model_folder(given.model, folder / "model", torch.bfloat16, positions=longest)
        if given.same:
            same(given, folder)
            return
        config = json.loads((Path(given.path) / "config.json").read_text())
        for threads in given.threads:
            for made in (saccade_rows(given, folder, threads), llama_rows(given, folder, config, threads)):
                for row in made:
                    rows.append(row)
                    print(row, file=sys.stderr, flush=True)
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
