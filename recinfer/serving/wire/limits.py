"""Limits of one request, of all requests together, and of the queue and its runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recinfer.errors import ConfigError

__all__ = ["BatchConfig", "Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds on one request, and on the memory of all; a request beyond a bound is refused before any computation.

    Attributes:
        max_message_bytes: bytes of the serialized request; gRPC itself refuses a longer one (RESOURCE_EXHAUSTED).
        max_batch: samples in a request.
        max_ids: ids in a request, over all features.
        max_keys: feature names in a request.
        max_response_bytes: bytes of embeddings an answer may hold; known before the lookup runs.
        max_concurrent: calls that one connection may have open at a time; further ones wait at the client, but gRPC
            refuses some (UNAVAILABLE) when a client comes near this limit while the server is busy. So the limit is far
            above the bound on queued requests (recinfer.serving.wire.limits.BatchConfig), which refuses with a time
            to retry.
        memory_budget_bytes: bytes that the requests and answers of a process may hold together, from the first received byte
            to the last sent one; see recinfer.serving.engine.memory_budget.
    """

    max_message_bytes: int = 64 << 20
    max_batch: int = 16_384
    max_ids: int = 4_194_304
    max_keys: int = 4_096
    max_response_bytes: int = 256 << 20
    max_concurrent: int = 4_096
    memory_budget_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        _check("limit", self)


@dataclass(frozen=True)
class BatchConfig:
    """Bounds of the queue and of merged runs.

    Attributes:
        max_batch: samples in a merged run; a single request may have more, and then runs on its own.
        max_queue: requests that may wait; a further request is refused at once.
    """

    max_batch: int = 1024
    max_queue: int = 512

    def __post_init__(self) -> None:
        _check("batching:", self)


def _check(kind: str, bounds: Limits | BatchConfig) -> None:
    for field in fields(bounds):
        value = getattr(bounds, field.name)
        # Below 2^31: the wire counts samples in int32, and gRPC's own limits are int32. The memory budget may be larger.
        bits = 63 if field.name == "memory_budget_bytes" else 31
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << bits:
            raise ConfigError(f"{kind} {field.name}: got {value!r}, expected an integer from 1 to 2^{bits} - 1")
