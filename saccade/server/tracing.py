"""OpenTelemetry spans, where a server is told to send them (``--otlp-traces-endpoint``, extra ``otel``).

A request over HTTP is a server span, in the trace that its ``traceparent`` names. Each sample is a span ``llm_request``
within it, and its wait, its prefill and its decode steps are spans within that. Names of attributes are those of
OpenTelemetry's conventions for generative AI, and vLLM's for latencies. Prompts and answers are in none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.engine.messages import RequestOutcome
from saccade.errors import SaccadeError, shown

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_QUIET = ("/health", "/ready", "/metrics", "/")  # probes, and what the page asks for all the time
LONGEST_STATE = 2048  # characters of such a header
_NS = 10**9


class Tracing:
    """Makes spans with a provider, which the owner of a server closes."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("saccade.server")
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def to(endpoint: str, model: str) -> Tracing:
        """Spans that are sent to an OTLP collector: ``http://host:4317`` over gRPC, and over HTTP where the address has
        a path, ``http://host:4318/v1/traces``. SaccadeError where OpenTelemetry is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise SaccadeError(
                "tracing needs OpenTelemetry, which is not installed: pip install 'saccade-llm[otel]', or leave out "
                "--otlp-traces-endpoint"
            ) from None
        provider = TracerProvider(resource=Resource.create({"service.name": "saccade", "saccade.model": model}))
        provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        return Tracing(provider, model)

    def request(self, method: str, path: str, request_id: str, headers: dict[bytes, bytes]) -> Any:
        """The span of a request over HTTP, which :meth:`answered` ends; None for what is not to be traced."""
        from opentelemetry.trace import SpanKind

        if path in _QUIET:
            return None
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            # Longer ones are none: W3C asks for 512 characters, and OpenTelemetry's pattern is quadratic in spaces.
            if len(headers.get(name.encode(), b"")) in range(1, LONGEST_STATE)
        }
        return self._tracer.start_span(
            method,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "saccade.request_id": request_id},
        )

    def answered(self, span: Any, method: str, route: str, status: int) -> None:
        """The request has its answer."""
        from opentelemetry.trace import StatusCode

        if route != "none":
            span.update_name(f"{method} {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def sample(self, span: Any, outcome: RequestOutcome) -> None:
        """A sample has ended: its spans, at the times that the engine wrote down."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        report, times = outcome.report, outcome.metrics
        if span is None or times is None or times.finished_time is None:
            return
        said: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": report["prompt_tokens"],
            "gen_ai.usage.output_tokens": report["output_tokens"],
            "gen_ai.response.finish_reasons": [outcome.finish_reason],
            "gen_ai.latency.time_in_queue": report["queue_seconds"],
            "gen_ai.latency.time_to_first_token": report["first_token_seconds"],
            "gen_ai.latency.e2e": report["total_seconds"],
            "saccade.policy": report["policy"],
            "saccade.cached_tokens": report["cached_tokens"],
            "saccade.preemptions": report["preemptions"],
        }
        parent = set_span_in_context(span)
        whole = self._tracer.start_span(
            "llm_request", parent, attributes=_known(said), start_time=_ns(times.arrival_time)
        )
        began, first = times.first_scheduled_time, times.first_token_time
        stretches = (
            ("queue", times.arrival_time, began or times.finished_time),
            ("prefill", began, first or times.finished_time),
            ("decode", first, times.last_token_time),
        )
        inside = set_span_in_context(whole)
        for name, start, end in stretches:
            if start is None or end is None or (name == "decode" and not report["decode"]["tokens"]):
                continue
            costs = report.get(name, {})
            keys = ("policy", "tokens", "density", "coverage_estimated", "keys_attended", "keys_scored")
            attributes = _known({f"saccade.{key}": costs.get(key) for key in keys})
            self._tracer.start_span(name, inside, attributes=attributes, start_time=_ns(start)).end(_ns(end))
        if outcome.error is not None:
            whole.set_status(StatusCode.ERROR)
        whole.end(_ns(times.finished_time))

    def close(self) -> None:
        """Send what has not been sent, for some seconds at most."""
        self._provider.force_flush(5000)
        self._provider.shutdown()


def _exporter(endpoint: str) -> Any:
    from urllib.parse import urlsplit

    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SaccadeError(
            f"otlp_traces_endpoint={shown(endpoint)} is no address of a collector; give http://host:4317, or "
            "http://host:4318/v1/traces"
        )
    if parts.path.strip("/"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHTTP

        return OverHTTP(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGRPC

    return OverGRPC(endpoint=endpoint, insecure=parts.scheme == "http")


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
