"""What Prometheus reads. The names are vLLM's where they mean the same, under ``saccade:``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.engine.messages import RequestOutcome
from saccade.engine.watch.estimates import Mean, Share
from saccade.methods.policy import Policy
from saccade.methods.verified import Verified
from saccade.server.engine_metrics import EngineMetrics
from saccade.server.engines import EngineFace

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_TOKEN_LATENCY = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TOKENS = tuple(2**power for power in range(0, 21, 2))
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)


_AUDITED = {  # means that audits estimate
    "retained_mass": "True attention weight of the keys that were read",
    "output_error": "Error of attention's output over its norm",
    "output_error_scaled": "The same over the sum of weights times norms of values",
    "divergence": "KL divergence of the next token from dense, in nats",
}


_parsed = lru_cache(256)(Policy.parse)


class Metrics:
    """The counters of one server. Everything is written on the event loop's thread."""

    def __init__(self, engine: EngineFace, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        label = ("model_name",)

        def counter(name: str, said: str, *labels: str) -> Any:
            made = Counter(f"saccade:{name}", said, (*label, *labels), registry=self.registry)
            return made if labels else made.labels(model)

        def histogram(name: str, said: str, buckets: tuple[float, ...], *labels: str) -> Any:
            made = Histogram(f"saccade:{name}", said, (*label, *labels), buckets=buckets, registry=self.registry)
            return made if labels else made.labels(model)

        def gauge(name: str, said: str) -> Any:
            return Gauge(f"saccade:{name}", said, label, registry=self.registry).labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.cache_queries = counter("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.")
        self.cache_hits = counter("prefix_cache_hits", "Tokens of prompts that were computed already.")
        self.preemptions = counter("num_preemptions", "How often requests lost their keys and values to others.")
        self.recomputed = counter(
            "recomputed_tokens", "Tokens computed again where no state of layers that keep one was left."
        )
        self.suspensions = counter("prefill_suspensions", "How often prefills stopped for others' steps.")
        self.longest = gauge("longest_token_gap_seconds", "The longest time between two tokens of an ended sample.")
        self._longest = 0.0
        self.success = counter("request_success", "Samples that ended.", "finished_reason")
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCY)
        self.between = histogram("inter_token_latency_seconds", "Between two tokens of a sample.", _TOKEN_LATENCY)
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self.queued = histogram("request_queue_time_seconds", "From arrival to the first step.", _LATENCY)
        self.prefill = histogram("request_prefill_time_seconds", "Of computing the prompt.", _LATENCY)
        self.decode = histogram("request_decode_time_seconds", "Of the steps after it.", _LATENCY)
        self.prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answers = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        phases = ("phase", "method")
        self.density = histogram("density", "Keys read over keys that dense attention reads.", _SHARES, *phases)
        self.coverage_estimated = histogram(
            "coverage_estimated", "Attention weight that a stopping rule estimated as read.", _SHARES, *phases
        )
        self.keys_read = counter("keys_attended", "Keys read, a query head, over rows and layers.", *phases)
        self.keys_dense = counter("keys_causal", "Keys that dense attention reads, likewise.", *phases)
        self.keys_scored = counter("keys_scored", "Scores computed to choose keys, likewise.", *phases)
        drafts = ("method",)
        self.verifications = counter("spec_decode_num_drafts", "Verifications of drafted tokens.", *drafts)
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.", *drafts)
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that stayed.", *drafts)
        self.undrafted = counter("spec_decode_num_stops", "How often requests stopped drafting: no gain.", *drafts)
        audited = ("method",)
        self.audited_places = counter("audited_groups", "Groups of query heads in a step audited.", *audited)
        self.audited_steps = counter("audited_steps", "Steps replayed densely.", *audited)
        self.audited_agreed = counter("audited_steps_agreed", "Those whose likeliest token was dense's.", *audited)
        self.audit_contradictions = counter(
            "audit_contradictions", "Samples whose audit contradicts their method's estimate of coverage.", *audited
        )
        self._audits: dict[str, AuditTotals] = {}
        self.registry.register(_Audits(self._audits, model))
        self.http = counter("http_requests", "Requests over HTTP.", "route", "status")
        self.registry.register(EngineMetrics(engine, model))

    def ended(self, outcome: RequestOutcome, policy: Policy) -> None:
        """A sample has ended."""
        report, times = outcome.report, outcome.metrics
        if policy.deferred and report.get("policy"):  # counted by what it became
            policy = _parsed(report["policy"])
        reason = {"cancelled": "abort"}.get(outcome.finish_reason, outcome.finish_reason)
        self.success.labels(self._model, reason).inc()
        self.prompt_tokens.inc(report["prompt_tokens"])
        self.generation_tokens.inc(report["output_tokens"])
        self.cache_queries.inc(report["prompt_tokens"])
        self.cache_hits.inc(report["cached_tokens"])
        self.preemptions.inc(report["preemptions"])
        self.recomputed.inc(report["recomputed_tokens"])
        self.suspensions.inc(report["suspensions"])
        self._longest = max(self._longest, report["longest_gap_seconds"])
        self.longest.set(self._longest)
        self.prompts.observe(report["prompt_tokens"])
        self.answers.observe(report["output_tokens"])
        self.whole.observe(report["total_seconds"])
        self.queued.observe(report["queue_seconds"])
        if times is not None and times.first_token_latency is not None:
            self.first.observe(times.first_token_latency)
        if (drafts := report["speculation"]) is not None and isinstance(policy.decode, Verified):
            draft = policy.decode.draft.name
            self.verifications.labels(self._model, draft).inc(drafts["verifications"])
            self.drafted.labels(self._model, draft).inc(report["drafted_tokens"])
            self.accepted.labels(self._model, draft).inc(report["accepted_tokens"])
            self.undrafted.labels(self._model, draft).inc(drafts["stops"])
        if (audit := report["audit"]) is not None:
            self._audited(audit, policy.decode.name)
        for phase, seconds, method in (
            ("prefill", self.prefill, policy.prefill.name),
            ("decode", self.decode, policy.decode.name),
        ):
            stats = report[phase]
            if not stats["tokens"]:
                continue
            seconds.observe(stats["seconds"])
            labels = (self._model, phase, method)
            for name, measure in (("density", self.density), ("coverage_estimated", self.coverage_estimated)):
                if stats[name] is not None:
                    measure.labels(*labels).observe(stats[name])
            self.keys_read.labels(*labels).inc(stats["keys_attended"])
            self.keys_dense.labels(*labels).inc(stats["keys_causal"])
            self.keys_scored.labels(*labels).inc(stats["keys_scored"])

    def _audited(self, audit: dict[str, Any], method: str) -> None:
        groups, agreement = audit["output_error"], audit["agreement"]
        if groups is not None:
            self.audited_places.labels(self._model, method).inc(groups["samples"])
        if agreement is not None:
            self.audited_steps.labels(self._model, method).inc(agreement["samples"])
            agreed = round(agreement["samples"] * agreement["mean"])
            self.audited_agreed.labels(self._model, method).inc(agreed)
        self.audit_contradictions.labels(self._model, method).inc(audit["contradiction"] is not None)
        self._audits.setdefault(method, AuditTotals()).add(audit)

    def tokens(self, seconds: float, count: int) -> None:
        """``count`` tokens of a sample came ``seconds`` after those before them."""
        for _ in range(count):
            self.between.observe(seconds / count)

    def aborted(self, samples: int) -> None:
        """Samples that no client waits for any more."""
        if samples > 0:
            self.success.labels(self._model, "abort").inc(samples)

    def answered(self, route: str, status: int) -> None:
        """A request over HTTP has its answer."""
        self.http.labels(self._model, route, str(status)).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class AuditTotals:
    """What audits of one method found since the server began."""

    def __init__(self) -> None:
        self.means = {name: Mean() for name in _AUDITED}
        self.agreement = Share()
        self.place: float | None = None  # where a target's dial stood last

    def add(self, audit: dict[str, Any]) -> None:
        for name, have in self.means.items():
            have.join(audit[name])
        self.agreement.join(audit["agreement"])
        if audit["target"] is not None:
            self.place = audit["target"]["place"]


class _Audits(Collector):
    """Estimates over all audits, with their intervals."""

    def __init__(self, audits: dict[str, AuditTotals], model: str) -> None:
        self._audits, self._model = audits, model

    def collect(self) -> Iterator[Metric]:
        for name, said in (
            *_AUDITED.items(),
            ("agreement", "Share of replayed steps whose likeliest token was dense's"),
        ):
            gauge = GaugeMetricFamily(f"saccade:audit_{name}", f"{said}.", labels=["model_name", "method", "bound"])
            for method, totals in self._audits.items():
                estimate = totals.agreement if name == "agreement" else totals.means[name]
                for bound, value in (estimate.as_dict() or {}).items():
                    if bound in ("mean", "low", "high"):
                        gauge.add_metric([self._model, method, bound], value)
            yield gauge
        dial = GaugeMetricFamily(
            "saccade:audit_dial", "Where the dial of a target stood, 0 to 1.", labels=["model_name", "method"]
        )
        for method, totals in self._audits.items():
            if totals.place is not None:
                dial.add_metric([self._model, method], totals.place)
        yield dial
