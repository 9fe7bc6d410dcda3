"""A client's token and certificates, read again when their files change."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from recinfer.errors import ConfigError, InputError
from recinfer.serving.client.calls import security_of
from recinfer.serving.wire.followed_files import FollowedFiles
from recinfer.serving.wire.tls import File, authorization, read_file, read_token

__all__ = ["ClientCredentials"]

_LOOK_S = 1.0
_log = logging.getLogger(__name__)


class ClientCredentials:
    """The credentials of one client. Thread-safe.

    Args:
        token: bearer token; empty: no token.
        token_file: file with the token, instead of ``token``; the first of several lines.
        ca, cert, key, name: see InferenceClient.

    Attributes:
        metadata: the metadata of a call.
        channel: credentials of a channel; None without TLS. ``options``: options of a channel.

    Raises:
        InputError: settings that do not go together, or a bad file of certificates.
        ConfigError: a token file that cannot be read, or holds no token.
    """

    def __init__(
        self,
        token: str,
        token_file: File | None,
        ca: File | None,
        cert: File | None,
        key: File | None,
        name: str,
    ) -> None:
        if token and token_file is not None:
            raise InputError("token: got a token and token_file, expected one of them")
        self._token, self._token_file = token, token_file
        self._tls = (ca, cert, key)
        self._name = name
        self._lock = threading.Lock()
        self._next = time.monotonic() + _LOOK_S
        self._files: FollowedFiles[dict[File, bytes]] = FollowedFiles("client's credentials", _log)
        self._files.used = self._read()
        self._needs_channel = False
        self.metadata = self._made_metadata()
        self.channel: grpc.ChannelCredentials | None
        self.options: list[tuple[str, Any]]
        self.channel, self.options = security_of(*self._tls, name)

    def changed(self) -> bool:
        """Read the files again after a second; returns whether new calls need a new channel. Bad files change nothing."""
        if not self._files.used or time.monotonic() < self._next:
            return False
        with self._lock:
            if time.monotonic() < self._next:
                return False
            self._next = time.monotonic() + _LOOK_S
            self._needs_channel = False
            self._files.look(self._read, self._use)
            return self._needs_channel

    def _use(self, found: dict[File, bytes]) -> None:
        last = self._files.used or {}
        metadata, (channel, options) = self._made_metadata(), security_of(*self._tls, self._name)
        if self._read() != found:
            raise ConfigError("the files are being written")
        self.metadata, self.channel, self.options = metadata, channel, options
        self._needs_channel = any(found.get(path) != last.get(path) for path in self._tls if path is not None)

    def _read(self) -> dict[File, bytes]:
        if self._tls[0] is None:  # security_of names the setting that is missing
            return {} if self._token_file is None else {self._token_file: read_file(self._token_file)}
        paths = [path for path in (self._token_file, *self._tls) if path is not None]
        return {path: read_file(path) for path in paths if path == self._token_file or Path(path).exists()}

    def _made_metadata(self) -> tuple[tuple[str, str], ...]:
        if self._token_file is None:
            return authorization(self._token)
        token = read_token(self._token_file)
        if not token:
            raise ConfigError(f"{self._token_file} holds no token, expected the server's token")
        return authorization(token)
