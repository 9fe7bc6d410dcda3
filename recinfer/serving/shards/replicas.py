"""The replicas of all ranks in shards.json, kept up to date with the file, with DNS, and with the versions that the ranker
serves."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio

from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.serving.shards.config import ShardCredentials, ShardsConfig, read_shards
from recinfer.serving.shards.replica import Replica
from recinfer.serving.shards.versions import VersionSpec
from recinfer.serving.wire.address import join_address
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.loop import run_on_loop, start_on_loop

__all__ = ["ReplicaPool"]

_LOOK_S, _RESOLVE_S = 0.5, 5.0
_SWITCH_S = 10.0  # for new connections, before the old ones are closed
_RENEW_S = 20.0  # a third of the time for which shard servers keep wanted versions
_log = logging.getLogger(__name__)


class ReplicaPool:
    """The replicas of each rank. Any thread may construct and close the pool; use it on the serving loop otherwise.

    Args:
        path: shards.json; read again when it, a file that it names, or the token changes.
        token: returns the bearer token of the shard servers, unless the file names another token.
        max_response_bytes: most bytes of a rank's rows for one request.

    Raises:
        ConfigError: the file breaks its format.
    """

    def __init__(
        self,
        path: Path,
        *,
        token: Callable[[], str | None] = lambda: None,
        max_response_bytes: int = Limits.max_response_bytes,
    ) -> None:
        self._path = path
        self._token = token
        self._max_response_bytes = max_response_bytes
        listed = _stamp(path)  # before the file is read: a change meanwhile is found at the first look
        self.config = read_shards(path)
        self._seen = (listed, *self._stamps()[1:])
        self._credentials = ShardCredentials.of(self.config.settings, token())
        self._last_error = ""  # the reason why the file was not followed
        self._read_again = False
        self._replicas: dict[str, Replica] = {}
        self._listed: dict[int, tuple[Replica, ...]] = {}
        self._by_rank: dict[int, tuple[Replica, ...]] = {}  # without replicas that have reported other ranks
        self._lacks: dict[tuple[str, int], str] = {}  # the reason why a replica is not called for a rank, or empty
        self._wanted: weakref.WeakValueDictionary[str, VersionSpec] = weakref.WeakValueDictionary()
        self._resolved: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._following: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        run_on_loop(self._start())

    def close(self) -> None:
        """Close all channels."""
        run_on_loop(self._stop(), timeout=10.0)

    def reload(self) -> None:
        """Read the file again soon, also if it looks unchanged; takes no lock, so a signal handler may call this."""
        self._read_again = True

    def replicas(self, rank: int) -> tuple[Replica, ...]:
        """The replicas of a rank that may be called; empty if the file does not list the rank."""
        return self._by_rank.get(rank, ())

    def listed(self, rank: int) -> tuple[Replica, ...]:
        """All replicas that the file lists for a rank, also replicas whose servers have reported other ranks."""
        return self._listed.get(rank, ())

    def everyone(self) -> list[Replica]:
        """All replicas, each once."""
        return list(self._replicas.values())

    def addresses(self, rank: int, version: str = "") -> str:
        """The addresses of a rank's replicas, each with the reason why it cannot look up in ``version``, for messages."""
        found = [
            f"{replica.target} ({replica.lack_of(rank) or replica.reason_unusable(version)})"
            for replica in self.listed(rank)
        ]
        listed = self.config.ranks.get(rank)
        return "; ".join(found) or (f"{', '.join(listed)} (no address)" if listed else "none listed in shards.json")

    def unreachable(self, ranks: Iterable[int], version: str) -> list[int]:
        """The ranks among ``ranks`` without a replica that can look up in ``version``."""
        return [rank for rank in ranks if not any(r.usable(version) for r in self.replicas(rank))]

    # -- versions ----------------------------------------------------------------------------------------------------

    def want(self, spec: VersionSpec) -> VersionSpec:
        """Have all replicas, also later ones, prepare ``spec`` for as long as the caller keeps the returned object."""
        found = self._wanted.setdefault(spec.key, spec)
        start_on_loop(self._catch_up(found.key))
        return found

    async def _catch_up(self, version: str) -> None:
        """Have replicas that came up before ``version`` was wanted check their versions again."""
        for replica in self.everyone():
            if replica.up and version not in replica.versions:
                replica.lacks(version)

    def wanted(self) -> list[VersionSpec]:
        """The versions that replicas should have."""
        return list(self._wanted.values())

    async def prepare(self, spec: VersionSpec, ranks: Sequence[int]) -> None:
        """Have every replica that is up map and check a version.

        Raises:
            InputError: a replica cannot; the message has its address and the reason.
            UnavailableError: a rank has no replica that is up, nor gets one within the settings' ``timeout_seconds``.
        """
        end = time.monotonic() + self.config.settings.timeout_seconds
        while any(not any(r.up for r in self.replicas(rank)) for rank in ranks) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        up = [replica for replica in self.everyone() if replica.up]
        outcomes = await asyncio.gather(*(replica.prepare(spec) for replica in up), return_exceptions=True)
        for replica, outcome in zip(up, outcomes):
            if isinstance(outcome, grpc.aio.AioRpcError):
                if outcome.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    continue  # a lost replica prepares the version when it is back
                raise InputError(f"shard {replica.target} did not prepare version {spec}: {outcome.details()}")
            if isinstance(outcome, BaseException):
                raise outcome
        missing = self.unreachable(ranks, spec.key)
        if missing:
            where = "; ".join(f"rank {rank}: {self.addresses(rank, spec.key)}" for rank in missing)
            raise UnavailableError(f"version {spec} is not prepared, no replica of some ranks is there: {where}")

    # -- the list of replicas ----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._list(self.config, self._credentials)
        self._following = asyncio.create_task(self._follow())

    async def _stop(self) -> None:
        for task in (self._following, *self._retiring):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    async def _follow(self) -> None:
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() - renewed > _RENEW_S:
                renewed = time.monotonic()
                for replica in self.everyone():
                    replica.renew()
            try:
                stamps = self._stamps()
                if self._read_again or self._last_error or stamps != self._seen:
                    self._read_again, self._seen = False, stamps
                    await self._read_config_again()
                else:
                    await self._list(self.config, self._credentials)
            except ConfigError as error:
                if self._last_error != str(
                    error
                ):  # tried again each time, as named files may change while shards.json does not
                    _log.error("the shards stay as they were: %s", error)
                self._last_error = str(error)
            except Exception:
                _log.exception("following %s failed", self._path)

    def _stamps(self) -> tuple[object, ...]:
        """A value that changes with shards.json, the files that it names, and the token."""
        settings = self.config.settings
        named = (settings.token_file, settings.tls_ca, settings.tls_cert, settings.tls_key)
        return (_stamp(self._path), self._token(), *(None if path is None else _stamp(Path(path)) for path in named))

    async def _read_config_again(self) -> None:
        config = read_shards(self._path)
        needed = max((spec.world_size for spec in self.wanted()), default=0)
        lost = sorted(set(range(needed)) - config.ranks.keys())
        if lost:
            ranks = ", ".join(map(str, lost))
            raise ConfigError(f"{self._path}: no address of rank {ranks}; what is served is cut for {needed} ranks")
        await self._list(config, ShardCredentials.of(config.settings, self._token()))
        # The end of a reported error is shown where the error was.
        _log.log(logging.WARNING if self._last_error else logging.INFO, "%s was read again", self._path)
        self._last_error = ""

    async def _list(self, config: ShardsConfig, credentials: ShardCredentials) -> None:
        """Use replicas for the addresses in the file and in DNS now, and close the others. A failure changes nothing."""
        names: dict[str, str | None] = {}
        by_rank: dict[int, list[str]] = {}
        for rank, addresses in config.ranks.items():
            found = [target for address in addresses for target in await self._targets(address)]
            names |= {target: name for target, name in found if target not in names}
            by_rank[rank] = list(dict.fromkeys(target for target, _ in found))
        kept = self._replicas if credentials == self._credentials else {}
        with self._new_replicas(names, kept, credentials) as new:
            used = {target: new.get(target) or kept[target] for target in names}
            await self._wait_until_up(new, by_rank, used, min(config.settings.timeout_seconds, _SWITCH_S))
            gone = [replica for target, replica in self._replicas.items() if used.get(target) is not replica]
            self.config, self._credentials, self._replicas = config, credentials, used
            self._listed = {rank: tuple(used[target] for target in mine) for rank, mine in by_rank.items()}
        self._sort()
        for replica in gone:
            if replica.target not in used:
                _log.info("shard %s is not listed any more", replica.target)
            self._retire(replica)

    @contextmanager
    def _new_replicas(
        self, names: Mapping[str, str | None], kept: Mapping[str, Replica], credentials: ShardCredentials
    ) -> Iterator[dict[str, Replica]]:
        """New replicas for the addresses that are not ``kept``; an exception in the with block closes them."""
        new: dict[str, Replica] = {}
        try:
            for target, name in names.items():
                if target not in kept:
                    new[target] = self._new(target, name, credentials)
            yield new
        except BaseException:
            for replica in new.values():
                self._retire(replica)
            raise

    async def _wait_until_up(
        self,
        new: Mapping[str, Replica],
        by_rank: Mapping[int, Sequence[str]],
        used: Mapping[str, Replica],
        seconds: float,
    ) -> None:
        """Wait, for ``seconds`` at most, until each rank has as many usable ``new`` replicas as it loses usable replicas.

        So no rank is without a replica during the switch.

        Args:
            by_rank, used: the addresses by rank, and the replicas by address, after the switch.
        """

        def awaited() -> list[Replica]:
            found = []
            for rank, targets in by_rank.items():
                leaving = sum(each.up and used.get(each.target) is not each for each in self.replicas(rank))
                coming = [new[target] for target in targets if target in new]
                up = sum(each.up and not each.lack_of(rank) for each in coming)
                if up < min(leaving, len(coming)):
                    found += [each for each in coming if not each.up]
            return list(dict.fromkeys(found))

        end = time.monotonic() + seconds
        while (left := awaited()) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for replica in left:
            _log.warning("shard %s cannot be called with the present settings: %s", replica.target, replica.why)

    def _retire(self, replica: Replica) -> None:
        task = asyncio.create_task(replica.retire(self.config.settings.timeout_seconds))
        self._retiring.add(task)  # a loop holds its tasks weakly
        task.add_done_callback(self._retiring.discard)

    def _sort(self) -> None:
        """Keep for each rank the replicas whose servers have the rank, or have not reported their ranks yet."""
        lacks = {
            (replica.target, rank): replica.lack_of(rank) for rank, mine in self._listed.items() for replica in mine
        }
        for (target, rank), why in lacks.items():
            if why and self._lacks.get((target, rank)) != why:
                _log.warning("shard %s is listed for rank %d, but %s: it is not called for it", target, rank, why)
        self._lacks = lacks
        self._by_rank = {
            rank: tuple(replica for replica in mine if not lacks[replica.target, rank])
            for rank, mine in self._listed.items()
        }

    async def _targets(self, address: str) -> list[tuple[str, str | None]]:
        """The addresses to which ``address`` resolves, each with the name for TLS to check."""
        if not address.startswith("dns:///"):
            return [(address, None)]
        # Each address of a name is a replica, since versions are prepared on each, so names are resolved here and not by gRPC.
        host, _, port = address.removeprefix("dns:///").rpartition(":")
        until, known = self._resolved.get(address, (0.0, ()))
        if time.monotonic() >= until:
            try:
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
                known = tuple(sorted({join_address(str(entry[4][0]), port) for entry in found}))
            except (OSError, UnicodeError) as error:
                # The last addresses are kept: a failed name resolution does not mean that servers have moved.
                _log.warning("cannot resolve %s: %s", address, error)
            self._resolved[address] = (time.monotonic() + _RESOLVE_S, known)
        return [(target, host) for target in known]

    def _new(self, target: str, name: str | None, credentials: ShardCredentials) -> Replica:
        replica = Replica(
            target,
            credentials,
            name=name,
            wanted=self.wanted,
            max_response_bytes=self._max_response_bytes,
            changed=self._sort,
        )
        replica.start()
        return replica


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
