"""A server's sessions survive it: by key and by name, whatever ended it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest
from engine_helpers import make
from server_helpers import GREEDY, error, serving, until
from tiny_models import one_thread as one_thread
from tiny_models import random_ids

from saccade.errors import RequestError


def test_a_restarted_server_goes_on(tiny_llama, tmp_path):
    ids = random_ids(100, 1)
    with serving(make(tiny_llama, session_dir=tmp_path)) as server:
        server.complete(ids, session_id="a/b ..\u00e9")
        text = server.client.get("/metrics").text
        assert 'saccade:num_stored_sessions{model_name="' in text
        with pytest.raises(RequestError, match="in use"):
            make(tiny_llama, session_dir=tmp_path)
    longer = ids + random_ids(30, 2)
    with serving(make(tiny_llama, session_dir=tmp_path)) as server:
        again = server.complete(longer, session_id="a/b ..\u00e9").json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
        assert "saccade:session_restores_total" in server.client.get("/metrics").text
        assert again["choices"] == server.complete(longer).json()["choices"]
        assert server.complete(ids, session_id="a/b").json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(server.llm.sessions.stored()) >= 1
        server.complete(ids, session_id="z")
        assert server.client.delete("/v1/sessions/z").json()["deleted"]
        assert server.client.delete("/v1/sessions/z").status_code == 404
        assert not server.llm.sessions.has("z")
    llm = make(tiny_llama, session_dir=tmp_path)
    for one in (tmp_path).glob("s*/head"):
        one.write_bytes(one.read_bytes()[:100])
    with serving(llm) as server:  # what is torn is refused, and the client is served all the same
        torn = server.complete(longer, session_id="a/b ..\u00e9").json()
        assert torn["choices"] == again["choices"]
        assert server.llm.sessions.counts["refused"] == 1
        assert server.complete(longer, session_id="a/b ..\u00e9").json()["usage"]["prompt_tokens"] == 130


def test_half_a_surrogate_pair_names_no_session(tiny_llama, tmp_path):
    llm = make(tiny_llama, session_dir=tmp_path)
    for name in ("\ud800", "a\udfffb"):
        with pytest.raises(RequestError, match=r"name=.* cannot name a session: U\+D[8F]"):
            llm.session(name=name)
        with pytest.raises(RequestError, match="half of a surrogate pair"):
            llm.sessions.forget(name)
    with serving(llm) as server:
        for name in ("\ud800", "a\udfffb"):
            answer = server.complete([5, 6], session_id=name)
            assert error(answer) == (400, None, "session_id")
            assert "half of a surrogate pair" in answer.json()["error"]["message"]
        assert not server.serving.sessions._held
        assert server.complete([5, 6], session_id="a", cache_salt="\ud800", user="\ud800").status_code == 200
        server.llm.sessions.flush()
        assert server.llm.sessions.counts["failed"] == 0
    with serving(make(tiny_llama, session_dir=tmp_path)) as server:  # a salt may be any text
        again = server.complete([5, 6, 7, 8], session_id="a", cache_salt="\ud800")
        assert again.status_code == 200
        assert server.llm.sessions.counts["restores"] == 1


CODE = """
import sys
from saccade.cli.main import main
main(["serve", "--model", sys.argv[1], "--port", sys.argv[2], "--kv-memory", "8MiB", "--dtype", "float32",
      "--session-dir", sys.argv[3] + ":1GiB", "--log-level", "error"])
"""


def test_what_a_crash_leaves_goes_on(tiny_llama, tmp_path):
    """The folder as it is while the server runs, which nothing has closed."""
    body, live, left = {"prompt": random_ids(100, 1), **GREEDY, "session_id": "s"}, tmp_path / "live", tmp_path / "left"
    with serving(make(tiny_llama, session_dir=live)) as server:
        answer = server.ask("/v1/completions", body).json()
        until(lambda: list(live.glob("s*/head")))  # it is saved behind the turn
        shutil.copytree(live, left)
    with serving(make(tiny_llama, chunk=4096, session_dir=left)) as server:
        again = server.ask("/v1/completions", body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
        assert again["choices"] == answer["choices"]


@pytest.mark.thorough
def test_a_killed_server_goes_on(tiny_llama, tmp_path):
    ids, port = random_ids(100, 1), "18471"
    body, ends = {"prompt": ids, **GREEDY, "session_id": "s"}, time.monotonic() + 120
    with subprocess.Popen([sys.executable, "-c", CODE, str(tiny_llama), port, str(tmp_path)]) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                while True:
                    try:
                        answer = client.post("/v1/completions", json=body).json()
                        break
                    except httpx.ConnectError:
                        assert time.monotonic() < ends
                        time.sleep(0.2)
                while not list(tmp_path.glob("s*/head")):  # it is saved behind the turn
                    assert time.monotonic() < ends
                    time.sleep(0.02)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    with serving(make(tiny_llama, chunk=4096, session_dir=tmp_path)) as server:
        again = server.ask("/v1/completions", body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
        assert again["choices"] == answer["choices"]
