"""A client of the admin service: load, weigh, unload and change versions of a running ``recinfer serve --admin``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from recinfer.errors import InputError
from recinfer.serving.client.calls import channel_to, check_target, invoke
from recinfer.serving.client.credentials import ClientCredentials
from recinfer.serving.wire.admin_verbs import VERBS
from recinfer.serving.wire.arrays import parse
from recinfer.serving.wire.proto import admin_pb2 as pb

__all__ = ["AdminClient", "LoadedVersion", "ShardReplica"]

_SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name


@dataclass(frozen=True)
class LoadedVersion:
    """One version of a model that a server has loaded.

    Attributes:
        weight: its share of the requests that name no version; 0: only requests that name it.
        plan_hash: hash of the plan in its archive.
        bytes: size of its archive.
        deltas: how many deltas are applied to it.
        labels: other names of the version, which requests may give.
        age_seconds: seconds since the version was loaded.
        engine: the library that runs its dense part, ``"onnxruntime"`` or ``"torch"``; empty without a dense part.
    """

    weight: int
    plan_hash: str
    bytes: int
    deltas: int
    labels: tuple[str, ...] = ()
    age_seconds: float = 0.0
    engine: str = ""


class ShardReplica(NamedTuple):
    """A replica of a rank, as a ranker sees it.

    Attributes:
        rank, address: of the replica.
        up: whether the ranker sends it lookups of the rank.
        why: the reason why not; empty for a replica that is up.
        versions: keys of the versions that it has mapped.
        outstanding: messages under way.
        default_rows: answers of the ranker in which default rows replaced the rank's rows.
    """

    rank: int
    address: str
    up: bool
    why: str
    versions: tuple[str, ...]
    outstanding: int
    default_rows: int


Loaded = dict[str, dict[str, LoadedVersion]]


class AdminClient:
    """Changes the models that one server serves. Thread-safe; ``close`` it or use ``with``.

    Every call returns the state of all models after it, by name and version, the default model first. A call that fails
    changes nothing. The client never repeats a change, also not if its answer is lost. Each change
    takes a ``reason``, which the server writes into its log.

    Args:
        target, token, token_file, tls_ca, tls_cert, tls_key: the same as in InferenceClient.
        tls_name: name in the server's certificate; empty: the target's host.
        timeout: seconds until a call fails with DeadlineError; loading reads and checks a whole archive.

    Attributes:
        channel: the channel to the server, for its other services.

    Errors are those of InferenceClient.

    >>> with AdminClient("127.0.0.1:8500") as admin:                        # doctest: +SKIP
    ...     admin.load("movies", "8")
    ...     admin.set_weights("movies", {"7": 90, "8": 10})
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = 300.0,
        token: str = "",
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_name: str = "",
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        check_target(target)
        self.target = target
        self.timeout = timeout
        self._credentials = ClientCredentials(token, token_file, tls_ca, tls_cert, tls_key, tls_name)
        self.channel = channel_to(target, self._credentials.channel, self._credentials.options)
        self._retired: list[grpc.Channel] = []

    def list_models(self) -> Loaded:
        """All loaded versions."""
        return self._call("ListModels")

    def list_shards(self) -> tuple[ShardReplica, ...]:
        """The replicas of a ranker's shard servers, rank by rank; empty for a server with its own tables."""
        return tuple(
            ShardReplica(r.rank, r.address, r.up, r.why, tuple(r.versions), r.outstanding, r.default_rows)
            for r in self._answer("ListModels").shards
        )

    def load(self, model: str, version: str = "", *, activate: bool = False, reason: str = "") -> Loaded:
        """Load a version of the model store (empty: the newest); ``activate``: requests go to it from then on."""
        return self._call("Load", reason, model=model, version=version, activate=activate)

    def unload(self, model: str, version: str, *, reason: str = "") -> Loaded:
        """Unload a version; its running requests finish first."""
        return self._call("Unload", reason, model=model, version=version)

    def set_default(self, model: str, version: str, *, reason: str = "") -> Loaded:
        """Send all requests that name no version to this one."""
        return self._call("SetDefault", reason, model=model, version=version)

    def set_weights(self, model: str, weights: Mapping[str, int], *, reason: str = "") -> Loaded:
        """Spread requests that name no version: ``{"7": 90, "8": 10}``."""
        try:
            items = [pb.VersionWeight(version=version, weight=weight) for version, weight in weights.items()]
        except (TypeError, ValueError):
            raise InputError(f"weights: got {dict(weights)}, expected whole numbers from 0 to 2^32 - 1") from None
        return self._call("SetWeights", reason, model=model, weights=items)

    def set_labels(self, model: str, labels: Mapping[str, str], *, reason: str = "") -> Loaded:
        """Give a model these labels and no others, each the name of a version: ``{"stable": "7", "canary": "8"}``."""
        items = [pb.VersionLabel(label=label, version=version) for label, version in labels.items()]
        return self._call("SetLabels", reason, model=model, labels=items)

    def rollback(self, model: str, *, reason: str = "") -> Loaded:
        """Go back to the weights before the last change of them."""
        return self._call("Rollback", reason, model=model)

    def apply_delta(self, model: str, delta: str, version: str = "", *, reason: str = "") -> Loaded:
        """Apply ``delta``, a file in the model's folder of the store, to a loaded version (empty: the default one)."""
        return self._call("ApplyDelta", reason, model=model, version=version, delta=delta)

    def undo_delta(self, model: str, version: str = "", *, reason: str = "") -> Loaded:
        """Undo a version's last delta."""
        return self._call("UndoDelta", reason, model=model, version=version)

    def close(self) -> None:
        """Close the channel; calls after it fail."""
        for channel in (*self._retired, self.channel):
            channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, reason: str = "", **fields: Any) -> Loaded:
        answer = self._answer(name, reason, **fields)
        return {model.model: {v.version: _loaded(v) for v in model.versions} for model in answer.models}

    def _answer(self, name: str, reason: str = "", **fields: Any) -> pb.ModelList:
        verb = VERBS[name]
        if self._credentials.changed():
            self._retired.append(self.channel)  # a call of another thread may still run on it
            self.channel = channel_to(self.target, self._credentials.channel, self._credentials.options)
        request = verb.request(**fields, **({"change": pb.Change(reason=reason)} if verb.changes else {}))
        answer = invoke(
            self.channel.unary_unary(f"/{_SERVICE}/{name}"),
            request.SerializeToString(),
            self.target,
            self.timeout,
            start_with="recinfer serve --model-store DIR --admin --port N",
            metadata=self._credentials.metadata,
        )
        return parse(pb.ModelList, answer)


def _loaded(version: pb.VersionStatus) -> LoadedVersion:
    return LoadedVersion(
        version.weight,
        version.plan_hash,
        version.bytes,
        version.deltas,
        tuple(version.labels),
        version.age_seconds,
        version.engine,
    )
