"""``saccade serve``: a model behind OpenAI's API."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.options import POLICY, load_model, takes_engine
from saccade.errors import EngineLost, SaccadeError, shown
from saccade.server import TOKEN_GAP

if TYPE_CHECKING:
    from saccade.engine.settings.config import EngineConfig

KEY_VARIABLE = "SACCADE_API_KEY"


@takes_engine(max_token_gap=str(TOKEN_GAP))
def serve(
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="What --model says, as the first word.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; anything but localhost needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; several are aliases.")
    ] = None,
    policy: Annotated[str, POLICY] = "auto",
    allow_policy: Annotated[
        list[str] | None,
        typer.Option(help="What requests may choose: a policy, or psa(*) for any options. Several; all by default."),
    ] = None,
    api_keys: Annotated[Path | None, typer.Option(help=f"TOML file of keys. {KEY_VARIABLE} adds one.")] = None,
    new_key: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Make a key: its table for --api-keys on stdout, itself on stderr."),
    ] = None,
    max_requests: Annotated[int, typer.Option(help="Most samples that run at once.")] = 64,
    max_queue: Annotated[int, typer.Option(help="Most samples that wait behind them; more are answered 429.")] = 256,
    prefix_caching: Annotated[
        bool, typer.Option(help="Share what requests of one key begin with; what ended ones leave is kept for others.")
    ] = True,
    grammar_seconds: Annotated[float, typer.Option(help="Most seconds to follow one answer's grammar.")] = 30.0,
    deadline: Annotated[float | None, typer.Option(help="Most seconds of a request.")] = None,
    drain: Annotated[float, typer.Option(help="Most seconds that running requests have after SIGTERM.")] = 120.0,
    step_limit: Annotated[
        float, typer.Option(help="Seconds without progress after which the engine hangs, and /health says so.")
    ] = 10.0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start an engine that ended or hangs anew, up to 5 times in 10 minutes.")
    ] = False,
    max_body: Annotated[str, typer.Option(help="Most bytes of a request.")] = "32MiB",
    max_sessions: Annotated[int, typer.Option(help="Most sessions that are kept.")] = 256,
    session_dir: Annotated[
        str | None,
        typer.Option(metavar="FOLDER[:SIZE]", help="Where sessions survive the server, and the most bytes (16GiB)."),
    ] = None,
    session_shared: Annotated[
        bool, typer.Option("--session-shared", help="Other servers have that folder, too. Replicas of --ray always.")
    ] = False,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: hermes, mistral, another format (docs/server.md), none, or as "
            "its template does."
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="How the model marks its thoughts: qwen3, deepseek_r1, granite, mistral, seed_oss, harmony, none, or "
            "as its template does."
        ),
    ] = "auto",
    allow_control_tokens: Annotated[
        bool,
        typer.Option(
            "--allow-control-tokens", help="Let messages hold control tokens, <|im_end|> say; text by default."
        ),
    ] = False,
    selection_maps: Annotated[
        int, typer.Option(metavar="TOKENS", help="Longest prompt whose selection map clients may ask for; 0 for none.")
    ] = 0,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send OpenTelemetry spans there: http://host:4317. Extra: otel.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file; the server then speaks HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    tls_client_authorities: Annotated[
        Path | None, typer.Option(help="PEM file; clients must then show a certificate that one of these signed.")
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Origin whose pages may ask; none by default.")] = None,
    host_name: Annotated[
        list[str] | None, typer.Option(help="Name that a server without keys answers to, beside localhost.")
    ] = None,
    warm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="On a GPU, what is compiled and recorded for before requests are taken: a policy, several of them; "
            "auto, the default: the server's own and those that --allow-policy names; none.",
        ),
    ] = None,
    engine_process: Annotated[
        bool,
        typer.Option("--engine-process/--one-process", help="Whether the engine runs in a process of its own."),
    ] = True,
    kv_events: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Publish what is kept, in vLLM's form: tcp://127.0.0.1:5557.")
    ] = None,
    kv_events_replay: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where those ask again who missed some of it.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Replicas on Ray Serve behind one address; needs saccade-llm[ray].")
    ] = False,
    replicas: Annotated[int, typer.Option(help="With --ray: how many always run.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="With --ray: most of them, as the queue grows; as many as --replicas by default.")
    ] = None,
    replica_gpus: Annotated[float, typer.Option(help="With --ray: GPUs of each; 0.5 lets two share one.")] = 0.0,
    replica_cpus: Annotated[float, typer.Option(help="With --ray: CPUs of each.")] = 1.0,
    ingresses: Annotated[int, typer.Option(help="With --ray: processes that hand requests to replicas.")] = 1,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write requests to the log whole.")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Answer OpenAI's API over HTTP, and Anthropic's: /v1/chat/completions, /v1/messages and more (docs/server.md).

    saccade serve
    curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "...", "policy": "psa"}'
    """
    from saccade.machine import parse_bytes
    from saccade.methods.policy import Policy
    from saccade.server import reasoning, tool_formats
    from saccade.server.engine_client import EngineProcess
    from saccade.server.engines import EngineFace, LocalEngine
    from saccade.server.keys import KeyRing
    from saccade.server.keys import new_key as make_key
    from saccade.server.logs import log_to_stderr
    from saccade.server.policies import PolicyRules, to_warm
    from saccade.server.run import serve as run
    from saccade.server.settings import AUTO, NONE, ServerConfig

    if new_key is not None:
        secret, table = make_key(new_key)
        print(table, end="", flush=True)
        print(f"the key, shown this once: {secret}", file=sys.stderr)
        return
    if log_level not in ("debug", "info", "warning", "error"):
        raise SaccadeError(f"log_level={shown(log_level)} must be debug, info, warning or error")
    for name, value, known in (
        ("tool_parser", tool_parser, tool_formats.FORMATS),
        ("reasoning_parser", reasoning_parser, reasoning.FORMATS),
    ):
        if value not in (AUTO, NONE, *known):
            raise SaccadeError(f"{name}={shown(value)} is unknown; known: {', '.join((AUTO, NONE, *known))}")
    keys = KeyRing() if api_keys is None else KeyRing.load(api_keys)
    if secret := os.environ.get(KEY_VARIABLE, ""):
        keys = keys.with_secret(secret)
    settings = ServerConfig(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        keys=keys,
        policies=PolicyRules(None if allow_policy is None else tuple(allow_policy)),
        max_queue=max_queue,
        deadline=deadline,
        drain_seconds=drain,
        step_limit=step_limit,
        max_body=parse_bytes(max_body),
        max_sessions=max_sessions,
        hosts=tuple(host_name or ()),
        cors=tuple(cors_origin or ()),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        allow_control_tokens=allow_control_tokens,
        log_prompts=log_prompts,
        selection_maps=selection_maps,
        otlp_traces_endpoint=otlp_traces_endpoint,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_client_authorities=tls_client_authorities,
    )
    config = replace(
        config,
        model=model_name or config.model,
        policy=policy,
        max_requests=max_requests,
        max_waiting=max_requests + max_queue,  # the server turns away what the engine would have to wait for
        enable_prefix_caching=prefix_caching,
        grammar_seconds=grammar_seconds,
        session_dir=session_dir,
        session_shared=session_shared,
    )
    if restart and (ray or not engine_process):
        raise SaccadeError(
            "--restart starts the engine's own process anew: leave out --one-process, and --ray, which does so itself"
        )
    warmed = to_warm(warm or ["auto"], Policy.parse(policy), allow_policy or [])
    if ray:
        if warm is not None:
            raise SaccadeError("replicas of --ray make themselves ready for the server's own policy; leave --warm out")
        if kv_events is not None:
            raise SaccadeError("replicas of --ray publish no KV events; Ray routes them. Leave --kv-events out")
        try:
            from saccade.server import ray_app
        except ImportError as error:
            raise SaccadeError(f"--ray needs Ray Serve ({error}): pip install 'saccade-llm[ray]'") from None
        fleet = ray_app.FleetConfig(replicas, max_replicas, replica_gpus, replica_cpus, ingresses)
        ray_app.run(config, settings, fleet, not engine_process, log_level)
        return
    events = None if kv_events is None else {"endpoint": kv_events, "replay": kv_events_replay}
    if engine_process:
        engine: EngineFace = EngineProcess(config, log_level, events, step_limit, restart, warmed)
    else:
        engine = LocalEngine(load_model(config, quiet=True), events, step_limit, warmed)
    if engine.note:
        print(f"saccade: note: {engine.note}", file=sys.stderr)
    log_to_stderr(log_level)
    try:
        run(engine, settings)
    except EngineLost as error:  # not bad input
        print(f"saccade: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
