"""What a server shows of itself: Prometheus metrics, and the same as JSON for the status page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from recinfer.errors import NotFoundError
from recinfer.inference.stages import HistogramState
from recinfer.serving.batcher import BatcherState
from recinfer.serving.registry import ModelRegistry, ServedModel
from recinfer.serving.stats import RequestStats

if TYPE_CHECKING:
    from recinfer.distributed.planner.plan import Plan

__all__ = ["ServerMetrics"]


class ServerMetrics:
    """Reads counts where they are kept, when somebody asks; nothing here runs on the path of a request.

    Args:
        stats: requests and their stages.
        registry: the models.
        queue: the state of the queue of requests; None: no queue.
    """

    def __init__(
        self, stats: RequestStats, registry: ModelRegistry, queue: Callable[[], BatcherState] | None = None
    ) -> None:
        self._stats, self._registry, self._queue = stats, registry, queue
        self._started = time.time()
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(self)  # type: ignore[arg-type]

    def prometheus(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._prometheus)

    def collect(self) -> Iterator[Metric]:
        """The metric families, as prometheus_client asks for them."""
        requests = CounterMetricFamily(
            "recinfer_requests", "Requests answered, by method and gRPC code.", labels=["method", "code"]
        )
        for (call, code), count in sorted(self._stats.requests().items()):
            requests.add_metric([call, code], count)
        yield requests
        yield _histograms(
            "recinfer_request_seconds",
            "Seconds from a request's arrival to its answer.",
            ["method"],
            (([call], state) for call, state in sorted(self._stats.latency().items())),
        )
        yield _histograms(
            "recinfer_stage_seconds",
            "Seconds of one stage of a request, or of a merged run.",
            ["stage"],
            (([stage], state) for stage, state in self.stages().items()),
        )
        batch = self._stats.batch.state()
        yield _histograms("recinfer_request_samples", "Samples of a request.", [], [([], batch)])
        if self._queue is not None:
            yield from _queue_metrics(self._queue())
        yield from self._model_metrics()

    def stages(self) -> dict[str, HistogramState]:
        """All stages, in the order a request goes through them; lookup and dense summed over the models."""
        own = self._stats.stages.state()
        models = [model.predictor.stages.state() for model in self._models()]
        both = {name: _sum([state[name] for state in models]) for name in ("lookup", "dense")}
        return {"decode": own["decode"], "queue": own["queue"], **both, "encode": own["encode"]}

    def _models(self) -> list[ServedModel]:
        found: list[ServedModel] = []
        for name in self._registry.names():
            with suppress(NotFoundError):  # unloaded meanwhile
                found += self._registry.versions(name).values()
        return found

    def _model_metrics(self) -> Iterator[Metric]:
        labels = ["model", "version"]
        info = GaugeMetricFamily("recinfer_model_info", "1 for each model.", labels=[*labels, "precision", "plan"])
        mapped = GaugeMetricFamily("recinfer_model_mapped_bytes", "Bytes of table rows mapped.", labels=labels)
        age = GaugeMetricFamily("recinfer_model_age_seconds", "Seconds since the model was loaded.", labels=labels)
        replaced = CounterMetricFamily(
            "recinfer_out_of_range_ids", "Ids out of range that became the default row.", labels=[*labels, "feature"]
        )
        missing = CounterMetricFamily(
            "recinfer_missing_features", "Predictions that lacked a feature.", labels=[*labels, "feature"]
        )
        now = time.time()
        for model in self._models():
            own, predictor = [model.name, model.version], model.predictor
            info.add_metric([*own, predictor.manifest.precision, predictor.manifest.plan_hash[:12]], 1)
            mapped.add_metric(own, predictor.mapped_bytes)
            age.add_metric(own, max(0.0, now - predictor.loaded_at))
            for feature in predictor.intake.names:
                replaced.add_metric([*own, feature], predictor.intake.replaced[feature])
                missing.add_metric([*own, feature], predictor.intake.missing[feature])
        yield from (info, mapped, age, replaced, missing)

    def status(self) -> dict[str, Any]:
        """What the status page shows: cumulative counts, from which the page makes rates, and the models."""
        return {
            "uptime": time.time() - self._started,
            "requests": [
                {"method": call, "code": code, "count": count}
                for (call, code), count in sorted(self._stats.requests().items())
            ],
            "latency": {call: _plain(state) for call, state in sorted(self._stats.latency().items())},
            "stages": {stage: _plain(state) for stage, state in self.stages().items()},
            "queue": None if self._queue is None else self._queue().waiting,
            "models": [_described(model) for model in self._models()],
        }


def _queue_metrics(state: BatcherState) -> Iterator[Metric]:
    yield GaugeMetricFamily("recinfer_queue_requests", "Requests that wait for a run.", value=state.waiting)
    yield CounterMetricFamily("recinfer_runs", "Runs, each of one or more requests.", value=state.runs)
    yield CounterMetricFamily("recinfer_run_requests", "Requests that were run.", value=state.requests)
    yield CounterMetricFamily("recinfer_run_samples", "Samples that were run.", value=state.samples)
    yield CounterMetricFamily("recinfer_queue_refused", "Requests that a full queue refused.", value=state.refused)
    yield CounterMetricFamily("recinfer_queue_expired", "Requests whose deadline passed first.", value=state.expired)


def _described(model: ServedModel) -> dict[str, Any]:
    predictor = model.predictor
    manifest = predictor.manifest
    return {
        "name": model.name,
        "version": model.version,
        "created": manifest.created,
        "age": max(0.0, time.time() - predictor.loaded_at),
        "precision": manifest.precision,
        "plan": manifest.plan_hash[:12],
        "engine": predictor.engine or "none",
        "mapped": predictor.mapped_bytes,
        "features": len(predictor.intake.names),
        "dense": predictor.num_dense,
        "tables": [
            {
                "name": table.table,
                "rows": table.num_embeddings,
                "dim": table.embedding_dim,
                "precision": table.precision.value.lower(),
                "sharding": table.sharding_type,
                "ranks": sorted({shard.rank for shard in table.shards}),
            }
            for table in predictor.plan.tables
        ],
        "ranks": _ranks(predictor.plan),
        "replaced": dict(predictor.intake.replaced),
        "missing": dict(predictor.intake.missing),
    }


def _ranks(plan: Plan) -> list[dict[str, Any]]:
    """Per rank: tables, cells (rows x columns) it holds, and the planner's estimate of a batch, ms or None."""
    estimates = plan.estimates.get("perf_ms_per_rank") or [None] * plan.world_size
    ranks = [{"rank": rank, "tables": 0, "cells": 0, "ms": estimates[rank]} for rank in range(plan.world_size)]
    for table in plan.tables:
        for rank in {shard.rank for shard in table.shards}:
            ranks[rank]["tables"] += 1
        for shard in table.shards:
            cells = (shard.row_stop - shard.row_start) * (shard.col_stop - shard.col_start)
            ranks[shard.rank]["cells"] += cells
    return ranks


def _plain(state: HistogramState) -> dict[str, Any]:
    return {"bounds": state.bounds, "counts": state.counts, "total": state.total}


def _sum(states: list[HistogramState]) -> HistogramState:
    counts = tuple(sum(column) for column in zip(*(state.counts for state in states), strict=True))
    return HistogramState(states[0].bounds, counts, sum(state.total for state in states))


def _histograms(
    name: str, help_text: str, labels: list[str], states: Iterable[tuple[list[str], HistogramState]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for values, state in states:
        below, buckets = 0, []
        for bound, count in zip([*map(str, state.bounds), "+Inf"], state.counts):
            below += count
            buckets.append((bound, below))
        family.add_metric(values, buckets, state.total)
    return family
