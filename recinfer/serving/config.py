"""The configuration of a server: addresses, tables, models, batching, limits, security and role."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from recinfer import env
from recinfer.errors import ConfigError
from recinfer.remote.location import is_url, mirror_folder
from recinfer.serving.wire.address import plain_host
from recinfer.serving.wire.followed_files import is_pipe
from recinfer.serving.wire.limits import BatchConfig, Limits
from recinfer.serving.wire.unix_socket import check_socket_path

if TYPE_CHECKING:
    from recinfer.serving.server.security import Security

__all__ = [
    "AddressConfig",
    "LoadOptions",
    "ModelsConfig",
    "RoleConfig",
    "SecurityConfig",
    "ServeConfig",
    "TablesConfig",
]

_MOST_WORKERS = 256
_SHORTEST_POLL_S, _SHORTEST_TIMEOUT_S = 0.01, 1.0
_SHORTEST_IDLE_S, _A_DAY_S = 0.1, 86_400.0
_ORIGIN = re.compile(r"https?://[^/?#\s@]+")


@dataclass(frozen=True)
class AddressConfig:
    """Addresses that a server listens on, its connections, and its log format.

    Attributes:
        host: address that all ports listen on, see recinfer.serving.wire.address.
        port: TCP port of gRPC; 0: a free port.
        http_port: TCP port of REST, 0: a free port; None: no REST.
        metrics_port: TCP port of Prometheus metrics and the status page, 0: a free port; None: no metrics.
        log_json: write the package's log to stderr as JSON, with one line per request.
        unix_socket: gRPC listens on this Unix socket too, without TLS; None: on no socket.
        cors_origins: origins whose pages may send requests over HTTP, such as ``https://shop.example``; ``*``: all.
        drain_seconds: how long running requests may take after the signal to stop.
        idle_seconds: how long a connection may stay open without a request, 0.1 or more; None: 75 for HTTP, without a limit
            for gRPC.

    Raises:
        ConfigError: a port outside 0 to 65535, two listeners on one port, or a bad origin, path or number of seconds.
    """

    host: str = "127.0.0.1"
    port: int = 0
    http_port: int | None = None
    metrics_port: int | None = None
    log_json: bool = False
    unix_socket: Path | None = None
    cors_origins: tuple[str, ...] = ()
    drain_seconds: float = 10.0
    idle_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", plain_host(self.host))
        object.__setattr__(self, "cors_origins", tuple(map(_checked_origin, self.cors_origins)))
        if self.unix_socket is not None:
            object.__setattr__(self, "unix_socket", Path(self.unix_socket))
            check_socket_path(Path(self.unix_socket))
        if self.cors_origins and self.http_port is None:
            raise ConfigError("--cors-origin is an option of the HTTP port; give --http-port too")
        if not 0 <= self.drain_seconds <= _A_DAY_S:
            raise ConfigError(f"--drain-seconds: got {self.drain_seconds}, expected 0 to {_A_DAY_S:g} seconds")
        if self.idle_seconds is not None and not _SHORTEST_IDLE_S <= self.idle_seconds <= _A_DAY_S:
            raise ConfigError(
                f"--idle-seconds: got {self.idle_seconds}, expected {_SHORTEST_IDLE_S:g} to {_A_DAY_S:g} seconds"
            )
        ports = {"--port": self.port, "--http-port": self.http_port, "--metrics-port": self.metrics_port}
        at: dict[int, str] = {}
        for name, port in ports.items():
            if port is not None:
                _check_number(name, port, 0, 65535)
            # Workers share their ports, so binding would not fail.
            if port and (other := at.setdefault(port, name)) != name:
                raise ConfigError(
                    f"got {other} {port} and {name} {port}, expected different ports; 0 picks a free port"
                )


class LoadOptions(TypedDict):
    """Arguments of :func:`recinfer.load` for every version that a server loads."""

    device: str
    preload: bool
    reuse_outputs: bool


@dataclass(frozen=True)
class TablesConfig:
    """How tables are held and looked up, see :func:`recinfer.load`.

    Attributes:
        device: ``"cpu"``, or ``"cuda"``: rank r's tables go to GPU r.
        preload: read all pages of the tables before the first request.
        lock: read all pages of the archives and lock them in memory; versions of a model store are not locked.
        reuse_outputs: reuse the memory of responses above 32 MiB.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    preload: bool = False
    lock: bool = False
    reuse_outputs: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device: got {self.device!r}, expected 'cpu' or 'cuda'")

    def load_options(self) -> LoadOptions:
        """Arguments of :func:`recinfer.load`, without ``lock``, which applies to the archives of the configuration only."""
        return {
            "device": self.device,
            "preload": self.preload,
            "reuse_outputs": self.reuse_outputs,
        }


@dataclass(frozen=True)
class ModelsConfig:
    """Deltas, the model store, and how many processes serve the models.

    Attributes:
        deltas: deltas to apply to the archive before it is served, in order; they need exactly one archive.
        model_store: folder or URL with archives at ``<model>/<version>``; the newest version of each model is served. A URL
            becomes the folder of the store's mirror.
        poll: seconds between two looks at the model store, which load and unload versions; None: no polling.
        model_config: file with the models, versions, labels and weights to serve from the store
            (recinfer.serving.engine.model_config); a shard server reads it once, for the version that it begins with.
        admin: enable the admin service, which loads versions from the store.
        workers: number of serving processes, 1 to 256.
        worker_timeout: seconds without a response after which a worker is killed and replaced.
        cache_dir: folder for archives that are downloaded from a URL; None: see recinfer.remote.cache.
        cache_bytes: most bytes of archives in the cache; None: no bound.
        store_url: URL of the model store; given by ``model_store``.

    Raises:
        ConfigError: ``poll``, ``model_config`` or ``admin`` without a model store, or a number out of its range.
    """

    deltas: tuple[Path, ...] = ()
    model_store: str | Path | None = None
    poll: float | None = None
    model_config: Path | None = None
    admin: bool = False
    workers: int = 1
    worker_timeout: float = 10.0
    cache_dir: Path | None = None
    cache_bytes: int | None = None
    store_url: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "deltas", tuple(map(Path, _several("--delta", self.deltas))))
        if isinstance(self.model_store, str) and is_url(self.model_store):
            object.__setattr__(self, "store_url", self.model_store)
            object.__setattr__(
                self, "model_store", mirror_folder(self.model_store, self.cache_dir or env.cache_folder())
            )
        if self.cache_bytes is not None and self.cache_bytes < 1:
            raise ConfigError(f"--cache-bytes: got {self.cache_bytes}, expected 1 or more")
        for name in ("model_store", "model_config", "cache_dir"):
            path = getattr(self, name)
            object.__setattr__(self, name, None if path is None else Path(path))
        if self.poll is not None and not self.poll >= _SHORTEST_POLL_S:
            raise ConfigError(f"--poll: got {self.poll}, expected {_SHORTEST_POLL_S:g} seconds or more")
        _check_number("--workers", self.workers, 1, _MOST_WORKERS)
        if not self.worker_timeout >= _SHORTEST_TIMEOUT_S:
            raise ConfigError(
                f"--worker-timeout: got {self.worker_timeout}, expected {_SHORTEST_TIMEOUT_S:g} seconds or more"
            )

    @property
    def store(self) -> Path | None:
        """The folder of the model store, or of its mirror."""
        assert not isinstance(self.model_store, str)
        return self.model_store

    @property
    def follows_store(self) -> bool:
        """Whether the server loads and unloads versions of the store while it serves."""
        return self.model_store is not None and (self.poll is not None or self.model_config is not None)

    def check_store(self) -> None:
        """Raise ConfigError for settings of a model store without a store."""
        if self.model_store is not None:
            return
        if self.admin:
            raise ConfigError("--admin needs a model store to load versions from; give --model-store DIR")
        if self.poll is not None or self.model_config is not None:
            raise ConfigError("--poll and --model-config choose versions of a model store; give --model-store DIR")


@dataclass(frozen=True)
class SecurityConfig:
    """Authentication and TLS.

    Attributes:
        token: bearer token that every call must carry; None: the token of ``token_file``.
        token_file: file with the token, or with two while callers change from one to the other, one per line; None: the token
            of RECINFER_TOKEN, if it is set.
        tls_cert, tls_key: PEM files of the server's certificate chain and key; both or neither.
        tls_client_ca: PEM file of the authority that signs client certificates (mutual TLS).
        insecure: allow a host beyond loopback without a token.
    """

    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure: bool = False

    def read(self, *, worker: bool = False) -> Security:
        """The settings with the token that its file holds now; a server reads the files of tokens and certificates again when
        they change.

        Args:
            worker: whether this process is a worker. The supervisor passes its token in the environment of its workers, so
                that a restarted worker can serve while the file is bad.

        Raises:
            ConfigError: an unreadable file, a bad token, or settings that do not go together.
        """
        from recinfer.serving.server.security import Security

        follows_file = self.token is None and self.token_file is not None
        given = self.token
        if given is None and (worker or not follows_file):
            given = env.token()
        return Security(
            token=given,
            token_file=self.token_file if follows_file else None,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            client_ca=self.tls_client_ca,
            insecure=self.insecure,
        )


@dataclass(frozen=True)
class RoleConfig:
    """The role of a server when several hosts serve one model; by default it serves whole models.

    Attributes:
        ranks: a shard server holds these ranks only; None: no shard server.
        socket_port: TCP port of a shard server for lookups from rankers; 0: a free port, which rankers discover.
        shards: a ranker looks up embeddings in the shard servers of this shards.json; None: no ranker.
        missing_shards: a ranker's behaviour when it reaches no replica of a rank; None: as the archive allows.

    Raises:
        ConfigError: settings of one role with another role.
    """

    ranks: tuple[int, ...] | None = None
    socket_port: int = 0
    shards: Path | None = None
    missing_shards: Literal["error", "default_rows"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", None if self.ranks is None else tuple(sorted(set(self.ranks))))
        object.__setattr__(self, "shards", None if self.shards is None else Path(self.shards))
        if self.ranks is not None and self.shards is not None:
            raise ConfigError(
                "got --ranks and --shards: a shard server has --ranks, a ranker --shards; start one of each kind"
            )
        if self.ranks is None and self.socket_port:
            raise ConfigError("--socket-port is an option of shard servers; give --ranks too")
        if self.shards is None and self.missing_shards is not None:
            raise ConfigError("--missing-shards is an option of rankers; give --shards shards.json too")
        _check_number("--socket-port", self.socket_port, 0, 65535)


@dataclass(frozen=True)
class ServeConfig:
    """All settings of a server, checked when it is built. Errors name a setting by its option of ``recinfer serve``.

    Attributes:
        archives: archive folders or their URLs; the model of the first is the default model.
        address, tables, models, batching, limits, security, role: see their classes.

    Raises:
        ConfigError: a setting out of its range, or settings that do not go together.

    >>> ServeConfig(archives=(Path("movielens.rqa"),), address=AddressConfig(http_port=0)).address.port
    0
    """

    archives: tuple[str | Path, ...] = ()
    address: AddressConfig = field(default_factory=AddressConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    batching: BatchConfig = field(default_factory=BatchConfig)
    limits: Limits = field(default_factory=Limits)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    role: RoleConfig = field(default_factory=RoleConfig)

    def __post_init__(self) -> None:
        archives = [path if is_url(path) else Path(path) for path in _several("archives", self.archives)]
        object.__setattr__(self, "archives", tuple(archives))
        device = self.tables.device
        if self.address.unix_socket is not None and self.models.workers > 1:
            raise ConfigError(
                f"got --unix-socket with --workers {self.models.workers}: processes cannot share a Unix socket; "
                "give one of them"
            )
        if self.role.shards is not None and device != "cpu":
            raise ConfigError(
                f"got --device {device} with --shards: a ranker runs on the CPU and its shard servers hold the "
                f"tables; leave --device out"
            )
        if self.role.ranks is not None and (odd := self._options_of_whole_models()):
            raise ConfigError(
                f"got {', '.join(odd)} with --ranks, but a shard server serves rankers only; give it to the ranker"
            )
        self.models.check_store()

    def _options_of_whole_models(self) -> list[str]:
        """The given options that a shard server lacks."""
        given = {
            "--http-port": self.address.http_port is not None,
            "--unix-socket": self.address.unix_socket is not None,
            "--workers": self.models.workers > 1,
            "--admin": self.models.admin,
            "--poll": self.models.poll is not None,
            "--device cuda": self.tables.device != "cpu",
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def folders(self) -> tuple[Path, ...]:
        """The archive folders; URLs are replaced by folders before."""
        assert not any(isinstance(path, str) for path in self.archives)
        return tuple(map(Path, self.archives))

    @property
    def reloads(self) -> bool:
        """Whether the server reads files again on SIGHUP."""
        security = self.security
        token_file = security.token_file
        follows_files = (token_file is not None and not is_pipe(token_file)) or security.tls_cert is not None
        return self.role.shards is not None or self.models.follows_store or follows_files

    def of_worker(self, port: int, http_port: int | None) -> ServeConfig:
        """The settings of a worker, which serves the ports that its supervisor holds."""
        return replace(self, address=replace(self.address, port=port, http_port=http_port, metrics_port=None))

    def to_json(self) -> str:
        """The settings as JSON by the names of the fields, without ``security.token``."""
        values = dataclasses.asdict(self)
        values["security"]["token"] = None
        return json.dumps(values, default=os.fspath)

    @classmethod
    def from_json(cls, text: str) -> ServeConfig:
        """Read :meth:`to_json`'s text; raises ArchiveError or ConfigError for anything else."""
        from recinfer.strict_json import build

        # A path may hold bytes that are no UTF-8, which the reader of archives refuses.
        return build(cls, json.loads(text), "configuration")


def _several(name: str, given: Iterable[str | os.PathLike[str]]) -> tuple[str | os.PathLike[str], ...]:
    if isinstance(given, str | os.PathLike):
        raise ConfigError(f"{name}: got {given!s:.80}, expected a tuple of paths")
    return tuple(given)


def _checked_origin(text: str) -> str:
    """An origin in lower case, as browsers send it; raises ConfigError."""
    origin = text.lower()
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ConfigError(f"--cors-origin: got {text!r:.80}, expected an origin such as https://shop.example, or *")
    return origin


def _check_number(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}: got {value!r}, expected a whole number from {low} to {high}")
