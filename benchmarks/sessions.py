"""How long a stored session takes to come back: until it is there, and until the first token of its next turn.

    python benchmarks/sessions.py [--model random] [--tokens 32768] [--turn-tokens 16] [--policy dense] [--repeats 5]
        [--dtype bfloat16] [--device cpu] [--folder FOLDER]

The history has random tokens, keys and values: what it costs to store and restore them does not hang on what they are,
and no prefill of hours comes before the measurement. *Warm*: the records are in the system's page cache, as after a
crash of the process. *Cold*: the system was told to drop them first (posix_fadvise), as after a restart of the machine;
the disk below may have a cache of its own. *CPU*: seconds of all threads, which others that use the machine change
little. ``--model reference --tokens 900000`` takes its positions from a copy of the
checkpoint with a longer limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.engine.memory.sequence import Span
from saccade.kv.saved import append_rows
from saccade.machine import show_bytes
from saccade.session import Session


def fill(session: Session, tokens: list[int]) -> None:
    """Make ``tokens`` a session's whole context, as if a prefill had computed them; their keys are random."""
    sequence, spec = session.sequence, session.llm.model.spec
    kv, generator, done = sequence.kv, torch.Generator().manual_seed(0), 0
    while done < len(tokens):
        count = min(8192, len(tokens) - done)
        shape = (spec.layers, spec.kv_heads, count, spec.head_dim)
        rows = {name: torch.randn(shape, generator=generator).to(spec.dtype) for name in "kv"}
        append_rows(kv, rows)
        done += count
    sequence.tokens = list(tokens)
    sequence.spans = [Span(0, len(tokens), "prefill", session.policy)]
    sequence.filled(len(tokens))
    sequence.salt = ""


def with_positions(folder: Path, most: int, scratch: Path) -> Path:
    """The checkpoint, or a copy of it that takes ``most`` positions."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= most:
        return folder
    copy = scratch / "longer"
    shutil.copytree(folder, copy)
    config["max_position_embeddings"] = most
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def dropped(folder: Path) -> None:
    """Have the system forget the files' pages."""
    for file in folder.glob("*/*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--turn-tokens", type=int, default=16)
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="Where the session is stored; a temporary folder by default.")
    options = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    length = options.tokens + options.repeats * 2 * (options.turn_tokens + 2) + 64
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(options.model, Path(scratch) / "model", getattr(torch, options.dtype), length)
        store = options.folder or Path(scratch) / "sessions"
        with LLM(
            with_positions(folder, length, Path(scratch)),
            dtype=options.dtype,
            device=options.device,
            max_model_len=length,
            max_requests=1,
            session_dir=f"{store}:1TiB",
            enable_prefix_caching=False,
        ) as llm:
            assert llm.sessions is not None
            vocab = llm.model.spec.vocab_size
            session = llm.session(options.policy, name="talk")
            fill(session, prompt(options.tokens, vocab))
            began = time.perf_counter()
            session._ended()
            captured = time.perf_counter() - began
            llm.sessions.flush()
            written = time.perf_counter() - began
            stored = llm.sessions.size
            began = time.perf_counter()
            session.generate(prompt(options.turn_tokens, vocab, seed=7), params)
            llm.sessions.flush()
            first = time.perf_counter() - began
            added = llm.sessions.counts["bytes_written"] - stored
            session.close()
            times: dict[str, list[tuple[float, ...]]] = {"warm": [], "cold": []}
            for number in range(2 * options.repeats):
                kind = ("warm", "cold")[number % 2]
                if kind == "cold":
                    dropped(store)
                began, spent = time.perf_counter(), time.process_time()
                session = llm.session(name="talk")
                there, spent = time.perf_counter() - began, time.process_time() - spent
                assert session.note is None, session.note
                output = session.generate(prompt(options.turn_tokens, vocab, seed=number), params)
                assert output.metrics is not None
                assert output.metrics.first_token_latency is not None
                times[kind].append((there, there + output.metrics.first_token_latency, spent))
                session.close()  # waits for the turn to be stored
    print(f"{options.model}, {options.tokens} tokens, {options.policy}, {show_bytes(stored)}; seconds")
    print(f"stored behind a turn     {written:8.3f}; the turn's caller waits {1000 * captured:.1f} ms")
    print(f"the next turn and store  {first:8.3f}; {show_bytes(added)} written")
    for kind, found in times.items():
        for name, column in zip(("restored", "first token", "restored, CPU"), zip(*found)):
            most = max(column)
            print(f"{kind}, {name:14} {statistics.median(column):8.3f} (median), {min(column):.3f} to {most:.3f}")


if __name__ == "__main__":
    main()
