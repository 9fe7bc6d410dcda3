"""A server's status as plain data: counts read from their owners, and sums over the processes of one server.

A status is a JSON object. Its counts only grow, so that two statuses give a rate:

    uptime      seconds
    workers     processes behind these figures
    load        share of the capacity in use, 0 to 1: the mean of the processes (see recinfer.serving.engine.busy)
    ready       whether a request would be answered now: by every process, since all share the port
    requests    [{method, code, count}], of all versions, unloaded ones too
    latency     {method: histogram}; a histogram is {bounds, counts, total}, with one more count for values beyond the bounds
    unnamed     {requests, latency} in the same form: of the requests that name nothing served
    stages      {stage: histogram}, in the order a request goes through them
    samples     histogram of the samples of a request
    queue       {waiting, running, runs, requests, samples, expired, refused}, or None
    security    {certificate_expiry: seconds until it expires or None, rereads: {files: {outcome: count}}}
    memory      {budget, held, refused}: bytes of requests and answers, and the number of refusals
    models      [{name, version, weight, deltas, age, mapped, ..., requests, latency, and for each of COUNTS: {feature: count}}]:
                requests and latency in the form above, of the version's own requests
    shards      of a ranker: {calls: {outcome: count}, default_rows: {rank: count}, replicas: [{rank, address, up, ...}]}
    held        of a shard server alone: {ranks, busy, running, refused, versions: [{key, model, version, deltas, mapped}]}
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from recinfer.archive.manifest import ENGINE_PACKAGES
from recinfer.errors import NotFoundError
from recinfer.inference.id_steps import COUNTS
from recinfer.inference.stages import HistogramState, Stages, sum_histograms
from recinfer.serving.engine.memory_budget import MemoryBudget
from recinfer.serving.engine.registry import AnswerCounts, ModelRegistry, RequestStats, ServedModel
from recinfer.serving.engine.scheduler import SchedulerState

if TYPE_CHECKING:
    from recinfer.distributed.planner.plan import Plan

__all__ = ["ServerMetrics", "Status", "answers_of", "merge_statuses", "only_counts", "request_figures", "sum_ended"]

Status = dict[str, Any]
_NONE: dict[str, Any] = {"bounds": [], "counts": [0], "total": 0.0}
_NOW = ("waiting", "running")  # fields of the queue that are no counts since the start
_MEMORY_NOW = ("budget", "held")


class ServerMetrics:
    """Reads counts from their owners when a status is requested; no request runs through this class. Call it on the event loop
    alone.

    Args:
        stats: requests and their stages.
        registry: the models.
        queue: returns the state of the queue of requests; None before there is a queue.
        shards: returns the figures of the shard servers (see recinfer.serving.shards.fan_out); None: all tables are local.
        is_ready: whether the server can answer now.
        security: returns the figures of the certificates and tokens (see recinfer.serving.server.security).
        load: returns the share of the server's capacity in use.
        budget: the memory budget of the process's requests and answers.
    """

    def __init__(
        self,
        stats: RequestStats,
        registry: ModelRegistry,
        budget: MemoryBudget,
        queue: Callable[[], SchedulerState | None] = lambda: None,
        *,
        shards: Callable[[], dict[str, Any]] | None = None,
        is_ready: Callable[[], bool] = lambda: True,
        security: Callable[[], dict[str, Any]] = lambda: {"certificate_expiry": None, "rereads": {}},
        load: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._stats = stats
        self._registry = registry
        self._queue = queue
        self._shards = shards
        self._is_ready = is_ready
        self._security = security
        self._load = load
        self._budget = budget
        self._started = time.monotonic()
        self._stages_of: dict[int, Stages] = {}  # stages of the models at the last status
        self._past: list[dict[str, HistogramState]] = []  # sums over unloaded models: at most one entry

    def status(self) -> Status:
        """The status of this process."""
        queue = self._queue()
        return {
            "uptime": time.monotonic() - self._started,
            "workers": 1,
            "ready": self._is_ready(),
            "load": self._load(),
            **request_figures(self._stats, self._stages(), self._budget),
            "security": self._security(),
            "queue": None if queue is None else asdict(queue),
            "models": [_described(model, weight) for model, weight in self._models()],
            "shards": None if self._shards is None else self._shards(),
        }

    def _stages(self) -> dict[str, HistogramState]:
        """All stages, in the order a request goes through them; lookup and dense summed over the models."""
        own = self._stats.stages.state()
        now = {id(model.predictor.stages): model.predictor.stages for model, _ in self._models()}
        gone = [stages.state() for key, stages in self._stages_of.items() if key not in now]
        self._stages_of = now
        if gone:  # the counts of an unloaded model stay in the sums
            past = [*self._past, *gone]
            self._past = [{name: sum_histograms([state[name] for state in past]) for name in gone[0]}]
        models = [*self._past, *(stages.state() for stages in now.values())]
        both = {name: sum_histograms([state[name] for state in models]) for name in ("lookup", "dense")}
        return {"decode": own["decode"], "queue": own["queue"], **both, "encode": own["encode"]}

    def _models(self) -> list[tuple[ServedModel, int]]:
        found: list[tuple[ServedModel, int]] = []
        for name in self._registry.names():
            with suppress(NotFoundError):  # unloaded meanwhile
                weights = self._registry.weights(name)
                found += [(model, weights.get(v, 0)) for v, model in self._registry.versions(name).items()]
        return found


def request_figures(stats: RequestStats, stages: Mapping[str, HistogramState], budget: MemoryBudget) -> Status:
    """The part of a status that servers and shard servers share: their requests, and the memory that the requests hold."""
    return {
        "requests": _requests(stats.requests()),
        "latency": _latency(stats.latency()),
        "unnamed": _answers(stats.unnamed),
        "stages": {stage: _plain(state) for stage, state in stages.items()},
        "samples": _plain(stats.batch.state()),
        "memory": {"budget": budget.budget_bytes, "held": budget.held, "refused": budget.refused},
    }


def answers_of(status: Status) -> Status:
    """The part of a status that a chart of all answers needs: its uptime, and latency and counts summed over methods."""
    codes: Counter[str] = Counter()
    for item in status["requests"]:
        codes[item["code"]] += item["count"]
    latency = _merge_histograms([{"": histogram} for histogram in status["latency"].values()])
    return {
        "uptime": status["uptime"],
        "requests": _requests({("", c): n for c, n in codes.items()}),
        "latency": latency,
    }


def merge_statuses(running: Sequence[Status], ended: Iterable[Status] = ()) -> Status:
    """The merged status of several processes that serve the same models.

    Args:
        running: statuses of running processes. A mapped archive, which the processes share, is counted once.
        ended: statuses of ended processes; their counts stay in the sums, which would else decrease.
    """
    everything = [*running, *ended]
    queues = [status["queue"] for status in everything if status["queue"] is not None]
    return {
        "uptime": max((status["uptime"] for status in running), default=0.0),
        "workers": sum(status["workers"] for status in running),
        "ready": bool(running) and all(status["ready"] for status in running),  # the processes share the port
        "load": sum(status["load"] for status in running) / max(1, len(running)),
        **_merge_answers(everything),
        "unnamed": _merge_answers([status["unnamed"] for status in everything]),
        "stages": _merge_histograms([status["stages"] for status in everything]),
        "samples": _merge_histograms([{"": status["samples"]} for status in everything]).get("", _NONE),
        "security": _merge_security(running, everything),
        "queue": {name: sum(queue[name] for queue in queues) for name in queues[0]} if queues else None,
        "memory": {
            name: sum(status["memory"][name] for status in everything) for name in ("budget", "held", "refused")
        },
        "models": _merge_models(running, everything),
        "shards": _merge_shards(running, everything),
    }


def _merge_security(running: Sequence[Status], everything: Sequence[Status]) -> dict[str, Any]:
    """The earliest expiry of the running processes, and summed counts."""
    rereads: dict[str, Counter[str]] = {}
    for status in everything:
        for kind, outcomes in status["security"]["rereads"].items():
            rereads.setdefault(kind, Counter()).update(outcomes)
    left = [status["security"]["certificate_expiry"] for status in running]
    return {
        "certificate_expiry": min((seconds for seconds in left if seconds is not None), default=None),
        "rereads": {kind: dict(outcomes) for kind, outcomes in rereads.items()},
    }


def _merge_shards(running: Sequence[Status], everything: Sequence[Status]) -> dict[str, Any] | None:
    """Summed counts of all processes, and the replicas: a replica is up if every running process that lists it says so."""
    rankers = [status["shards"] for status in everything if status.get("shards") is not None]
    if not rankers:
        return None
    calls: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for shards in rankers:
        calls.update(shards["calls"])
        missing.update(shards["default_rows"])
    replicas: dict[tuple[int, str], dict[str, Any]] = {}
    for status in running:
        for replica in (status.get("shards") or {"replicas": []})["replicas"]:
            have = replicas.setdefault((replica["rank"], replica["address"]), replica | {"up": True, "outstanding": 0})
            have["up"] &= replica["up"]
            have["outstanding"] += replica["outstanding"]
    return {"calls": dict(calls), "default_rows": dict(missing), "replicas": list(replicas.values())}


def only_counts(status: Status) -> Status:
    """The part of an ended process's status that stays in the sums: its counts, not its memory."""
    queue = status["queue"]
    return status | {
        "workers": 0,
        "queue": None if queue is None else queue | dict.fromkeys(_NOW, 0),
        "memory": status["memory"] | dict.fromkeys(_MEMORY_NOW, 0),
        "models": [
            {name: model[name] for name in ("name", "version", *COUNTS, "requests", "latency")}
            for model in status["models"]
        ],
    }


def sum_ended(last: Status, before: Status | None) -> Status:
    """The counts of ended processes, which stay in the sums.

    Args:
        last: the status of the process that has ended last; only the versions that it had still count.
        before: the sum over the processes that ended before, or None.
    """
    ended = [only_counts(last), *([] if before is None else [before])]
    return merge_statuses([], ended) | {"models": _merge_models(ended[:1], ended)}


def _answers(counts: AnswerCounts) -> dict[str, Any]:
    return {"requests": _requests(counts.codes()), "latency": _latency(counts.latency())}


def _latency(found: Mapping[str, HistogramState]) -> dict[str, Any]:
    return {call: _plain(state) for call, state in sorted(found.items())}


def _merge_answers(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summed ``requests`` and ``latency`` of several processes."""
    counted: Counter[tuple[str, str]] = Counter()
    for one in found:
        counted.update({(item["method"], item["code"]): item["count"] for item in one["requests"]})
    return {"requests": _requests(counted), "latency": _merge_histograms([one["latency"] for one in found])}


def _requests(counted: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
    return [{"method": call, "code": code, "count": count} for (call, code), count in sorted(counted.items())]


def _merge_histograms(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for histograms in found:
        for name, own in histograms.items():
            have = merged.get(name)
            if have is None:
                merged[name] = own
                continue
            counts = [a + b for a, b in zip(have["counts"], own["counts"], strict=True)]
            merged[name] = {"bounds": own["bounds"], "counts": counts, "total": have["total"] + own["total"]}
    return merged


def _merge_models(running: Sequence[Status], everything: Sequence[Status]) -> list[dict[str, Any]]:
    """The versions of ``running``, each with its counts in ``everything``."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for model in (model for status in running for model in status["models"]):
        have = merged.setdefault((model["name"], model["version"]), dict(model))
        if "age" in model:
            have["age"] = max(have["age"], model["age"])
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in merged}
    for model in (model for status in everything for model in status["models"]):
        parts.get((model["name"], model["version"]), []).append(model)
    for key, model in merged.items():
        model.update(_merge_answers(parts[key]))
        for kind in COUNTS:
            model[kind] = dict(
                sum((Counter(part[kind]) for part in parts[key]), Counter(dict.fromkeys(model[kind], 0)))
            )
    return list(merged.values())


def _described(model: ServedModel, weight: int) -> dict[str, Any]:
    predictor = model.predictor
    manifest = predictor.manifest
    intake = predictor.intake
    return {
        "name": model.name,
        "version": model.version,
        "weight": weight,
        "deltas": predictor.num_deltas,
        "created": manifest.created,
        "age": max(0.0, time.monotonic() - model.since),
        "precision": manifest.precision,
        "plan": manifest.plan_hash[:12],
        "engine": "none" if predictor.engine is None else ENGINE_PACKAGES[predictor.engine],
        "engine_reason": predictor.engine_reason,
        "mapped": predictor.mapped_bytes,
        "features": len(intake.names),
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
        **intake.counts,
        **_answers(model.answers),
    }


def _ranks(plan: Plan) -> list[dict[str, Any]]:
    """Each rank's number of tables and cells (rows x columns), and the planner's ms for a batch, or None."""
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
    return {"bounds": list(state.bounds), "counts": list(state.counts), "total": state.total}
