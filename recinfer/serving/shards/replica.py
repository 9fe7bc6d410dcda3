"""One shard server as a ranker sees it: its channel, whether it is up, which versions it has, how fast it answers.

gRPC resolves, connects, reconnects and keeps connections alive; its health service says whether a server wants requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from recinfer.serving.server.grpc_channel import CoreChannel
from recinfer.serving.shards.connections import SERVICE_NAME, SMALL_BYTES, Asks
from recinfer.serving.shards.transport import AskSocket
from recinfer.serving.shards.versions import VersionSpec
from recinfer.serving.wire.proto import shards_pb2 as pb

__all__ = ["Replica"]

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_STATE_S = 5.0
_AGAIN_S, _MISSING_S = 0.2, 2.0
_STALE_S = 2.0
_RETIRED_S = 0.1
_SMOOTHING = 0.2
_STRIKES = 3
_OUT_S, _MAX_OUT_S = 1.0, 8.0
_log = logging.getLogger(__name__)

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A host that has gone without a word is found out in three seconds; one that is back is found in one.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each replica has a connection of its own, also where two names lead to one address.
    ("grpc.use_local_subchannel_pool", 1),
)
_BARE = ("grpc.minimal_stack", 1)


class Replica:
    """Use it on one event loop; what says so may be used on any thread.

    Args:
        target: ``host:port``.
        credentials: TLS; None: none.
        name: in the server's certificate, where it is not the target.
        token: of its server, if it has one.
        wanted: the versions that it should have.
        changed: called with it when it has become usable, or is not any more, and before that when it has said what ranks it
            has.

    Attributes:
        up: it answers, and takes requests.
        versions: those that it has; ``ranks`` likewise, empty while it has not said so.
        outstanding: requests that it has not answered; ``answers``: how many it has.
        why: what the last failure was, for messages.
        quick: asks without the loop.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        name: str | None = None,
        token: str | None = None,
        wanted: Callable[[], Iterable[VersionSpec]] = tuple,
        prepare_seconds: float = 600.0,
        changed: Callable[[Replica], None] = lambda _: None,
    ) -> None:
        self.target = target
        options: list[tuple[str, int | str]] = list(OPTIONS)
        if name is not None:
            options.append(("grpc.ssl_target_name_override", name))
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._encrypts, self._token = credentials is not None, token
        self._socket = (0, b"")  # port, and who is there
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        # What goes over the second connection needs no loop; it is made by the first call. Nor does it need what gRPC does
        # for calls besides: retries, compression, limits of messages' sizes, statistics.
        self.quick = Asks(CoreChannel(target, [*options, _BARE], credentials), self.metadata)
        self._wanted, self._changed = wanted, changed
        self._prepare_seconds = prepare_seconds
        self._prepare = self._channel.unary_unary(f"/{SERVICE_NAME}/Prepare")
        self._state = self._channel.unary_unary(f"/{SERVICE_NAME}/State")
        self._health = self._channel.unary_stream(f"/{_HEALTH}/Watch")
        self.up = False
        self.versions: set[str] = set()
        self.ranks: tuple[int, ...] = ()
        self.outstanding = self.answers = 0
        self._lock = threading.Lock()
        self.why = "not connected yet"
        self._seconds = 0.0  # smoothed time of an answer
        self._timed = 0.0  # when it was last known
        self._strikes = 0
        self._out_until = 0.0
        self._out_seconds = _OUT_S
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, str] = {}
        self._checking = False
        self._check: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._syncing = 0

    def start(self) -> None:
        """Connect, and stay connected."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def retire(self, seconds: float) -> None:
        """End when what it was asked is answered, or after ``seconds``; nobody may ask it any more."""
        self._stop_watching()
        end = time.monotonic() + seconds
        while self.outstanding and time.monotonic() < end:
            await asyncio.sleep(_RETIRED_S)
        await self.close()

    async def close(self) -> None:
        """End, and cancel what is under way."""
        self._stop_watching()
        self.up = False
        await self._channel.close()
        await asyncio.get_running_loop().run_in_executor(None, self.quick.close)

    def _stop_watching(self) -> None:
        for task in (self._task, self._check, self._renewal):
            if task is not None:
                task.cancel()

    # -- which replica to ask ----------------------------------------------------------------------------------------

    def usable(self, version: str) -> bool:
        """Whether it can be asked for ``version``."""
        return self.up and version in self.versions

    def lack_of(self, rank: int) -> str:
        """What is wrong with asking it for ``rank``: shards.json lists it there, but its server has others. Empty: nothing."""
        if not self.ranks or rank in self.ranks:
            return ""
        return f"its server has ranks {', '.join(map(str, self.ranks))}, not {rank}"

    def wrong(self, version: str) -> str:
        """What is wrong with it, or with asking it for ``version``."""
        if not self.up:
            return self.why
        named = next((str(spec) for spec in self._wanted() if spec.key == version), version)
        return self._told.get(version) or f"it has not prepared version {named}"

    def load(self, now: float) -> tuple[bool, int, int]:
        """The replica where this is least is asked: not put aside, least outstanding, then the faster by factors of two."""
        aside = now < self._out_until or (self._strikes >= _STRIKES and self.outstanding > 0)
        known = self._seconds and now - self._timed < _STALE_S  # an old figure would keep a replica idle for good
        return aside, self.outstanding, math.frexp(self._seconds)[1] if known else -64

    def asked(self) -> None:
        """A call to it begins; on any thread."""
        with self._lock:
            self.outstanding += 1

    def ended(self) -> None:
        """One has ended, or nobody waits for it any more; on any thread."""
        with self._lock:
            self.outstanding -= 1

    def answered(self, seconds: float) -> None:
        """It answered in time; on any thread."""
        with self._lock:
            self.answers += 1
        self._timed = time.monotonic()
        self._seconds += _SMOOTHING * (seconds - self._seconds) if self._seconds else seconds
        self._strikes, self._out_seconds = 0, _OUT_S

    def was_slow(self, seconds: float) -> None:
        """Another one answered first, or nobody waits any more. A third time in a row it is put aside for a while."""
        self._seconds = max(self._seconds, seconds)
        self._timed = time.monotonic()
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._out_until = time.monotonic() + self._out_seconds
            self._out_seconds = min(_MAX_OUT_S, 2 * self._out_seconds)

    def failed(self, why: str) -> None:
        """A call found nobody: it is not asked before it has said how it is."""
        self.why = why
        self._set_up(False)
        self._check_soon(_AGAIN_S)

    def lacks(self, version: str) -> None:
        """It said that it does not have ``version`` any more."""
        self.versions.discard(version)
        self._check_soon(0.0)

    # -- versions ----------------------------------------------------------------------------------------------------

    async def prepare(self, spec: VersionSpec) -> None:
        """Have it map and check a version; raises grpc.aio.AioRpcError."""
        request = pb.PrepareRequest(
            version=spec.key, folder=spec.folder, deltas=spec.deltas, wanted=[spec.key, *self._keys()]
        ).SerializeToString()
        answer = await self._prepare(request, timeout=self._prepare_seconds, metadata=self.metadata)
        self.versions = set(pb.ShardState.FromString(answer).versions)

    def _keys(self) -> list[str]:
        return [spec.key for spec in self._wanted()]

    def renew(self) -> None:
        """Say again what is wanted, so that its server keeps it, and have it prepare what it lacks nevertheless."""
        if (self.up or self._syncing) and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """Also while versions are prepared, which may take longer than they are kept."""
        try:
            await self._learn()
        except grpc.aio.AioRpcError:
            return  # its health, or the next call, says what is wrong
        if not self._syncing and not self.versions.issuperset(self._keys()):
            self._check_soon(0.0)

    async def _learn(self) -> None:
        """Say which versions are wanted, and hear which ranks and versions it has."""
        request = pb.StateRequest(wanted=self._keys()).SerializeToString()
        answer = await self._state(request, timeout=_STATE_S, metadata=self.metadata)
        state = pb.ShardState.FromString(answer)
        self.versions = set(state.versions)
        self._use_socket(state.socket_port, state.socket_server, state.socket_bytes or SMALL_BYTES)
        if self.ranks != tuple(state.ranks):
            self.ranks = tuple(state.ranks)
            self._changed(self)

    def _use_socket(self, port: int, server_id: bytes, most: int) -> None:
        """Questions of up to ``most`` bytes go past gRPC where its server says that it can, and nobody wants it encrypted."""
        if self._encrypts or self._socket == (port, server_id):
            return
        self._socket = port, server_id
        host, _, _ = self.target.rpartition(":")
        opened = functools.partial(AskSocket, host.strip("[]"), port, server_id, self._token)
        self.quick.use_socket(opened, most) if port else self.quick.use_socket(None)

    async def _sync(self) -> bool:
        """Learn which versions it has, and have it prepare those that it lacks; whether it has all now."""
        self._syncing += 1
        try:
            await self._learn()
            whole = True
            tried: set[str] = set()
            # What is wanted may grow while one is prepared; nothing is awaited between the last look at it and "up".
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
            if self._told.get(spec.key) != self.why:
                self._told[spec.key] = self.why
                _log.warning("shard %s %s", self.target, self.why)
            return False
        _log.info("shard %s has prepared version %s", self.target, spec)
        return True

    def _set_up(self, up: bool) -> None:
        if up != self.up:
            self.up = up
            self._changed(self)

    async def _watch(self) -> None:
        """Follow its health for as long as the replica is listed."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME).SerializeToString()
        while True:
            try:
                # Not wait_for_ready: that would keep to itself why there is no connection.
                call = self._health(request)
                async for answer in call:
                    status = health_pb2.HealthCheckResponse.FromString(answer).status
                    if status == health_pb2.HealthCheckResponse.SERVING:
                        await self._follow()
                    else:
                        self.why = "it takes no requests: it starts or stops"
                        self._set_up(False)
            except grpc.aio.AioRpcError as error:
                self.why = _short(error)
            except asyncio.CancelledError:
                raise
            except Exception:
                _log.exception("shard %s: watching it failed", self.target)
            self._set_up(False)
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        whole = await self._sync()
        self._strikes, self._out_until, self._out_seconds = 0, 0.0, _OUT_S
        self._set_up(True)
        self._changed(self)
        if not whole:
            self._check_soon(_MISSING_S)

    def _check_soon(self, seconds: float) -> None:
        """Look again, since nothing of its health may change: it lacks a version, or a call alone was lost."""
        if self._checking or self._task is None or self._task.done():
            return
        self._checking = True

        async def check() -> None:
            await asyncio.sleep(seconds)
            self._checking = False
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                self.why = _short(error)
                self._check_soon(_MISSING_S)  # or its health says so before

        self._check = asyncio.get_running_loop().create_task(check())


def _short(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {(error.details() or '')[:200]}"
