"""``shards.json``: which addresses hold which ranks, how a ranker calls them and with which credentials; read strictly.

{"format": "recinfer.shards", "version": 1,
 "ranks": {"0": ["10.0.0.1:50051", "10.0.0.2:50051"], "1": ["dns:///shard-1.recinfer:50051"]},
 "settings": {"hedge_budget": 0.1}}
"""

from __future__ import annotations

import json
import logging
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from recinfer.errors import ConfigError, InputError
from recinfer.serving.wire.tls import credentials_of, load_pem, read_token
from recinfer.strict_json import build, loads, raising_config_error

__all__ = ["ShardCredentials", "ShardsConfig", "ShardsSettings", "read_shards", "shards_json"]

FORMAT, VERSION = "recinfer.shards", 1
_log = logging.getLogger(__name__)
_RANK = re.compile("0|[1-9][0-9]{0,8}")
_ADDRESS = re.compile(r"(dns:///)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})\Z")


@dataclass(frozen=True)
class ShardsSettings:
    """How a ranker calls shard servers: the ``settings`` of shards.json.

    Attributes:
        hedge: send a request that takes longer than 95 % of the others to a second replica too.
        hedge_budget: at most this share of the requests is sent twice.
        timeout_seconds: seconds for a request to the shard servers, unless its client's deadline is sooner; the load of a
            version waits as long for a rank without a usable replica.
        prepare_seconds: seconds for mapping and checking a version.
        missing: the effect of a rank without a usable replica. ``"default_rows"``: its vectors are zero, and the answer says
            so; archives whose manifest does not allow this are refused. ``"error"``: an error, also where the manifest allows
            default rows. None: each archive's manifest decides.
        token_file: file with the bearer token of the shard servers; None: this ranker's own token.
        tls_ca, tls_cert, tls_key: PEM files of the shard servers' authority, and of this ranker's certificate for mutual TLS.
        tls_name: name in the shard servers' certificates; None: their address.
    """

    hedge: bool = True
    hedge_budget: float = 0.1
    timeout_seconds: float = 5.0
    prepare_seconds: float = 600.0
    missing: Literal["error", "default_rows"] | None = None
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("hedge_budget", 0.0, 1.0),
            ("timeout_seconds", 0.001, 86_400.0),
            ("prepare_seconds", 1.0, 86_400.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"shards: {name}: got {value!r}, expected a number from {low:g} to {high:g}")


@dataclass(frozen=True)
class _ShardsJson:
    """The JSON of the file."""

    format: Literal["recinfer.shards"]
    version: int
    ranks: dict[str, tuple[str, ...]]
    settings: ShardsSettings = field(default_factory=ShardsSettings)


@dataclass(frozen=True)
class ShardsConfig:
    """Rank -> addresses (``host:port``, or ``dns:///name:port``: each address of the name is a replica)."""

    ranks: dict[int, tuple[str, ...]]
    settings: ShardsSettings = field(default_factory=ShardsSettings)


def shards_json(addresses: Mapping[int, Sequence[str]], settings: Mapping[str, str] | None = None) -> str:
    """The text of a shards.json: the addresses of each rank's replicas, and timeouts."""
    ranks = {str(rank): list(found) for rank, found in sorted(addresses.items())}
    more = {"settings": dict(settings)} if settings else {}
    return json.dumps({"format": FORMAT, "version": VERSION, "ranks": ranks, **more}, indent=1) + "\n"


def read_shards(path: Path) -> ShardsConfig:
    """Read shards.json.

    Raises:
        ConfigError: the file is missing, or breaks the format; the message says what came and what was expected.
    """
    try:
        with raising_config_error():
            data = loads(path.read_bytes(), str(path))
            if isinstance(settings := data.get("settings"), dict) and settings.pop("half", False):
                _log.warning("%s: the setting half has no effect any more: vectors are exact; remove it", path)
            found = build(_ShardsJson, data, str(path))
    except OSError as error:
        raise ConfigError(f"shards: cannot read {str(path)!r}: {error.strerror}") from None
    if found.version != VERSION:
        raise ConfigError(f"{path}: version {found.version}; expected {VERSION}")
    return ShardsConfig(_ranks(path, found.ranks), found.settings)


def _ranks(path: Path, given: Mapping[str, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    if not given:
        raise ConfigError(f"{path}: ranks: got none, expected an object of rank to list of addresses")
    for name, addresses in given.items():
        if not _RANK.fullmatch(name):
            raise ConfigError(f"{path}: ranks: got {name[:40]!r}, expected a number from 0")
        if not addresses:
            raise ConfigError(f"{path}: rank {name}: got no address, expected at least one")
        for address in addresses:
            found = _ADDRESS.match(address)
            if found is None or not 0 < int(found[3]) < 65536 or not _is_host(found[2]):
                raise ConfigError(f"{path}: rank {name}: got {address[:80]!r}, expected host:port or dns:///name:port")
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"{path}: rank {name}: an address stands there twice")
    return {int(name): given[name] for name in sorted(given, key=int)}


def _is_host(name: str) -> bool:
    """Whether DNS allows the name: resolvers fail in various ways on a name that it does not allow."""
    if name.startswith("["):
        return True
    whole = name.removesuffix(".")
    return len(whole) < 254 and all(0 < len(label) < 64 for label in whole.split("."))


@dataclass(frozen=True)
class ShardCredentials:
    """The settings for connections to replicas. Equal credentials can share a connection.

    Attributes:
        token: the servers' token, or None.
        files: contents of the PEM files: authority, certificate, key.
        name: name in the servers' certificates; None: their address.
        prepare_seconds: seconds for mapping and checking a version.
        channel, tls: TLS in gRPC's and in ssl's form; None: no TLS.
    """

    token: str | None
    files: tuple[bytes | None, ...]
    name: str | None
    prepare_seconds: float
    channel: grpc.ChannelCredentials | None = field(compare=False)
    tls: ssl.SSLContext | None = field(compare=False)

    @classmethod
    def of(cls, settings: ShardsSettings, token: str | None) -> ShardCredentials:
        """The credentials of a file's settings; ``token``: the token if the settings name no file of a token.

        Raises:
            ConfigError: a file cannot be read, or holds something else.
        """
        named = (settings.tls_ca, settings.tls_cert, settings.tls_key)
        ca, cert, key = (None if path is None else Path(path) for path in named)
        try:
            channel = credentials_of(ca, cert, key)
            tls = None
            if channel is not None:
                tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                load_pem(tls, cert, key, ca)
            if settings.token_file is not None:
                token = read_token(Path(settings.token_file))
                if not token:
                    raise ConfigError(f"{settings.token_file} holds no token, expected the token of the shard servers")
            files = tuple(None if path is None else path.read_bytes() for path in (ca, cert, key))
        except InputError as error:
            raise ConfigError(f"shards: {error}") from None
        except OSError as error:
            raise ConfigError(f"shards: cannot read {error.filename}: {error.strerror}") from None
        return cls(token, files, settings.tls_name, settings.prepare_seconds, channel, tls)
