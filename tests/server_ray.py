"""Replicas on Ray Serve (``make test-ray``): sessions stay with their replica, a killed one is told of and replaced,
one that goes ends what it is at. Routing, the ingress and replicas alone are in test_server_fleet.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml
from server_helpers import GREEDY, parsed, until
from tiny_models import make_checkpoint, random_ids

ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402

from saccade.engine.settings.config import EngineConfig  # noqa: E402
from saccade.errors import SaccadeError  # noqa: E402
from saccade.server import ray_app  # noqa: E402
from saccade.server.ray_app import APPLICATION, FleetConfig, application, build, deployment_name  # noqa: E402
from saccade.server.settings import ServerConfig  # noqa: E402

DEPLOY = Path(__file__).parents[1] / "deploy"


def target(folder, replicas: int, sessions: Path | None = None):
    engine = EngineConfig.of(
        model=str(folder), kv_memory="64MiB", threads=1, enable_prefix_caching=True, session_dir=sessions
    )
    return application(engine, ServerConfig(), FleetConfig(replicas, cpus=0.2), True, "warning")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(target(folder, 3), name=APPLICATION, route_prefix="/")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        yield client, folder
    serve.shutdown()
    ray.shutdown()


def workers() -> list[int]:
    """Processes of engine replicas."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if "ServeReplica:saccade:engine" in place.read_text():
                found.append(int(place.parent.name))
        except OSError:
            continue
    return sorted(found)


def streamed(client: httpx.Client, **fields) -> list:
    body = {"prompt": "x", **GREEDY, "stream": True, **fields}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        return parsed(response.iter_lines())


def test_no_turn_leaves_its_owner(fleet):
    client, _ = fleet
    for session in range(30):
        ids = random_ids(100, session)
        for turn in range(4):
            ids += random_ids(40 * bool(turn), 100 * session + turn)
            asked = {"prompt": ids, **GREEDY, "session_id": f"s{session}"}
            usage = client.post("/v1/completions", json=asked).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= (len(ids) - 41 if turn else 0)
    first = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 4}).json()
    for _ in range(8):
        first = client.post(
            "/v1/responses", json={"input": "more", "previous_response_id": first["id"], "max_output_tokens": 4}
        ).json()
    assert client.get(f"/v1/responses/{first['id']}").status_code == 200


def test_a_killed_replica_is_told_of_and_replaced(fleet):
    client, _ = fleet
    before, ends = workers(), []

    def ask(number: int) -> None:
        events = streamed(client, max_tokens=800, session_id=f"k{number}")
        assert events[-1] == "[DONE]"
        reasons = [choice["finish_reason"] for one in events[:-1] for choice in one.get("choices", [])]
        failed = [one["error"]["code"] for one in events[:-1] if "error" in one]
        assert (reasons[-1:] == ["length"]) != bool(failed), "complete, or an error that says so"
        ends.append(failed[0] if failed else "complete")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert len(ends) == 12
    assert set(ends) <= {"complete", "replica_lost"}
    assert "replica_lost" in ends
    for number in range(12):
        asked = {"prompt": random_ids(50, number), **GREEDY, "session_id": f"k{number}"}
        assert client.post("/v1/completions", json=asked).status_code == 200
    until(lambda: len(workers()) == 3 and before[0] not in workers(), 120)
    assert client.get("/ready").status_code == 200


def test_a_replica_that_goes_ends_what_it_is_at(fleet):
    client, folder = fleet
    events: list[list] = []
    threads = [
        threading.Thread(target=lambda n=n: events.append(streamed(client, max_tokens=600, session_id=f"d{n}")))
        for n in range(9)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    serve.run(target(folder, 1), name=APPLICATION, route_prefix="/")
    for thread in threads:
        thread.join(120)
    assert len(events) == 9
    assert all(one[-2]["choices"][0]["finish_reason"] == "length" for one in events)
    until(lambda: len(workers()) == 1, 60)


def test_sessions_of_a_killed_replica_go_on_elsewhere(fleet, tmp_path):
    client, folder = fleet
    serve.run(target(folder, 2, tmp_path), name=APPLICATION, route_prefix="/")
    until(lambda: len(workers()) == 2 and len(list(tmp_path.glob("process.*"))) == 2, 120)
    prompts = {f"m{number}": random_ids(100, number) for number in range(8)}

    def turn(number: int) -> None:
        """Every session says something new, and what it had said before is found."""
        for name, ids in prompts.items():
            before, more = len(ids), random_ids(20, number)
            ids += more if number else []
            answer = client.post("/v1/completions", json={"prompt": ids, **GREEDY, "session_id": name}).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= (before - 1 if number else 0)
        until(lambda: len(list(tmp_path.glob("process.*/s*/head"))) >= len(prompts), 60)

    turn(0)
    owners = {path.parent.parent.name for path in tmp_path.glob("process.*/s*/head")}
    assert len(owners) == 2, "both replicas have some"
    time.sleep(2.0)  # what the last turn said is stored behind it
    killed = workers()[0]
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in workers() and client.get("/ready").status_code == 200, 60)
    turn(1)
    until(lambda: len(workers()) == 2, 120)
    time.sleep(2.0)
    turn(2)
    name = next(iter(prompts))
    assert client.delete(f"/v1/sessions/{name}").json()["deleted"]
    assert len({path.parent.name for path in tmp_path.glob("process.*/s*/head")}) == len(prompts) - 1


def test_the_manifest_builds_and_its_times_fit(monkeypatch):
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    serve.schema.ServeDeploySchema.model_validate(config)
    (app,) = config["applications"]
    assert app["import_path"] == "saccade.server.ray_app:build"
    monkeypatch.setattr(ray_app.KeyRing, "load", lambda path: ray_app.KeyRing().with_secret("a-key-that-tests-use"))
    build(app["args"])
    with pytest.raises(SaccadeError, match="unknown argument 'modle'"):
        build({"modle": 1})
    with pytest.raises(SaccadeError, match="kv_memory"):
        build({"fleet": {"gpus": 0.5}})
    with pytest.raises(SaccadeError, match=r"takes 2 GPUs a replica, or none; got --replica-gpus 1"):
        build({"engine": {"tensor_parallel_size": 2, "device": "cpu"}, "fleet": {"gpus": 1}})
    build({"engine": {"tensor_parallel_size": 2, "device": "cpu"}, "fleet": {"gpus": 2}})
    deadline = app["args"]["server"]["deadline"]
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= deadline + ray_app.MARGIN
    assert config["http_options"]["request_timeout_s"] >= deadline + ray_app.MARGIN
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == json.loads(json.dumps(ray.__version__))


def test_another_way_to_route_is_another_deployment():
    routers = [
        RequestRouterConfig(request_router_class=ray_app.ROUTER, request_router_kwargs={"num_fallback_replicas": most})
        for most in (0, 2)
    ]
    assert deployment_name(routers[0]) != deployment_name(routers[1])
