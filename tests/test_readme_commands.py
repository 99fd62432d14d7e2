"""The README's commands, each read from the README itself and run as it stands: a line that breaks fails here.

Models that take gigabytes are replaced by small ones, and long runs are cut short, by the lists below and nothing
else. A line that cannot be run at all stands in ``NOT_RUN`` with the reason.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny, write
from test_cli import run
from tiny_models import one_thread  # noqa: F401

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FACT = "The secret password of the lighthouse keeper is 7391-XKQ. "
STANDS_FOR = {
    "Qwen/Qwen3-8B": "retriever",
    "smollm2": "retriever",
    "qwen2.5-coder": "retriever",
    "llama-bench": "true",  # a program that is there and says nothing
}
# What is put behind a command, so that a test has time for it: of an option given twice the last one counts.
CUT_SHORT = {
    "saccade chat": "--policy 'auto(least=4096, method=psa)'",  # else it times for a while what pays on this machine
    "saccade serve": "--policy 'auto(least=4096, method=psa)'",
    "saccade eval drift": "--length 256 --tokens 8 --no-rounding -p lfps",
    "saccade eval run": "--samples 1 --length 256 --out results -p psa",
    "saccade tune": "-f book.txt --length 256 --tokens 8 --seconds 1",
    "make demo": "--model reference --tokens 1024 --facts 2",
    "make figures": "disk --quick --record out",
    "saccade bench ttft": "--contexts 64 --threads 1",
    "saccade bench generate": "--contexts 64 --threads 1 --tokens 2",
    "python benchmarks/quantised_steps.py": "--threads 1 --contexts 16,24 --tokens 6",
    "python benchmarks/sessions.py": "--tokens 128 --repeats 1",
    "python benchmarks/real_models.py": "--length 512 --samples 0.02 --family facts --policy psa --device cpu --all "
    "--out out",
}
# A clone's distributions: the core, and those of packages/.
OTHERS = sorted(one.parent.name for one in ROOT.glob("packages/*/pyproject.toml"))
INSTALL = " ".join(["pip install .", *(f"./packages/{name}" for name in OTHERS)])
NOT_RUN = {
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "it downloads a package",
    "pip install torch": "it downloads a package",
    INSTALL: "it downloads packages; `make build` makes the wheels",
    "saccade fetch smollm2": "it downloads 98 MB; tests/test_models_fetching.py fetches what it makes itself",
    'SIZES=98304x8 DECODE="dense arkvale(budget=2048)" python benchmarks/gpu/endtoend.py': "it needs an H200",
    "python benchmarks/gpu/first_tokens.py": "it needs an H200",
}
THOROUGH = ("saccade bench", "saccade eval", "saccade tune", "make figures", "python benchmarks")


def blocks(language: str) -> list[str]:
    """The code of the README in a language; commands have none."""
    return [
        code
        for name, code in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
        if name == language
    ]


def without_comment(line: str) -> str:
    """A line up to a ``#`` that its shell takes for the beginning of a comment."""
    return re.sub(r"""^((?:[^'"#]|'[^']*'|"[^"]*"|(?<=\S)#)*?)\s+#.*""", r"\1", line).strip()


def lines() -> list[str]:
    """Commands of shell blocks, also those that a comment names behind a colon or two spaces, and of spans of text."""
    found = [line for block in blocks("") for line in block.splitlines()]
    comments = [line[len(without_comment(line)) :] for line in found]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))
    start = r"(?:[A-Z]+=\S+.* )?(?:saccade|python|pip|make) [a-z./]"
    named = [one[1] for comment in comments if (one := re.search(rf"[:;] +({start}.*)$", comment))]
    return [one for one in map(without_comment, found) if one] + named + [s for s in spans if re.match(start, s)]


COMMANDS = list(dict.fromkeys(lines()))
RUN = [line for line in COMMANDS if line not in NOT_RUN and not line.startswith(("saccade serve", "curl"))]


def words_of(line: str) -> list[str]:
    """The words of a command with what stands for its models, and what cuts it short."""
    more = next((CUT_SHORT[one] for one in CUT_SHORT if line.startswith(one)), "")
    words = [STANDS_FOR.get(word, word) for word in shlex.split(line)]
    return [*words, *shlex.split(more)]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the files that the README names, one for sessions, and a question on standard input."""
    (tmp_path / "book.txt").write_text(FACT + "Rain fell on the harbour, and all was quiet. " * 8, encoding="utf-8")
    shutil.copy(tmp_path / "book.txt", tmp_path / "contract.txt")
    write(tiny("llama", tmp_path / "made", max_position_embeddings=2048), tmp_path / "model-Q4_K_M.gguf", Kind.Q4_0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "benchmarks"))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{FACT}The secret password of the lighthouse keeper is\n/quit\n"))
    return tmp_path


def marked(line: str) -> object:
    return pytest.param(line, marks=pytest.mark.thorough if line.startswith(THOROUGH) else (), id=line[:60])


@pytest.mark.parametrize("line", map(marked, RUN))
def test_a_command_runs(line, place, capsys, monkeypatch):
    if line.startswith("saccade tune"):  # what it finds is kept in the cache; the others use the models that lie there
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    kind, *words = words_of(line)
    if kind == "make":  # what its recipe runs in the end, also where `make test` runs this
        own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        asked = ["make", "--no-print-directory", "-n", words[0]]
        told = subprocess.run(asked, cwd=ROOT, env=own, capture_output=True, text=True, check=True).stdout
        program, *recipe = shlex.split(told.strip().splitlines()[-1])
        kind, words = Path(program).name, [*recipe, *words[1:]]
    if kind == "python":
        words[0] = str(ROOT / words[0])
        done = fork_server.run(words)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        assert kind == "saccade", f"no test runs {kind}: {line}"
        code, out, err = run(capsys, *words)
    assert code == 0, err
    assert "Traceback" not in err
    assert out.strip()
    if line.startswith("saccade chat"):
        assert out.startswith(" 7391-XKQ")


def test_python_runs(place, capsys):
    assert blocks("python")
    for block in blocks("python"):
        for name, other in STANDS_FOR.items():
            block = block.replace(f'"{name}"', f'"{other}"')
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()
    assert (place / "contract.session").is_file()


@pytest.fixture
def server(place) -> Iterator[str]:
    """The address of the server that the README starts, stopped as by Ctrl-C."""
    (line,) = [line for line in COMMANDS if line.startswith("saccade serve")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"localhost:{free.getsockname()[1]}"
    words = [*words_of(line)[1:], "--port", address.partition(":")[2]]
    with (place / "server.txt").open("w") as said:
        process = fork_server.Forked(["-m", "saccade", *words], (os.open(os.devnull, 0), said.fileno(), said.fileno()))
        until = time.monotonic() + 120
        while "serving" not in (told := (place / "server.txt").read_text()):
            assert process.poll() is None, told
            assert time.monotonic() < until, told
            time.sleep(0.05)
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130), (place / "server.txt").read_text()


def test_the_server_answers_the_readmes_request(server):
    (line,) = [line for line in COMMANDS if line.startswith("curl")]
    assert "localhost:8000" in line
    assert "http://127.0.0.1:8000" in README
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    asked = line.replace("localhost:8000", server)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["finish_reason"]
    assert answer["usage"]["saccade"]["policy"] == "psa"


def test_the_port_is_the_servers_own():
    import typer

    from saccade.cli.main import app

    (port,) = [one for one in typer.main.get_command(app).commands["serve"].params if one.name == "port"]
    assert port.default == 8000


def test_what_is_installed_has_the_commands_below():
    assert INSTALL in COMMANDS, f"the README does not say: {INSTALL}"


def test_every_line_is_run_or_named_with_a_reason():
    assert len(RUN) > 12
    assert not [line for line in NOT_RUN if line not in COMMANDS], "NOT_RUN has lines that the README has not"
    assert not [name for name in STANDS_FOR if name not in README]
    assert not [start for start in CUT_SHORT if not any(line.startswith(start) for line in COMMANDS)]
    assert sum(line.startswith("saccade serve") for line in COMMANDS) == 1
    files = {word for line in COMMANDS for word in shlex.split(line) if word.endswith((".txt", ".gguf"))}
    assert files == {"book.txt", "model-Q4_K_M.gguf"}


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("saccade doctor", "saccade doctor"),
        ("saccade methods   # all of them", "saccade methods"),
        ("saccade generate '# no comment' # one", "saccade generate '# no comment'"),
        ('curl localhost -d \'{"a": "#b"}\'   # asks', 'curl localhost -d \'{"a": "#b"}\''),
        ("make figures#x", "make figures#x"),
    ],
)
def test_a_comment_is_no_part_of_a_command(line, command):
    assert without_comment(line) == command


def test_a_command_that_breaks_is_found(place, capsys, monkeypatch):
    for line in ("saccade generate -m Qwen/Qwen3-8B -f bok.txt 'Who?'", "saccade methods --all"):
        with pytest.raises(AssertionError):
            test_a_command_runs(line, place, capsys, monkeypatch)
