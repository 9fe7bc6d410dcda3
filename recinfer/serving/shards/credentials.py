"""The settings of shards.json for connections to shard servers; when they change, replicas reconnect."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from recinfer.errors import ConfigError, InputError
from recinfer.serving.shards.config import ShardsSettings
from recinfer.serving.wire.tls import credentials_of, load_pem, read_token

__all__ = ["ShardCredentials"]


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
