"""The admin service: serialized requests of proto/recinfer/v1/admin.proto in, the list of models out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from recinfer.archive.manifest import ENGINE_PACKAGES
from recinfer.serving.engine.change_log import log_change, log_refused
from recinfer.serving.engine.store import StoreManager
from recinfer.serving.wire import codec
from recinfer.serving.wire.admin_verbs import VERBS, Verb
from recinfer.serving.wire.proto import admin_pb2 as pb

__all__ = ["SERVICE_NAME", "SET_FAULT", "AdminService"]

SET_FAULT = "SetFault"
"""An internal call, which clients cannot send: JSON with ``model``, ``version`` and ``why``, see ModelRegistry.set_fault."""

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminService:
    """Answers the admin calls, one at a time, on its own thread.

    Args:
        shards: returns a ranker's figures of its shard servers (recinfer.serving.shards.fan_out.FanOut.status); None: no ranker.
        logs: write each change into the log; False in a worker, since its supervisor writes a change once for all workers.
    """

    def __init__(
        self, manager: StoreManager, shards: Callable[[], dict[str, Any]] | None = None, *, logs: bool = True
    ) -> None:
        self.manager = manager
        self._shards = shards
        self._logs = logs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recinfer-admin")

    def calls(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """Method name, and SET_FAULT -> serialized request to serialized answer; raises errors of ours."""
        work: dict[str, Callable[[bytes], bytes | None]] = {
            name: partial(self._apply, verb) for name, verb in VERBS.items()
        }
        work[SET_FAULT] = self._set_fault
        return {name: self._on_admin_thread(name, call) for name, call in work.items()}

    def _on_admin_thread(self, name: str, call: Callable[[bytes], bytes | None]) -> Callable[[bytes], Awaitable[bytes]]:
        def work(data: bytes) -> bytes:
            try:
                data = call(data) or data
            except Exception as error:
                if self._logs:
                    log_refused(name, data, error)
                raise
            if self._logs:
                log_change(name, data)
            return self._models().SerializeToString()

        async def answer(data: bytes) -> bytes:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, data)

        return answer

    def _apply(self, verb: Verb, data: bytes) -> bytes:
        """Returns the request as it was made: a load of the newest version names it."""
        request = codec.parse(verb.request, data)
        verb.apply(self.manager, request)
        return request.SerializeToString()

    def _set_fault(self, data: bytes) -> None:
        fault = json.loads(data)
        self.manager.registry.set_fault(fault["model"], fault["version"], fault["why"])

    def _models(self) -> pb.ModelList:
        registry = self.manager.registry
        answer = pb.ModelList()
        for name in registry.names():
            weights, labels = registry.weights(name), registry.labels(name)
            status = answer.models.add(model=name)
            for version, model in registry.versions(name).items():
                manifest = model.predictor.manifest
                status.versions.add(
                    version=version,
                    weight=weights.get(version, 0),
                    plan_hash=manifest.plan_hash,
                    bytes=manifest.bytes_total,
                    deltas=model.predictor.num_deltas,
                    labels=sorted(label for label, of in labels.items() if of == version),
                    age_seconds=time.monotonic() - model.since,
                    engine="" if model.predictor.engine is None else ENGINE_PACKAGES[model.predictor.engine],
                )
        if self._shards is not None:
            shards = self._shards()
            for replica in shards["replicas"]:
                default_rows = shards["default_rows"].get(str(replica["rank"]), 0)
                answer.shards.add(**replica, default_rows=default_rows)
        return answer
