"""The steps of a container file, run one by one in a root file system of their own, where there is no container engine.

    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm base
    ln -s python3 base/usr/bin/python
    python tools/try_container.py deploy/Dockerfile --base base --arg TORCH_INDEX=...

stands in for ``docker build`` and ``docker run`` as far as Saccade's file goes (FROM, ARG, ENV, SHELL, RUN, COPY,
WORKDIR, USER, VOLUME and what runs in the end; any other instruction is an error): each stage begins as a copy of
``--base``, RUN lines are run there by chroot, and what ENTRYPOINT and CMD name is started as the file's user with a
key, asked with and without it, held to HEALTHCHECK and told to end. It takes root, and unshare and chroot.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEYS = "/etc/saccade/keys.toml"
QUESTION = {"prompt": "The password of the ferry pilot is 7391-XKQ. It was late. The password of the ferry pilot is"}
ANSWER = "7391-XKQ"


def instructions(text: str) -> list[tuple[str, str]]:
    """A container file's instructions, such as ("RUN", "pip install ."), without comments, lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)
    ]


@dataclass
class Stage:
    """A root file system and what the instructions so far have set."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    args: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    user: str = "0"
    health: list[str] = field(default_factory=list)
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def inside(self, words: list[str]) -> list[str]:
        """The command that runs ``words`` in here."""
        home = "/root" if self.user == "0" else f"/home/{self.name()}"
        env = {"HOME": home, **self.args, **self.env}
        told = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *words]
        mounts = (
            'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot --userspec "$1" "$0" "${@:2}"'
        )
        within = ["sh", "-c", 'cd "$0" && exec "$@"', self.folder, *told]
        group = f"{self.user}:{self.user}"
        return ["unshare", "--mount", "bash", "-c", mounts, str(self.root), group, *within]

    def name(self) -> str:
        users = (line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines())
        return next(name for name, _, number, *_ in users if number == self.user)


def build(file: Path, context: Path, base: Path, work: Path, given: dict[str, str]) -> Stage:
    """The last stage, all steps done."""
    stages: dict[str, Stage] = {}
    known: dict[str, str] = {}  # ARGs before the first FROM
    stage: Stage | None = None
    for name, rest in instructions(file.read_text(encoding="utf-8")):
        print(f"{name} {rest}", flush=True)
        if name == "ARG":
            key, _, value = rest.partition("=")
            (known if stage is None else stage.args)[key] = given.get(key, value)
            continue
        if name == "FROM":
            label = rest.partition(" AS ")[2] or str(len(stages))
            stage = stages[label] = Stage(work / label)
            subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(stage.root)], check=True)
            continue
        assert stage is not None, f"{name} before FROM"
        values = {**stage.args, **stage.env}
        if name == "ENV":
            for pair in shlex.split(rest):
                key, _, value = pair.partition("=")
                stage.env[key] = string.Template(value).safe_substitute(values)
        elif name == "SHELL":
            stage.shell = json.loads(rest)
        elif name == "RUN":
            subprocess.run(stage.inside([*stage.shell, rest]), check=True)
        elif name == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            words = rest.split()
            source = stages[words.pop(0).partition("=")[2]].root if words[0].startswith("--from=") else context
            to = stage.root / os.path.normpath(os.path.join(stage.folder, words[-1])).lstrip("/")
            for one in words[:-1]:
                copy(source / one.lstrip("/"), to, into=words[-1].endswith("/"))
        elif name == "USER":
            stage.user = rest
        elif name == "HEALTHCHECK":
            stage.health = json.loads(rest.partition("CMD ")[2])
        elif name in ("ENTRYPOINT", "CMD"):
            setattr(stage, {"ENTRYPOINT": "entry", "CMD": "command"}[name], json.loads(rest))
        elif name not in ("VOLUME", "EXPOSE"):
            raise SystemExit(f"{file}: this script does not know {name}")
    assert stage is not None
    return stage


def copy(source: Path, to: Path, into: bool) -> None:
    """As COPY copies: a folder's contents into a folder, a file under its name into a folder that is written so."""
    if source.is_dir():
        shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True)
    else:
        target = to / source.name if into else to
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def tried(stage: Stage) -> None:
    """The server of a built stage, from start to end."""
    made = subprocess.run(
        stage.inside(["saccade", "serve", "--new-key", "trial"]), check=True, text=True, capture_output=True
    )
    (stage.root / "etc/hosts").write_text("127.0.0.1 localhost\n")  # which an engine writes, too
    keys = stage.root / KEYS.lstrip("/")
    keys.parent.mkdir(parents=True, exist_ok=True)
    keys.write_text(made.stdout)
    key = re.findall(r"\S{20,}", made.stderr)[-1]
    server = subprocess.Popen(stage.inside([*stage.entry, *stage.command]), start_new_session=True)
    try:
        end = time.monotonic() + 600
        while subprocess.run(stage.inside(stage.health), capture_output=True, check=False).returncode:
            assert server.poll() is None, f"the server ended with code {server.returncode}"
            assert time.monotonic() < end, "no health within ten minutes"
            time.sleep(2)
        assert asked("no key") == 401
        assert asked(key) == 200
        os.kill(server.pid, signal.SIGTERM)
        code = server.wait(60)
        assert code in (0, 143), f"the server ended with code {code} when it was told to"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
    print("healthy, answered with the key, refused without it, ended when it was told to")


def asked(key: str) -> int:
    """The status of a request, whose answer must be right where there is one."""
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions",
        json.dumps({"model": "retriever", "max_tokens": 12, "temperature": 0, **QUESTION}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            said = response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code
    assert ANSWER in said, said
    return 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--base", type=Path, required=True, help="A root file system in the place of each FROM's image."
    )
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="As docker's --build-arg.")
    parser.add_argument("--work", type=Path, default=Path("build/container"), help="A folder that is emptied first.")
    given = parser.parse_args()
    if os.geteuid():
        sys.exit("chroot takes root")
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    args = dict(one.split("=", 1) for one in given.arg)
    context = Path(__file__).parent.parent
    tried(build(given.file, context, given.base.resolve(), given.work.resolve(), args))


if __name__ == "__main__":
    main()
