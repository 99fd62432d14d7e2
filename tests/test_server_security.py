"""Who may ask what, what a server reads at most, and what it never says."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import shutil
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest
from engine_helpers import make
from server_helpers import GREEDY, error, serving
from tiny_models import make_checkpoint, random_ids

from saccade.cli.main import main
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.server.admission import Admission, Caller
from saccade.server.errors import ApiError
from saccade.server.keys import Key, KeyRing, digest, new_key
from saccade.server.policies import PolicyRules
from saccade.server.settings import ServerConfig

ONE, TWO = "sk-first-key-of-tests", "sk-second-key-of-tests"
KEYS = KeyRing(
    [
        Key("one", digest(ONE), policies=PolicyRules(("topk(*)", "dense"))),
        Key("two", digest(TWO), max_concurrent=1, requests_per_minute=4),
    ]
)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture
def server(tiny_llama):
    rules = PolicyRules(("topk(*)", "streaming", "dense"))
    with serving(make(tiny_llama), keys=KEYS, policies=rules, body_seconds=0.5, header_seconds=0.5) as running:
        yield running
        running.idle()


def test_every_route_but_those_of_probes_needs_a_key(server):
    for path in ("/health", "/ready"):
        assert server.client.get(path).status_code == 200
    closed = ["GET /v1/models", "GET /metrics", "GET /version", "GET /openapi.json", "GET /nowhere", "POST /tokenize"]
    for asked in [*closed, "POST /v1/completions", "DELETE /v1/sessions/x", "OPTIONS /v1/completions"]:
        method, path = asked.split()
        for headers in ({}, bearer("sk-wrong"), {"authorization": ONE}, {"authorization": f"Basic {ONE}"}):
            refused = server.client.request(method, path, headers=headers)
            assert error(refused)[:2] == (401, "invalid_api_key"), path
            assert "sk-" not in refused.text
    assert server.client.get("/v1/models", headers=bearer(ONE)).status_code == 200


def test_a_key_has_its_own_limits_and_policies(server):
    ask = server.ask
    body = {"prompt": "x", **GREEDY}
    assert ask("/v1/completions", {**body, "policy": "topk(k=24)"}, **bearer(ONE)).status_code == 200
    refused = ask("/v1/completions", {**body, "policy": "streaming"}, **bearer(ONE))
    assert error(refused) == (403, "policy_not_allowed", "policy")
    assert ask("/v1/completions", {**body, "policy": "streaming"}, **bearer(TWO)).status_code == 200
    refused = ask("/v1/completions", {**body, "policy": "streaming(sinks=8)"}, **bearer(TWO))
    assert error(refused)[:2] == (403, "policy_not_allowed")
    assert error(ask("/v1/completions", {**body, "n": 2}, **bearer(TWO)))[::2] == (400, "n")
    got = [ask("/v1/completions", body, **bearer(TWO)), ask("/tokenize", {"prompt": "x"}, **bearer(TWO))]
    assert [one.status_code for one in got] == [200, 429]
    assert 1 <= int(got[1].headers["retry-after"]) <= 61
    assert ask("/v1/completions", body, **bearer(ONE)).status_code == 200


def test_a_key_has_so_many_samples_at_work_in_all_its_requests():
    admission = Admission(9)
    first, second, other = (
        Caller("r", Key(name, digest(name), max_concurrent=3)) for name in ("first", "first", "other")
    )
    admission.enter(first, 2)
    with pytest.raises(ApiError, match="the key first may have 3 samples at work at once") as caught:
        admission.enter(second, 2)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    admission.enter(second, 1)
    admission.enter(other, 3)
    with pytest.raises(ApiError, match="at work at once"):
        admission.enter(other, 1)
    assert admission.samples == 6  # what is turned away counts for nothing
    admission.leave(first, 2)
    admission.enter(second, 2)


def test_sessions_of_two_keys_do_not_meet(server):
    ids = random_ids(100, 1)
    for secret, cached in ((ONE, 0), (TWO, 0), (ONE, 99)):
        got = server.ask("/v1/completions", {"prompt": ids, **GREEDY, "session_id": "s"}, **bearer(secret)).json()
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert server.client.delete("/v1/sessions/s", headers=bearer(TWO)).status_code == 200
    assert server.client.delete("/v1/sessions/s", headers=bearer(TWO)).status_code == 404
    assert server.client.delete("/v1/sessions/s", headers=bearer(ONE)).status_code == 200


def test_prefixes_of_two_keys_or_salts_do_not_meet(tiny_llama):
    with serving(make(tiny_llama, enable_prefix_caching=True), keys=KEYS) as server:
        body = {"prompt": random_ids(100, 1), **GREEDY}
        cached = []
        for secret, salt in ((ONE, None), (ONE, None), (TWO, None), (ONE, "mine"), (ONE, "mine")):
            got = server.ask("/v1/completions", {**body, "cache_salt": salt}, **bearer(secret)).json()
            cached.append(got["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True, False, False, True]


def test_the_log_tells_who_and_what_for_and_never_the_prompt(server, caplog):
    with caplog.at_level(logging.DEBUG):
        headers = bearer(ONE) | {"x-request-id": "mine-1"}
        answer = server.ask("/v1/completions", {"prompt": "the-hidden-text", **GREEDY}, **headers)
        assert answer.headers["x-request-id"] == "mine-1"
        forged = server.ask("/tokenize", {"prompt": "the-hidden-text"}, **bearer(ONE), **{"x-request-id": "a b"})
        assert len(forged.headers["x-request-id"]) == 32
        server.ask("/v1/completions", {"prompt": ["the-hidden-text"], "n": "x"}, **bearer(ONE))
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    asked = next(one for one in fields if one["request_id"] == "mine-1")
    assert (asked["key"], asked["path"], asked["status"]) == ("one", "/v1/completions", 200)
    said = caplog.text + json.dumps(fields)
    assert "the-hidden-text" not in said
    assert ONE not in said


def raw(server, data: bytes, wait: float = 5) -> bytes:
    with socket.create_connection(server.server.address) as client:
        client.sendall(data)
        client.settimeout(wait)
        received = b""
        while part := client.recv(65536):
            received += part
        return received


def test_headers_and_bodies_must_come_in_time_and_be_short(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n" % ONE.encode()
    json_type = b"content-type: application/json\r\n"
    assert raw(server, b"GET / HT").startswith(b"HTTP/1.1 408")
    assert raw(server, b"") == b""
    assert b"408" in raw(server, head + json_type + b"content-length: 10\r\nconnection: close\r\n\r\n{")[:20]
    assert raw(server, head + b"x: " + b"y" * 70000).startswith(b"HTTP/1.1 431")
    assert raw(server, b"\x16\x03\x01 this is TLS\r\n\r\n").startswith(b"HTTP/1.1 400")
    big = head + json_type + b"content-length: 99999999999\r\nconnection: close\r\n\r\n"
    assert raw(server, big).startswith(b"HTTP/1.1 413")
    assert server.client.get("/health").status_code == 200


def test_a_body_is_bounded_however_it_comes(tiny_llama):
    with serving(make(tiny_llama), max_body=2000, max_nesting=8) as server:
        assert error(server.complete("x" * 3000))[:2] == (413, "request_too_large")
        chunks = (b"x" * 500 for _ in range(10))
        response = server.client.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
        assert error(response)[:2] == (413, "request_too_large")
        deep = {"prompt": "x", "metadata": {"a": [[[[[[[[1]]]]]]]]}}
        assert error(server.ask("/v1/completions", deep))[:2] == (400, "too_deep")
        flat = {"prompt": "{[" * 100, "metadata": {"a": [[[[[1]]]]]}, "max_tokens": 1}
        assert server.ask("/v1/completions", flat).status_code == 200


def test_a_server_without_keys_answers_to_its_own_machine_alone(tiny_llama):
    with pytest.raises(SaccadeError, match="API key"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", keys=KEYS).host == "0.0.0.0"
    with serving(make(tiny_llama), hosts=("proxy.example",), cors=("https://page.example",)) as server:
        get = server.client.get
        for host, status in (("evil.example", 403), ("proxy.example", 200), ("localhost:80", 200), ("[::1]:1", 200)):
            assert get("/v1/models", headers={"host": host}).status_code == status
        allowed = get("/v1/models", headers={"origin": "https://page.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = get("/v1/models", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_pages_of_other_origins_get_nothing_by_default(server):
    response = server.client.get("/v1/models", headers={**bearer(ONE), "origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_a_template_of_a_checkpoint_cannot_leave_its_sandbox(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "model")
    name = "chat_template.jinja"
    (folder / name).write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with serving(make(folder)) as server:
        assert error(server.chat())[0] == 400


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https(tiny_llama, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    with serving(make(tiny_llama), tls_certificate=certificate, tls_key=key) as server:
        assert server.url.startswith("https://")
        assert server.complete("x").status_code == 200


# --- keys and rules


def test_keys_are_read_from_a_file_that_holds_only_their_hashes(tmp_path):
    secret, table = new_key("team")
    assert secret not in table
    file = tmp_path / "keys.toml"
    file.write_text(table + 'max_concurrent = 3\npolicies = ["dense", "psa(*)"]\n')
    keys = KeyRing.load(file)
    found = keys.find(secret)
    assert found is not None
    assert (found.name, found.max_concurrent, found.requests_per_minute) == ("team", 3, None)
    assert keys.find(secret + "x") is None
    assert keys.with_secret("another-secret-key").find("another-secret-key").name == "environment"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold"),
        ("key = 5", "must hold"),
        ("[[key]]\nname = 'a'", "must have name and sha256"),
        ("[[key]]\nname = 'a b'\nsha256 = 'x'", "letters"),
        (f"[[key]]\nname = 'a'\nsha256 = '{ONE}'", "hexadecimal"),
        (f"[[key]]\nname = 'a'\nsha256 = '{digest(ONE)}'\nmax_concurrent = 0", "max_concurrent=0"),
        (f"[[key]]\nname = 'a'\nsha256 = '{digest(ONE)}'\npolicies = 'dense'", "list of texts"),
        (f"[[key]]\nname = 'a'\nsha256 = '{digest(ONE)}'\npolicies = ['nonesuch']", "nonesuch"),
        (f"[[key]]\nname = 'a'\nsha256 = '{digest(ONE)}'\n" * 2, "given twice"),
        ("[[", "not valid TOML"),
    ],
)
def test_a_file_of_keys_that_is_wrong_says_where(tmp_path, text, said):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(SaccadeError, match=said):
        KeyRing.load(file)


@pytest.mark.parametrize(
    ("rules", "policy", "allowed"),
    [
        (None, "dense", True),
        ((), "dense", False),
        (("dense",), "dense", True),
        (("psa(*)",), "dense", False),
        (("psa(*)",), "psa(epsilon=0.5)", True),
        (("psa(*)",), "flexprefill+psa", False),
        (("psa(*)", "flexprefill(*)"), "flexprefill+psa(epsilon=0.9)", True),
        (("flexprefill+psa",), "flexprefill+psa", True),
        (("flexprefill+psa",), "psa", False),
        (("psa(*)",), "psa+etf", False),
    ],
)
def test_rules_of_policies(rules, policy, allowed):
    assert PolicyRules(rules).allows(Policy.parse(policy)) == allowed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--api-keys", "/none"], "cannot be read"),
        (["--tls-key", "/none"], "TLS needs"),
        (["--allow-policy", "nix(*)"], "unknown method 'nix'"),
        (["--tool-parser", "nix"], "known: auto, none, "),
        (["--log-level", "loud"], "must be debug"),
        (["--port", "99999"], "port=99999"),
        (["--deadline", "-1"], "deadline=-1"),
    ],
)
def test_the_command_refuses_what_is_wrong(capsys, arguments, said, monkeypatch):
    monkeypatch.delenv("SACCADE_API_KEY", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_makes_keys(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["serve", "--new-key", "team"])
    table, said = capsys.readouterr()
    (tmp_path / "keys.toml").write_text(table)
    secret = said.split("once: ")[1].strip()
    assert secret not in table
    assert KeyRing.load(tmp_path / "keys.toml").find(secret).name == "team"


def test_a_session_is_forgotten_when_it_is_old_or_one_too_many(tiny_llama, monkeypatch):
    with serving(make(tiny_llama), max_sessions=2, session_seconds=600) as server:
        for name in ("a", "b", "c"):
            server.complete([5, 6], session_id=name)
        assert len(server.serving.sessions) == 2
        assert server.client.delete("/v1/sessions/a").status_code == 404
        now = time.monotonic()
        monkeypatch.setattr("saccade.server.sessions.time", SimpleNamespace(monotonic=lambda: now + 601))
        server.complete([5, 6], session_id="d")
        assert len(server.serving.sessions) == 1
        server.complete([7])
        assert len(server.llm.engine.sessions) == 1


def test_the_page_needs_nothing_from_elsewhere_and_may_reach_nothing_else(server):
    page = server.client.get("/")  # without a key: it asks for one, and holds no data
    rules = page.headers["content-security-policy"]
    assert "default-src 'none'" in rules
    assert "connect-src 'self'" in rules
    assert "unsafe" not in rules
    assert "//" not in page.text.partition("<script>")[0]
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page.text)
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in rules
    metrics = server.client.get("/metrics", headers=bearer(ONE)).text
    for name in re.findall(r'total\(text, "(\w+)"\)', script):  # what it reads of the metrics is there
        assert f"# TYPE saccade:{name.removesuffix('_total').removesuffix('_sum').removesuffix('_count')}" in metrics
