"""Converts a status to Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from recinfer.inference.id_steps import COUNTS
from recinfer.serving.server.telemetry.metrics import Status

__all__ = ["prometheus_text"]


def prometheus_text(status: Status) -> bytes:
    """The metrics of ``status`` (see recinfer.serving.server.telemetry.metrics) in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(status))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """The metric families, as prometheus_client collects them."""
        status = self._status
        yield GaugeMetricFamily("recinfer_workers", "Processes that serve.", value=status["workers"])
        yield GaugeMetricFamily("recinfer_load", "Share of ten seconds' capacity that was used.", value=status["load"])
        yield from _request_metrics(status)
        yield _histograms(
            "recinfer_stage_seconds",
            "Seconds of one stage of a request, or of a merged run.",
            ["stage"],
            (([stage], state) for stage, state in status["stages"].items()),
        )
        yield _histograms("recinfer_request_samples", "Samples of a request.", [], [([], status["samples"])])
        if status["queue"] is not None:
            yield from _queue_metrics(status["queue"])
        yield from _memory_metrics(status["memory"])
        yield from _security_metrics(status["security"])
        yield from _model_metrics(status["models"])
        if status.get("shards") is not None:
            yield from _ranker_metrics(status["shards"])
        if status.get("held") is not None:
            yield from _shard_metrics(status["held"])


def _request_metrics(status: Status) -> Iterator[Metric]:
    """Requests by version; the version's labels are empty where a request names nothing served."""
    labels = ["method", "model", "version"]
    requests = CounterMetricFamily(
        "recinfer_requests", "Requests answered, by method, served version and gRPC code.", labels=[*labels, "code"]
    )
    answers = [("", "", status["unnamed"])]
    answers += [(model["name"], model["version"], model) for model in status["models"]]
    for name, version, found in answers:
        for item in found["requests"]:
            requests.add_metric([item["method"], name, version, item["code"]], item["count"])
    yield requests
    latency = ([call, name, version] for name, version, found in answers for call in found["latency"])
    states = (state for _, _, found in answers for state in found["latency"].values())
    yield _histograms(
        "recinfer_request_seconds",
        "Seconds from a request's arrival to its answer, by method and served version.",
        labels,
        zip(latency, states, strict=True),
    )


def _queue_metrics(queue: dict[str, int]) -> Iterator[Metric]:
    yield GaugeMetricFamily("recinfer_queue_requests", "Requests that wait for a run.", value=queue["waiting"])
    yield CounterMetricFamily("recinfer_runs", "Runs, each of one or more requests.", value=queue["runs"])
    yield CounterMetricFamily("recinfer_run_requests", "Requests that were run.", value=queue["requests"])
    yield CounterMetricFamily("recinfer_run_samples", "Samples that were run.", value=queue["samples"])
    yield CounterMetricFamily("recinfer_queue_refused", "Requests that a full queue refused.", value=queue["refused"])
    yield CounterMetricFamily("recinfer_queue_expired", "Requests whose deadline passed first.", value=queue["expired"])


def _memory_metrics(memory: dict[str, int]) -> Iterator[Metric]:
    budget, held = memory["budget"], memory["held"]
    yield GaugeMetricFamily("recinfer_memory_budget_bytes", "Bytes that requests and answers may hold.", value=budget)
    yield GaugeMetricFamily("recinfer_memory_held_bytes", "Bytes that requests and answers hold.", value=held)
    yield CounterMetricFamily(
        "recinfer_memory_refused", "How often bytes did not fit into the memory budget.", value=memory["refused"]
    )


def _security_metrics(security: dict[str, Any]) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "recinfer_certificate_expiry_seconds",
        "Seconds until the server's certificate expires; negative afterwards.",
        value=security["certificate_expiry"],  # None, without TLS: no sample
    )
    rereads = CounterMetricFamily(
        "recinfer_security_rereads",
        "How often changed files of certificates or tokens were read again, by outcome: with failed, the old ones stay.",
        labels=["files", "outcome"],
    )
    for kind, outcomes in security["rereads"].items():
        for outcome, count in outcomes.items():
            rereads.add_metric([kind, outcome], count)
    yield rereads


def _model_metrics(models: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["model", "version"]
    info = GaugeMetricFamily("recinfer_model_info", "1 for each model.", labels=[*labels, "precision", "plan"])
    mapped = GaugeMetricFamily("recinfer_model_mapped_bytes", "Bytes of table rows mapped.", labels=labels)
    age = GaugeMetricFamily("recinfer_model_age_seconds", "Seconds since the model was loaded.", labels=labels)
    weight = GaugeMetricFamily(
        "recinfer_model_weight", "Share of the requests that name no version, relative to the model's.", labels=labels
    )
    deltas = GaugeMetricFamily("recinfer_model_deltas", "Deltas applied to the model.", labels=labels)
    by_feature = {
        count.metric: CounterMetricFamily(
            count.metric, count.help, labels=[*labels, "feature", *(["outcome"] if count.outcome else [])]
        )
        for count in COUNTS.values()
    }
    for model in models:
        own = [model["name"], model["version"]]
        info.add_metric([*own, model["precision"], model["plan"]], 1)
        mapped.add_metric(own, model["mapped"])
        age.add_metric(own, model["age"])
        weight.add_metric(own, model["weight"])
        deltas.add_metric(own, model["deltas"])
        for key, count in COUNTS.items():
            outcome = [count.outcome] if count.outcome else []
            for feature, number in model[key].items():
                by_feature[count.metric].add_metric([*own, feature, *outcome], number)
    yield from (info, mapped, age, weight, deltas, *by_feature.values())


def _ranker_metrics(shards: dict[str, Any]) -> Iterator[Metric]:
    calls = CounterMetricFamily("recinfer_shard_calls", "Calls to shards, by what became of them.", labels=["outcome"])
    for outcome, count in shards["calls"].items():
        calls.add_metric([outcome], count)
    missing = CounterMetricFamily(
        "recinfer_default_rows", "Requests answered without a rank, its rows being default rows.", labels=["rank"]
    )
    for rank, count in shards["default_rows"].items():
        missing.add_metric([rank], count)
    labels = ["rank", "address"]
    up = GaugeMetricFamily("recinfer_shard_up", "1 where a replica takes requests.", labels=labels)
    outstanding = GaugeMetricFamily(
        "recinfer_shard_outstanding", "Calls that a replica has not answered.", labels=labels
    )
    for replica in shards["replicas"]:
        own = [str(replica["rank"]), replica["address"]]
        up.add_metric(own, int(replica["up"]))
        outstanding.add_metric(own, replica["outstanding"])
    yield from (calls, missing, up, outstanding)


def _shard_metrics(held: dict[str, Any]) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "recinfer_shard_busy", "Share of ten seconds in which its threads had something to do.", value=held["busy"]
    )
    yield GaugeMetricFamily("recinfer_shard_running", "Requests under way.", value=held["running"])
    yield CounterMetricFamily("recinfer_shard_refused", "Requests refused, too many at a time.", value=held["refused"])
    labels = ["model", "version", "key", "ranks"]
    mapped = GaugeMetricFamily("recinfer_shard_mapped_bytes", "Bytes of table rows mapped.", labels=labels)
    for version in held["versions"]:
        ranks = ",".join(map(str, held["ranks"]))
        mapped.add_metric([version["model"], version["version"], version["key"], ranks], version["mapped"])
    yield mapped


def _histograms(
    name: str, help_text: str, labels: list[str], found: Iterable[tuple[list[str], dict[str, Any]]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for values, histogram in found:
        below, buckets = 0, []
        for bound, count in zip([*map(str, histogram["bounds"]), "+Inf"], histogram["counts"]):
            below += count
            buckets.append((bound, below))
        family.add_metric(values, buckets, histogram["total"])
    return family
