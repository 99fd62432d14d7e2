"""Models by their hub names, from a hub on this machine: a small server that answers as the real one does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants
from tiny_models import make_checkpoint

from saccade.errors import ModelError
from saccade.models import hub
from saccade.models.folders import checkpoint_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEMPLATE = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
REPOS = ("tiny/llama", "tiny/torch-only", "tiny/recurrent")


class Hub(BaseHTTPRequestHandler):
    """Models below ``root``, each at one commit, known as ``main`` and ``v1`` too."""

    root: Path
    asked: list[str]

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        type(self).asked.append(path)
        api = path.startswith("/api/models/")
        org, name, *rest = path.removeprefix("/api/models/").strip("/").split("/")
        folder = type(self).root / org / name
        if not folder.is_dir():
            self._answer(401 if api else 404, b"{}", X_Error_Code="RepoNotFound")
        elif len(rest) > 1 and rest[1] not in ("main", "v1", COMMIT):
            self._answer(404, b"{}", X_Error_Code="RevisionNotFound")
        elif api:
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            names = [str(file.relative_to(folder)) for file in files]
            if rest and rest[0] == "tree":
                listed = [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": tag(file)}
                    for name, file in zip(names, files)
                ]
                self._answer(200, json.dumps(listed).encode(), Content_Type="application/json")
                return
            info = {"id": f"{org}/{name}", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self._answer(200, json.dumps(info).encode(), Content_Type="application/json")
        else:
            file = folder.joinpath(*rest[2:])
            if not file.is_file():
                self._answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                return
            self._answer(200, file.read_bytes(), ETag=f'"{tag(file)}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def tag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    folder = make_checkpoint("llama", root / "tiny" / "llama")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"x")
    for name, config in (
        ("torch-only", (folder / "config.json").read_text()),
        ("recurrent", '{"model_type": "mamba"}'),
    ):
        (root / "tiny" / name).mkdir()
        (root / "tiny" / name / "config.json").write_text(config)
        (root / "tiny" / name / "pytorch_model.bin").write_bytes(b"pickled")
    (root / "tiny" / "recurrent" / "model.safetensors").write_bytes(b"huge")
    Hub.root, Hub.asked = root, []
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()


@pytest.fixture
def here(server, tmp_path, monkeypatch):
    """This process's hub is the server, and its cache is empty at first."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)

    def at(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + TEMPLATE)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.chdir(tmp_path)
    close_session()
    at(server)
    Hub.asked.clear()
    yield at
    close_session()


def test_a_model_by_its_hub_name(here, server, tmp_path):
    """Fetched once, then taken from the cache, by a process that is offline; only what is needed comes."""
    hub.fetch("tiny/llama")
    fetched = {path.partition(COMMIT + "/")[2] for path in Hub.asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
    assert not {name for name in fetched if name.endswith(".bin") or "/" in name}
    asked = len(Hub.asked)
    words = ["generate", "hello", "-n", "3", "--ignore-eos", "-m", "tiny/llama"]
    given = {"HF_ENDPOINT": server, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    offline = subprocess.run(
        [sys.executable, "-m", "saccade", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **given},
    )
    assert offline.returncode == 0, offline.stderr
    assert "[length] prefill" in offline.stderr
    assert len(Hub.asked) == asked


def test_a_revision_is_asked_for(here):
    assert hub.fetch("tiny/llama@v1").name == COMMIT
    assert any("/revision/v1" in path for path in Hub.asked)


@pytest.mark.parametrize(
    ("model", "offline", "address", "message"),
    [
        ("tiny/absent", False, None, "'tiny/absent' is neither a folder here nor a model on http://127.0.0.1"),
        ("tiny/llama@v9", False, None, "tiny/llama has no revision 'v9'; give a branch, tag or commit"),
        ("tiny/llama", True, None, "not in the cache, and HF_HUB_OFFLINE is set; fetch it where"),
        ("tiny/llama", False, "http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached"),
        ("tiny/torch-only", False, None, "tiny/torch-only holds no safetensors"),
        ("tiny/recurrent", False, None, "mamba"),
    ],
)
def test_what_cannot_be_had_is_one_line(here, monkeypatch, capfd, model, offline, address, message):
    """And nothing large was fetched before it was known."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    if address:
        here(address)
    with pytest.raises(ModelError) as caught:
        hub.fetch(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not any(path.endswith((".safetensors", ".bin")) for path in Hub.asked)


def test_folders_come_before_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.is_name("tiny/llama")
    assert hub.is_name("tiny/llama@refs/pr/1")
    (tmp_path / "tiny" / "llama").mkdir(parents=True)
    assert not hub.is_name("tiny/llama")
    assert checkpoint_folder("tiny/llama") == Path("tiny/llama")
    for other in ("./a/b", "/a/b", "a", "a/b/c", "~/b", "a/", "", Path("a/b"), "a b/c"):
        assert not hub.is_name(other)


def test_two_revisions_are_one_too_many():
    with pytest.raises(ModelError, match="names a revision and revision='b' another"):
        hub.fetch("tiny/llama@a", "b")
    with pytest.raises(ModelError, match="revision='b' is for models of a hub"):
        checkpoint_folder("./folder", "b")
