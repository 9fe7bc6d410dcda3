"""A ranker's view of one shard server: connections to it, its readiness, its versions, and its latency.

The server's health service says over gRPC whether the server accepts requests, and its State names the port of the framed
transport.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from recinfer.errors import UnavailableError
from recinfer.serving.shards.config import ShardCredentials
from recinfer.serving.shards.messages import SERVICE_NAME
from recinfer.serving.shards.transport import ResponseCallback, ShardAddress, ShardConnection, rankers_thread
from recinfer.serving.shards.versions import VersionSpec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import shards_pb2 as pb

__all__ = ["Replica"]

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_STATE_S = 5.0  # for an answer of State
_AGAIN_S, _MISSING_S = 0.2, 2.0  # until the next look at the server: at first, and while it lacks a version
_STALE_S = 2.0  # after which a latency counts as unknown
_RETIRED_S = 0.1  # between two checks for outstanding requests
_HEADS_BYTES = 1 << 20  # more than a response has in addition to its rows
_SMOOTHING = 0.2  # weight of an answer's time in the latency
_STRIKES = 3  # slow answers in a row, after which the replica is suspended
_OUT_S, _MAX_OUT_S = 1.0, 8.0  # length of a suspension: the first time, and at most
_log = logging.getLogger(__name__)

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A ping detects a host that fails silently in three seconds; a reconnect finds a restarted server in one.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Without this, a ping that measures bandwidth holds keepalive's ping back for a minute on a dead connection.
    ("grpc.http2.ping_timeout_ms", 2_000),
    # The proxy of the environment is meant for the internet.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each replica has a connection of its own, also where two names lead to one address.
    ("grpc.use_local_subchannel_pool", 1),
)


class Replica:
    """A shard server to which requests are sent. Call it on the serving loop, apart from the methods for the transport's
    thread.

    Args:
        target: ``host:port``.
        credentials: credentials of the server.
        name: name for TLS to check if the credentials have none; None: the target's host.
        wanted: returns the versions that the server should have.
        max_response_bytes: most bytes of a rank's rows for one request.
        changed: called when the replica becomes usable or unusable, and before that when the server has reported its ranks.

    Attributes:
        up: whether the server answers, and accepts requests.
        versions: the server's versions; ``ranks``: the server's ranks, empty until it has reported them.
        outstanding: number of unanswered requests; ``answers``: number of answered requests. Changed on the transport's thread.
        why: the last failure, for messages.
    """

    def __init__(
        self,
        target: str,
        credentials: ShardCredentials,
        *,
        name: str | None = None,
        wanted: Callable[[], Iterable[VersionSpec]] = tuple,
        max_response_bytes: int = Limits.max_response_bytes,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = target
        self._credentials = credentials
        self._max_response_bytes = max_response_bytes
        host, _, _ = target.rpartition(":")
        self._host = host.strip("[]")
        named = credentials.name or (name if credentials.tls is not None else None)
        self._tls_name = named or self._host
        options: list[tuple[str, int | str]] = list(OPTIONS)
        if named is not None:
            options.append(("grpc.ssl_target_name_override", named))
        if credentials.channel is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials.channel, options=options)
        self._metadata = (("authorization", f"Bearer {credentials.token}"),) if credentials.token else ()
        self._wanted = wanted
        self._changed = changed
        self._prepare = self._channel.unary_unary(f"/{SERVICE_NAME}/Prepare")
        self._state = self._channel.unary_unary(f"/{SERVICE_NAME}/State")
        self._health = self._channel.unary_stream(f"/{_HEALTH}/Watch")
        self._address: ShardAddress | None = None
        self._connection: ShardConnection | None = None
        self._connecting = asyncio.Lock()
        self.up = False
        self.versions: set[str] = set()
        self.ranks: tuple[int, ...] = ()
        self.outstanding = self.answers = 0
        self.why = "not connected yet"
        self._seconds = 0.0  # smoothed latency
        self._timed = 0.0  # time of the last update of the latency
        self._strikes = 0
        self._out_until = 0.0
        self._out_seconds = _OUT_S
        self._task: asyncio.Task[None] | None = None
        self._reasons: dict[str, str] = {}
        self._again_seconds = _AGAIN_S
        self._checking = False
        self._check: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._syncing = 0
        self._closes = False

    def start(self) -> None:
        """Connect, and stay connected."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._watch())

    async def retire(self, seconds: float) -> None:
        """Take no new requests, and close when the outstanding requests are answered, or after ``seconds``."""
        self._stop_watching()
        end = time.monotonic() + seconds
        while self.outstanding and time.monotonic() < end:
            await asyncio.sleep(_RETIRED_S)
        await self.close()

    async def close(self) -> None:
        """Close at once; running requests are lost."""
        self._stop_watching()
        self.up = False
        self._disconnect()
        await self._channel.close()

    def _stop_watching(self) -> None:
        self._closes = True
        for task in (self._task, self._check, self._renewal):
            if task is not None:
                task.cancel()

    # -- which replica to call ---------------------------------------------------------------------------------------

    def usable(self, version: str) -> bool:
        """Whether the server can look up in ``version``."""
        return self.up and version in self.versions

    def lack_of(self, rank: int) -> str:
        """The reason why the server, which shards.json lists for ``rank``, cannot look up in it; empty if it has the rank."""
        if not self.ranks or rank in self.ranks:
            return ""
        return f"its server has ranks {', '.join(map(str, self.ranks))}, not {rank}"

    def reason_unusable(self, version: str) -> str:
        """The reason why the server cannot look up in ``version``."""
        if not self.up:
            return self.why
        named = next((str(spec) for spec in self._wanted() if spec.key == version), version)
        return self._reasons.get(version) or f"it has not prepared version {named}"

    def load(self, now: float) -> tuple[bool, int, int]:
        """Sort key of the replica to call: not suspended, fewest outstanding requests, then the faster by factors of two."""
        suspended = now < self._out_until or (self._strikes >= _STRIKES and self.outstanding > 0)
        known = self._seconds and now - self._timed < _STALE_S  # an old latency would keep a replica idle permanently
        return suspended, self.outstanding, math.frexp(self._seconds)[1] if known else -64

    # -- on the transport's thread -----------------------------------------------------------------------------------

    def call(self, request: bytes, deadline: float, done: ResponseCallback) -> Callable[[], object]:
        """See :meth:`recinfer.serving.shards.transport.ShardConnection.call`."""
        if self._connection is None:
            return rankers_thread().loop.call_soon(done, None, "UNAVAILABLE", self.why).cancel
        return self._connection.call(request, deadline, done)

    def answered(self, seconds: float) -> None:
        """Record an answer in time, after ``seconds``."""
        self.answers += 1
        self._timed = time.monotonic()
        self._seconds += _SMOOTHING * (seconds - self._seconds) if self._seconds else seconds
        self._strikes, self._out_seconds = 0, _OUT_S

    def was_slow(self, seconds: float) -> None:
        """Record a late request; three in a row suspend the replica."""
        self._seconds = max(self._seconds, seconds)
        self._timed = time.monotonic()
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._out_until = time.monotonic() + self._out_seconds
            self._out_seconds = min(_MAX_OUT_S, 2 * self._out_seconds)

    def failed(self, why: str) -> None:
        """Record a lost request; the replica gets no other before its server's State is read again."""
        self.why, self.up = why, False
        self._loop.call_soon_threadsafe(self._look_again, _AGAIN_S)

    def lacks(self, version: str) -> None:
        """Record that the server lacks ``version``, and look at the server again. The serving loop may call this too."""
        self.versions.discard(version)
        self._loop.call_soon_threadsafe(self._look_again, 0.0)

    def _lost(self, connection: ShardConnection) -> None:
        if connection is self._connection:
            _log.warning("shard %s: its connection for lookups has ended: %s", self.target, connection.why)
            self.failed(f"its connection for lookups has ended: {connection.why}")

    # -- versions ----------------------------------------------------------------------------------------------------

    async def prepare(self, spec: VersionSpec) -> None:
        """Have the server map and check a version; raises grpc.aio.AioRpcError."""
        request = pb.PrepareRequest(
            version=spec.key, folder=spec.folder, deltas=spec.deltas, wanted=[spec.key, *self._keys()]
        ).SerializeToString()
        answer = await self._prepare(request, timeout=self._credentials.prepare_seconds, metadata=self._metadata)
        self.versions = set(pb.ShardState.FromString(answer).versions)

    def _keys(self) -> list[str]:
        return [spec.key for spec in self._wanted()]

    def renew(self) -> None:
        """Send the wanted versions again, so that the server keeps them, and have it prepare missing versions."""
        if (self.up or self._syncing) and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """Renew once; also while versions are being prepared, which may take longer than the server keeps them."""
        try:
            await self._learn()
        except grpc.aio.AioRpcError:
            return  # the server's health, or the next call, reports the error
        if not self._syncing and not self.versions.issuperset(self._keys()):
            self._look_again(0.0)

    async def _learn(self) -> None:
        """Send the wanted versions, and read the server's ranks, versions and port for lookups."""
        request = pb.StateRequest(wanted=self._keys()).SerializeToString()
        answer = await self._state(request, timeout=_STATE_S, metadata=self._metadata)
        state = pb.ShardState.FromString(answer)
        self.versions = set(state.versions)
        self._address = ShardAddress(self._host, state.socket_port, state.socket_server, state.socket_bytes)
        if self.ranks != tuple(state.ranks):
            self.ranks = tuple(state.ranks)
            self._changed()

    async def _connect(self) -> None:
        """Connect to the server's port for lookups; raises UnavailableError."""
        async with self._connecting:
            address, connection = self._address, self._connection
            assert address is not None
            if connection is not None and connection.is_open and connection.address == address:
                return
            self._disconnect()
            if not address.port:
                raise UnavailableError(
                    "its server names no port for lookups; it is of another release than this ranker"
                )
            # A response holds the rows of all the server's ranks, and the message's other fields.
            most = self._max_response_bytes * max(1, len(self.ranks)) + _HEADS_BYTES
            self._connection = ShardConnection(address, self._credentials.token, most, self._lost)
            await self._connection.connect(self._credentials.tls, self._tls_name)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.thread.call(connection.end, "this ranker has closed it")

    async def _sync(self) -> bool:
        """Connect, and have the server prepare missing versions; returns whether none is missing."""
        self._syncing += 1
        try:
            await self._learn()
            await self._connect()
            whole = True
            tried: set[str] = set()
            # The wanted versions may grow while one is prepared; nothing is awaited between the last check and "up".
            while lacking := [spec for spec in self._wanted() if spec.key not in self.versions | tried]:
                for spec in lacking:
                    tried.add(spec.key)
                    whole &= await self._prepare_one(spec)
            return whole
        finally:
            self._syncing -= 1

    async def _prepare_one(self, spec: VersionSpec) -> bool:
        try:
            await self.prepare(spec)
        except grpc.aio.AioRpcError as error:
            self.why = f"lacks version {spec}: {error.details()}"
            if self._reasons.get(spec.key) != self.why:
                self._reasons[spec.key] = self.why
                _log.warning("shard %s %s", self.target, self.why)
            return False
        _log.info("shard %s has prepared version %s", self.target, spec)
        return True

    def _set_up(self, up: bool) -> None:
        if up != self.up:
            self.up = up
            self._changed()

    async def _watch(self) -> None:
        """Follow the server's health for as long as the replica is listed."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME).SerializeToString()
        while True:
            try:
                # Without wait_for_ready, which would hide the reason of a missing connection.
                call = self._health(request)
                async for answer in call:
                    status = health_pb2.HealthCheckResponse.FromString(answer).status
                    if status == health_pb2.HealthCheckResponse.SERVING:
                        await self._try_to_follow()
                    else:
                        self.why = "it takes no requests: it starts or stops"
                        self._set_up(False)
            except grpc.aio.AioRpcError as error:
                self.why = _reason(error)
            except asyncio.CancelledError:
                raise
            except Exception:
                _log.exception("shard %s: watching it failed", self.target)
            self._set_up(False)
            await asyncio.sleep(_AGAIN_S)

    async def _try_to_follow(self) -> None:
        """Make the replica usable, or try again later, each time after a longer pause; raises grpc.aio.AioRpcError."""
        try:
            whole = await self._sync()
            if self._connection is None or not self._connection.is_open:
                raise UnavailableError("its connection for lookups has ended")
        except UnavailableError as error:
            self.why = str(error)
            self._set_up(False)
            self._look_again(self._again_seconds)
            self._again_seconds = min(_MISSING_S, 2 * self._again_seconds)
            return
        self._again_seconds = _AGAIN_S
        self._strikes, self._out_until, self._out_seconds = 0, 0.0, _OUT_S
        self.up = True
        self._changed()
        if not whole:
            self._look_again(_MISSING_S)

    def _look_again(self, seconds: float) -> None:
        """Look at the server again after ``seconds``: a missing version, or a lost request, may not change its health."""
        self._changed()
        if self._closes or self._checking:
            return
        self._checking = True

        async def check() -> None:
            await asyncio.sleep(seconds)
            self._checking = False
            try:
                await self._try_to_follow()
            except grpc.aio.AioRpcError as error:
                self.why = _reason(error)
                self._look_again(_MISSING_S)  # a change of its health may come before

        self._check = self._loop.create_task(check())


def _reason(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {(error.details() or '')[:200]}"
