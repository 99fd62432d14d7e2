"""Replicas on Ray Serve: an ingress deployment in front of an engine deployment (docs/scale-out.md).

Only ``saccade serve --ray`` and Ray's own configuration files (``import_path: saccade.server.ray_app:build``) import
this; it needs the extra ``ray``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException

from saccade.engine.settings.config import PROFILE, EngineConfig
from saccade.errors import SaccadeError, finite_number, shown, whole_number
from saccade.llm import LLM
from saccade.methods.policy import Policy
from saccade.server import TOKEN_GAP
from saccade.server.engine_client import EngineProcess
from saccade.server.engines import EngineFace, LocalEngine
from saccade.server.errors import ApiError
from saccade.server.ingress import Forwarded, Head, Ingress, Part, ReplicaLost, Replicas
from saccade.server.keys import KeyRing
from saccade.server.logs import log_to_stderr
from saccade.server.policies import PolicyRules
from saccade.server.replica import Replica
from saccade.server.settings import ServerConfig

APPLICATION = "saccade"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
MARGIN = 30.0  # seconds that a replica may take to end beyond its longest request
# Ray asks a replica for its queue before it sends a request, and goes to the next one on the ring where no answer comes
# in time: by default 0.1 s, in which a busy machine may not answer; a turn then leaves the replica that knows it.
PATIENCE = {
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
}
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # replicas write a line of their own for each request
LONGEST = 600.0  # seconds of a request, where no deadline is given


@dataclass(frozen=True)
class FleetConfig:
    """How many replicas there are, and what each one takes.

    ``replicas``: that always run; ``max_replicas``: with load, the same by default. ``gpus``, ``cpus``: of each; a part
    of a GPU is shared. ``ingresses``: in front of them. ``target_requests``: that a replica is to have at work and
    waiting: with more of them on average, replicas are added. ``downscale_seconds``: how long it must be quiet before
    one goes.
    """

    replicas: int = 1
    max_replicas: int | None = None
    gpus: float = 0.0
    cpus: float = 1.0
    ingresses: int = 1
    target_requests: float = 16.0
    downscale_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("replicas", "ingresses"):
            if not whole_number(getattr(self, name), 1):
                raise SaccadeError(f"{name}={shown(getattr(self, name))} must be an integer >= 1")
        if self.max_replicas is not None and not whole_number(self.max_replicas, self.replicas):
            raise SaccadeError(f"max_replicas={shown(self.max_replicas)} must be an integer >= {self.replicas}")
        for name in ("gpus", "cpus"):
            if not finite_number(getattr(self, name)) or getattr(self, name) < 0:
                raise SaccadeError(f"{name}={shown(getattr(self, name))} must be a number >= 0")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise SaccadeError(f"gpus={shown(self.gpus)} must be a part of one GPU, or a whole number")
        for name in ("target_requests", "downscale_seconds"):
            if not finite_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise SaccadeError(f"{name}={shown(getattr(self, name))} must be a number above 0")


class EngineReplica:
    """The engine deployment: one replica in one actor."""

    async def __init__(  # type: ignore[misc]
        self, engine: EngineConfig, server: ServerConfig, one_process: bool, log_level: str
    ) -> None:
        log_to_stderr(log_level)
        made = await asyncio.get_running_loop().run_in_executor(
            None, lambda: _engine(engine, one_process, log_level, server.step_limit)
        )
        self._replica = Replica(made, server)
        await self._replica.start()

    async def answer(self, request: Forwarded) -> AsyncIterator[Part]:
        async for part in self._replica.answer(request):
            yield part

    async def check_health(self) -> None:
        """Ray starts another replica in place of one that raises here."""
        self._replica.check()

    async def __del__(self) -> None:
        self._replica.close()


def _engine(config: EngineConfig, one_process: bool, log_level: str, limit: float) -> EngineFace:
    if one_process:
        return LocalEngine(LLM(config=config), limit=limit, policies=[Policy.parse(config.policy)])
    return EngineProcess(config, log_level, limit=limit, policies=[Policy.parse(config.policy)])


class RayReplicas:
    """The engine deployment as the ingress sees it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)

    async def send(self, request: Forwarded, route: str) -> AsyncIterator[Part]:
        answer = self._handle.options(session_id=route).remote(request)
        try:
            async for part in answer:
                yield part
        except BackPressureError:
            full = ApiError(429, "all replicas are full; try again later", "rate_limit_exceeded")
            yield Head(429, [(b"content-type", b"application/json"), (b"retry-after", b"1")])
            yield full.encoded(request.path)[1]
        except (RayError, RayServeException) as error:
            raise ReplicaLost(f"{type(error).__name__}") from error
        finally:
            answer.cancel()


@serve.ingress()
class IngressDeployment:
    """The ingress deployment."""

    def __init__(self, engines: Any, max_body: int) -> None:
        self._engines, self._max_body = engines, max_body

    def __serve_build_asgi_app__(self) -> Any:
        replicas: Replicas = RayReplicas(self._engines)
        return Ingress(replicas, self._max_body)


def application(
    engine: EngineConfig,
    server: ServerConfig,
    fleet: FleetConfig,
    one_process: bool = False,
    log_level: str = "info",
) -> serve.Application:
    """What ``serve.run`` takes. A request that names no deadline has one: a replica that is to go waits longer."""
    server = server if server.deadline is not None else replace(server, deadline=LONGEST)
    assert server.deadline is not None
    if 0 < fleet.gpus < 1 and engine.kv_memory in (None, PROFILE):
        raise SaccadeError("replicas that share a GPU need kv_memory: each would take most of it; give --kv-memory")
    ranks = engine.tensor_parallel_size
    if ranks > 1 and fleet.gpus not in (0, ranks):
        raise SaccadeError(
            f"tensor_parallel_size={ranks} takes {ranks} GPUs a replica, or none; got --replica-gpus {fleet.gpus:g}"
        )
    # A replica goes on with what another one has stored. What "auto" found here says nothing about the machines that
    # replicas run on.
    shared = engine.session_dir is not None or engine.kv_disk is not None
    engine = replace(engine, device="cuda" if fleet.gpus else "cpu", session_shared=shared)
    router = RequestRouterConfig(
        request_router_class=ROUTER, request_router_kwargs={"num_virtual_nodes": 100, "num_fallback_replicas": 2}
    )
    most = engine.max_requests + server.max_queue
    engines = serve.deployment(EngineReplica).options(
        name=deployment_name(router),
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        max_ongoing_requests=most,
        graceful_shutdown_wait_loop_s=1.0,
        graceful_shutdown_timeout_s=server.deadline + MARGIN,
        logging_config=QUIET,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        request_router_config=router,
        **_size(fleet),
    )
    front = serve.deployment(IngressDeployment).options(
        name="ingress",
        num_replicas=fleet.ingresses,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": PATIENCE}},
        logging_config=QUIET,
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=server.deadline + MARGIN,
    )
    return front.bind(engines.bind(engine, server, one_process, log_level), server.max_body)


def deployment_name(router: RequestRouterConfig) -> str:
    """A name that says how requests are routed. Under a name that runs already Ray Serve takes a new router without a
    word, and routes as before."""
    said = json.dumps([router.request_router_class, router.request_router_kwargs], sort_keys=True, default=str)
    return f"engine-{hashlib.blake2b(said.encode(), digest_size=4).hexdigest()}"


def _size(fleet: FleetConfig) -> dict[str, Any]:
    most = fleet.max_replicas or fleet.replicas
    if most == fleet.replicas:
        return {"num_replicas": fleet.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=fleet.replicas,
            max_replicas=most,
            target_ongoing_requests=fleet.target_requests,
            upscale_delay_s=10.0,
            downscale_delay_s=fleet.downscale_seconds,
        )
    }


def build(args: Mapping[str, Any]) -> serve.Application:
    """For Ray's configuration files. ``args``: ``engine``, ``server`` and ``fleet``, each a mapping with the fields of
    EngineConfig, ServerConfig and FleetConfig; ``api_keys``, a file of keys; ``allow_policies``; ``one_process``."""
    given = dict(args)
    engine, server, fleet = (dict(given.pop(name, None) or {}) for name in ("engine", "server", "fleet"))
    keys, rules = given.pop("api_keys", None), given.pop("allow_policies", None)
    one_process, log_level = bool(given.pop("one_process", False)), str(given.pop("log_level", "info"))
    if given:
        raise SaccadeError(
            f"unknown argument {shown(sorted(given)[0])}; known: engine, server, fleet, api_keys, "
            "allow_policies, one_process, log_level"
        )
    for name, values, kind in (("server", server, ServerConfig), ("fleet", fleet, FleetConfig)):
        known = {one.name for one in fields(kind)}
        if wrong := sorted(set(values) - known):
            raise SaccadeError(f"{name} has no setting {shown(wrong[0])}; known: {', '.join(sorted(known))}")
    for name in ("names", "hosts", "cors"):
        if name in server:
            server[name] = tuple(server[name])
    gap = TOKEN_GAP if engine.get("tensor_parallel_size", 1) == 1 else None  # several ranks do not have it
    return application(
        EngineConfig.of(**{"enable_prefix_caching": True, "max_token_gap": gap, **engine}),
        ServerConfig(
            keys=KeyRing() if keys is None else KeyRing.load(keys),
            policies=PolicyRules(None if rules is None else tuple(rules)),
            **server,
        ),
        FleetConfig(**fleet),
        one_process,
        log_level,
    )


def run(
    engine: EngineConfig, server: ServerConfig, fleet: FleetConfig, one_process: bool = False, log_level: str = "info"
) -> None:
    """``saccade serve --ray``: start, and wait for SIGTERM or Ctrl-C. On a cluster that runs already (RAY_ADDRESS) this
    joins it, else it starts one on this machine. At the end the replicas end what they are at."""
    target = application(engine, server, fleet, one_process, log_level)
    ray.init(logging_level="warning", include_dashboard=False)
    serve.start(
        http_options=HTTPOptions(
            host=server.host,
            port=server.port,
            ssl_certfile=None if server.tls_certificate is None else str(server.tls_certificate),
            ssl_keyfile=None if server.tls_key is None else str(server.tls_key),
            ssl_ca_certs=None if server.tls_client_authorities is None else str(server.tls_client_authorities),
        )
    )
    ending = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: ending.set())
    try:
        serve.run(target, name=APPLICATION, route_prefix="/")
        scheme = "http" if server.tls_certificate is None else "https"
        said = {"message": "serving", "address": f"{scheme}://{server.host}:{server.port}", **asdict(fleet)}
        print(json.dumps(said), file=sys.stderr, flush=True)
        while not ending.wait(1.0):
            pass
    finally:
        serve.shutdown()
        ray.shutdown()
