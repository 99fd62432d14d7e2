"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from saccade.errors import SaccadeError, finite_number, shown, whole_number
from saccade.server.engine_watch import STEP_LIMIT
from saccade.server.keys import KeyRing
from saccade.server.policies import PolicyRules

MIB = 2**20
AUTO = "auto"  # the parser that the model's chat template shows
NONE = "none"  # no parser


@dataclass(frozen=True)
class ServerConfig:
    """How a server answers.

    ``names``: what clients may call the model, the first in answers; the model's own name by default. ``keys``: who may
    ask; no key is needed where it is empty, and then only this machine may be served. ``policies``: what requests may
    choose. ``max_queue``: most samples that wait behind the engine's ``max_requests``; more are answered 429.
    ``deadline``: most seconds of a request, None for no limit; a request may ask for less. ``drain_seconds``: how long
    running requests may take to end after SIGTERM. ``step_limit``: after so many seconds without progress an engine
    hangs (EngineWatch). ``ping_seconds``: between two signs of life on a quiet stream.
    ``max_body``: most bytes of a request; ``max_bodies``: of all that are held at one time;
    ``max_nesting``: most brackets within brackets of its JSON.
    ``header_seconds``, ``body_seconds``: most seconds that a client may take to send them. ``max_sessions``: most
    sessions that are kept; ``session_seconds``: how long one is kept unused. ``max_responses``: most stored responses.
    ``hosts``: names beside the machine's own that clients may address a server without keys by. ``cors``: origins whose
    pages may ask, none by default. ``log_prompts``: write prompts and answers to the log, for debugging alone.
    ``allow_control_tokens``: what reads like a control token in messages is one, where a request does not say.
    ``selection_maps``: most tokens of a prompt whose selection map may be asked for, 0 for none.
    ``otlp_traces_endpoint``: where spans are sent to. ``tool_parser``, ``reasoning_parser``: names of formats; None, or
    ``none``, for none, and ``auto`` for those of the model's template.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    keys: KeyRing = field(default_factory=KeyRing)
    policies: PolicyRules = field(default_factory=PolicyRules)
    max_queue: int = 256
    deadline: float | None = None
    drain_seconds: float = 120.0
    step_limit: float = STEP_LIMIT
    ping_seconds: float = 15.0
    max_body: int = 32 * MIB
    max_bodies: int = 512 * MIB
    max_nesting: int = 64
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    max_sessions: int = 256
    session_seconds: float = 3600.0
    max_responses: int = 1024
    hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    allow_control_tokens: bool = False
    log_prompts: bool = False
    selection_maps: int = 0
    otlp_traces_endpoint: str | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_authorities: Path | None = None

    def __post_init__(self) -> None:
        least_of = {"port": 0, "max_queue": 0, "max_body": 1024, "max_bodies": 1024, "max_nesting": 4}
        for name, least in least_of.items():
            value, most = getattr(self, name), 65535 if name == "port" else 2**40
            if not whole_number(value, least, most):
                raise SaccadeError(f"{name}={shown(value)} must be an integer from {least} to {most}")
        for name in ("max_sessions", "max_responses", "selection_maps"):
            if not whole_number(getattr(self, name), 0):
                raise SaccadeError(f"{name}={shown(getattr(self, name))} must be an integer >= 0")
        times = ("drain_seconds", "step_limit", "ping_seconds", "header_seconds", "body_seconds", "session_seconds")
        for name in (*times, "deadline"):
            value = getattr(self, name)
            if not (name == "deadline" and value is None) and (not finite_number(value) or value <= 0):
                raise SaccadeError(f"{name}={shown(value)} must be a number of seconds above 0")
        if not self.keys and not is_local(self.host):
            raise SaccadeError(
                f"host={shown(self.host)} is reachable from other machines, which needs an API key: give --api-keys "
                "FILE (saccade serve --new-key NAME makes one) or set SACCADE_API_KEY; or keep to --host 127.0.0.1"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SaccadeError("TLS needs a certificate and a key; give --tls-certificate and --tls-key")
        if self.tls_client_authorities is not None and self.tls_certificate is None:
            raise SaccadeError("--tls-client-authorities needs --tls-certificate and --tls-key")
        for path in (self.tls_certificate, self.tls_key, self.tls_client_authorities):
            if path is not None and not path.is_file():
                raise SaccadeError(f"there is no file {shown(str(path))}; give the path of a PEM file")


def chosen(parser: str | None, of_template: str | None) -> str | None:
    """The parser that was named, or the template's where none was; None for none."""
    return of_template if parser == AUTO else None if parser == NONE else parser


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
