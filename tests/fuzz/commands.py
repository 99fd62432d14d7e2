"""Command lines with mistakes, run in this process."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from fuzz.kinds import POLICIES
from fuzz.values import FLOATS, NAMES, NUMBERS, spoilt, spoilt_bytes

from saccade.cli.main import main

COMMANDS = {  # with an argument or without, and options
    "generate": (
        "the password is",
        "-f -m -p -n --temperature --top-p --top-k --min-p --repetition-penalty --stop --seed --report --logit-bias "
        "--presence-penalty --frequency-penalty --min-tokens --bad-word --stop-token-id --include-stop --quiet",
    ),
    "chat": (None, "-f -m -p -n --temperature --stop --seed --top-p --logit-bias"),
    "methods": (None, "--nothing"),
    "inspect": (None, "-f -m -p -o --max-tokens"),
    "calibrate": (None, "-f -m -o --out"),
    "eval score": ("folder", "-d"),
    "eval report": ("folder", "-o"),
    "eval predict": ("samples.jsonl", "-p -m --limit --protocol --history -o"),
    "eval prepare": (None, "-t --length --samples --seed -o --haystack --longbench --suite"),
    "eval nothing": (None, ""),
    "nothing": (None, ""),
}
SHARED = "--dtype --max-model-len --kv-memory --prefill-chunk --backend --threads --device"


class Commands:
    """``folder`` is where the commands run and write."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        folder.mkdir()
        (folder / "text.txt").write_text("The key is 7. " * 9)
        (folder / "binary").write_bytes(bytes(range(256)))
        (folder / "samples.jsonl").write_text(json.dumps({"id": "a", "prompt": "x"}) + "\n")
        (folder / "a folder").mkdir()

    def line(self, rng: random.Random) -> None:
        """Run one; AssertionError where it does anything but end with a code of ours and one line."""
        name = rng.choice([*COMMANDS, "generate", "generate", "chat"])
        argument, known = COMMANDS[name]
        args, options = name.split(), known.split()
        if argument is not None and rng.random() < 0.8:
            args.append(self._value(rng, argument) if rng.random() < 0.4 else argument)
        if name in ("generate", "chat", "inspect", "calibrate", "eval predict"):
            args += ["-m", str(self.checkpoint), "--kv-memory", "256KiB", "--max-model-len", "64"]
            options += SHARED.split()
        for option in rng.sample(options, min(len(options), rng.randint(0, 3))):
            args += [option] if rng.random() < 0.1 else [option, self._value(rng, option)]
        if rng.random() < 0.1:
            args = [spoilt(rng, one, 1) if rng.random() < 0.3 else one for one in args]
        # As a shell would have it: no NUL, and what is no UTF-8 as surrogates of bytes. A device is not opened.
        args = [one.replace("\x00", "").replace("\ud800", "\udc80") for one in args]
        data = rng.choice((b"", b"hello\n", b"/policy topk\n/load x\n/nothing\nhi\n", spoilt_bytes(rng, b"some text")))
        code, out, err = self.run(args, data)
        say = f"{args!r} ended with {code}; {err[-1500:]}"
        assert code in (0, 1, 2, 130), say
        assert "Traceback" not in err + out, say
        errors = [line for line in err.splitlines() if line.startswith("saccade: error:")]
        assert code != 2 or len(errors) == 1 or "Usage" in out + err or name == "chat", say
        assert all(len(line) < 6000 for line in err.splitlines()), say

    def _value(self, rng: random.Random, option: str) -> str:
        if option == "-p" and rng.random() < 0.6:
            return spoilt(rng, rng.choice(POLICIES))
        kinds = (
            lambda: str(rng.choice(NUMBERS[:-1])),
            lambda: str(rng.choice(FLOATS)),
            lambda: rng.choice(NAMES),
            lambda: rng.choice(
                ("text.txt", "binary", "a folder", "missing", "~nouser/x", "/proc/self/mem", "/dev/full")
            ),
            lambda: spoilt(rng, "a=1,b=2"),
        )
        return rng.choice(kinds)()

    def run(self, args: list[str], data: bytes) -> tuple[object, str, str]:
        """Exit code, output and errors of a command with ``data`` on standard input."""
        source = self.folder / "stdin"
        source.write_bytes(data)
        kept, shown, here = (sys.stdin, sys.stdout, sys.stderr), warnings.showwarning, os.getcwd()
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
        os.chdir(self.folder)
        code: object = None
        try:
            with open(source, encoding="utf-8") as sys.stdin:
                sys.stdout, sys.stderr = out, err
                try:
                    main(args)
                except SystemExit as leaving:
                    code = leaving.code
        finally:
            sys.stdin, sys.stdout, sys.stderr = kept
            warnings.showwarning = shown
            os.chdir(here)
        texts = []
        for stream in (out, err):
            with suppress(ValueError):
                stream.flush()
            texts.append(stream.buffer.getvalue().decode("utf-8", "replace") if not stream.closed else "")
        return 0 if code is None else code, texts[0], texts[1]
