"""Authentication and encryption of a server: TLS from files, bearer tokens, and loopback by default.

Certificates, keys, client authorities and tokens are read again while the server runs: see :meth:`Security.look`. New connections
use the new files; open connections stay. Files that do not fit together change nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
import grpc.aio

from recinfer.errors import ConfigError
from recinfer.serving.server.grpc_call import CoreCall, Ending
from recinfer.serving.wire.address import plain_host
from recinfer.serving.wire.followed_files import FollowedFiles, is_pipe
from recinfer.serving.wire.tls import File, expiry_of, fits_a_header, load_pem, read_file, tokens_of

__all__ = ["NO_TOKEN", "Security", "follow_files"]

NO_TOKEN = Ending("UNAUTHENTICATED", "this server needs a token: send 'authorization: Bearer <token>'")
"""The ending of a call without the token."""

_log = logging.getLogger(__name__)
_HEADER, _SCHEME = "authorization", "bearer "
_MIN_TOKEN = 16
_OPEN = ("/grpc.health.v1.Health/",)
_LOOK_S = 1.0  # between two looks at the files; a file that is being written is read again at the next look
_SOON_S = 14 * 86_400.0  # before a certificate's expiry, from which the log warns


@dataclass(frozen=True)
class Security:
    """The protection of a server: tokens, TLS, and the hosts on which it may listen.

    Attributes:
        token: every call except health needs ``authorization: Bearer <token>``; None: no call needs a token, unless
            ``token_file`` has one.
        tls_cert, tls_key: PEM files of the server's certificate chain and key; both or neither.
        client_ca: PEM file of the authority whose certificates clients must show (mutual TLS); needs tls_cert.
        insecure: listen beyond this machine also without a token.
        token_file: file with one token, or two while callers change to another; calls may have either. ``token`` counts while the
            file has never been sound.
    """

    token: str | None = field(default=None, repr=False)
    tls_cert: File | None = None
    tls_key: File | None = None
    client_ca: File | None = None
    insecure: bool = False
    token_file: File | None = None
    _live: _Live = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS: got one of certificate and key, expected both or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ConfigError("TLS: got a client authority without a server certificate; mutual TLS needs both")
        if self.token is not None:
            _check_token(self.token)
        object.__setattr__(self, "_live", _Live())
        if self.token is not None:
            self._live.tokens = (self.token,)
        # A worker has its supervisor's token, which was the content of the pipe.
        if self.token_file is not None and (self.token is None or not is_pipe(self.token_file)):
            try:
                content = read_file(self.token_file)  # once: a pipe gives its content once
                self._live.token_file.used = content
                self._live.tokens = _tokens_in(self.token_file, content)
            except ConfigError as error:
                if self.token is None:
                    raise
                _log.error("%s; the token that the server was started with is used", error)

    def check_host(self, host: str) -> None:
        """Raise ConfigError if ``host`` is not loopback and no token, ``client_ca`` or ``insecure`` is set."""
        if self.insecure or self.tokens or self.client_ca is not None or _is_loopback(host):
            return
        raise ConfigError(
            f"host {host} can be reached from other machines, and there is no token: set RECINFER_TOKEN, give "
            "--token-file or --tls-client-ca, or say --insecure"
        )

    # -- tokens

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that calls may have now; a client of this process sends the first. Empty: no call needs a token."""
        return self._live.tokens

    def allows(self, authorization: str | None) -> bool:
        """Whether a call with this ``authorization`` header may pass."""
        return not self._live.tokens or self._token_of(authorization) is not None

    def admits(self, path: str, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Whether a gRPC call with this path and metadata may pass; health is open to all, for probes."""
        if not self._live.tokens or path.startswith(_OPEN):
            return True
        return self._token_of(_authorization(metadata)) is not None

    def client_identity(self, call: CoreCall) -> str:
        """The client of a call, for the log: the subject of the certificate, else the token's fingerprint, else the address."""
        if subject := call.certificate_subject():
            return subject
        if (token := self._token_of(_authorization(call.invocation_metadata()))) is not None:
            return f"token {sha256(token.encode()).hexdigest()[:8]}"
        return call.peer() or "unknown"

    def _token_of(self, authorization: str | None) -> str | None:
        """The token of a header, if it is one of the server's."""
        given = authorization or ""
        if given[: len(_SCHEME)].lower() != _SCHEME:
            return None
        # Bytes that are no text arrive as lone surrogates, which plain UTF-8 would not take.
        sent = given[len(_SCHEME) :].strip().encode(errors="surrogatepass")
        return next((token for token in self._live.tokens if hmac.compare_digest(sent, token.encode())), None)

    # -- TLS

    @property
    def uses_tls(self) -> bool:
        """Whether the ports speak TLS."""
        return self.tls_cert is not None

    def credentials(self) -> grpc.ServerCredentials | None:
        """gRPC's credentials for a secure port; None without TLS. Raises ConfigError, which names the bad file."""
        if not self.uses_tls:
            return None
        served = self._tls()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """The files for a new connection; None: those of the last one."""
            nonlocal served
            last, served = served, self._tls()
            return None if served is last else served.for_grpc()

        return grpc.dynamic_ssl_server_credentials(
            served.for_grpc(), newer, require_client_authentication=self.client_ca is not None
        )

    def tls_context(self, *, lets_probes_in: bool = False) -> ssl.SSLContext | None:
        """The TLS context of a port, whose new connections use the files as they are then; None without TLS.

        Args:
            lets_probes_in: with ``client_ca``, accept connections without a client certificate; the port then checks the
                certificate where it is needed.

        Raises:
            ConfigError: an unreadable or wrong file.
        """
        if not self.uses_tls:
            return None
        self._tls()

        def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._tls().context

        front = self._context()
        if self.client_ca is not None:
            front.verify_mode = ssl.CERT_OPTIONAL if lets_probes_in else ssl.CERT_REQUIRED
            # A resumed session would be accepted by its old certificate, also after its authority was replaced.
            front.options |= ssl.OP_NO_TICKET
            front.num_tickets = 0
        front.sni_callback = choose
        return front

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_pem(context, self.tls_cert, self.tls_key, self.client_ca)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _tls(self) -> _Tls:
        """The certificates now; reads them when first called."""
        live = self._live
        with live.lock:
            if live.tls is None:
                contents = self._read_tls()
                live.tls = self._made(contents)
                live.tls_files.used = contents
                _warn_of_expiry(live.tls.expires)
            return live.tls

    def _read_tls(self) -> tuple[bytes | None, ...]:
        return tuple(
            None if path is None else read_file(path) for path in (self.tls_cert, self.tls_key, self.client_ca)
        )

    def _made(self, contents: tuple[bytes | None, ...]) -> _Tls:
        context = self._context()
        # ssl reads the files itself: what it has checked must be what gRPC gets.
        if self._read_tls() != contents:
            raise ConfigError(f"TLS: {self.tls_cert} and {self.tls_key} are being written")
        chain, key, authority = contents
        assert chain is not None and key is not None
        return _Tls(context, chain, key, authority, expiry_of(chain))

    # -- rotation

    @property
    def has_files(self) -> bool:
        """Whether there are files that :meth:`look` reads again."""
        return self._follows_token or self.uses_tls

    @property
    def _follows_token(self) -> bool:
        return self.token_file is not None and not is_pipe(self.token_file)

    def look(self) -> None:
        """Read the files again, and use changed and sound ones; the log and :meth:`figures` have the outcome. Any thread."""
        live = self._live
        if self._follows_token:
            path = self.token_file
            assert path is not None
            live.token_file.look(lambda: read_file(path), lambda found: live.use_tokens(_tokens_in(path, found)))
        if live.tls is not None:
            live.tls_files.look(self._read_tls, lambda found: live.use_tls(self._made(found)))

    def figures(self) -> dict[str, Any]:
        """Seconds until the certificate expires (None without TLS), and rereads of files by kind and outcome."""
        live = self._live
        left = None if live.tls is None else live.tls.expires - time.time()
        followed: dict[str, FollowedFiles[Any]] = {"tls": live.tls_files, "token": live.token_file}
        return {"certificate_expiry": left, "rereads": {kind: dict(files.outcomes) for kind, files in followed.items()}}


class _Live:
    """The part of a Security that changes.

    Attributes:
        tokens: the tokens that calls may have.
        tls: the certificates; None before they are needed.
        token_file, tls_files: the files of both.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tokens: tuple[str, ...] = ()
        self.tls: _Tls | None = None
        self.token_file: FollowedFiles[bytes] = FollowedFiles("tokens", _log)
        self.tls_files: FollowedFiles[tuple[bytes | None, ...]] = FollowedFiles("certificates", _log)

    def use_tokens(self, tokens: tuple[str, ...]) -> None:
        self.tokens = tokens

    def use_tls(self, tls: _Tls) -> None:
        with self.lock:
            self.tls = tls
        _warn_of_expiry(tls.expires)


@dataclass(frozen=True)
class _Tls:
    """Certificates that fit together.

    Attributes:
        context: for new connections over ssl; ``chain``, ``key``, ``authority``: PEM files for gRPC.
        expires: seconds since 1970.
    """

    context: ssl.SSLContext
    chain: bytes
    key: bytes
    authority: bytes | None
    expires: float

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        """The files in gRPC's form."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], root_certificates=self.authority)


async def follow_files(security: Security) -> None:
    """Have ``security`` follow its files until the task is cancelled."""
    if not security.has_files:
        return
    while True:
        await asyncio.sleep(_LOOK_S)
        with suppress(RuntimeError):  # the interpreter ends: no thread can be started
            await asyncio.to_thread(security.look)


def _tokens_in(path: File, content: bytes) -> tuple[str, ...]:
    """The one or two tokens in a file; raises ConfigError."""
    tokens = tokens_of(content)
    if not 1 <= len(tokens) <= 2:
        raise ConfigError(f"{path}: got {len(tokens)} lines with a token, expected one, or two while callers change")
    for token in tokens:
        _check_token(token)
    return tokens


def _check_token(token: str) -> None:
    if len(token) < _MIN_TOKEN or not token.isascii():
        raise ConfigError(f"token: got {len(token)} characters, expected ASCII of at least {_MIN_TOKEN}")
    if not fits_a_header(token):  # no caller could send it
        raise ConfigError("token: got several lines, control characters or white space at its ends, expected one line")


def _authorization(metadata: Iterable[tuple[str, Any]]) -> str | None:
    return next((value for key, value in metadata if key == _HEADER), None)


def _warn_of_expiry(expires: float) -> None:
    left = expires - time.time()
    if left <= 0:
        _log.error("the server's certificate expired %.1f days ago; clients refuse it", -left / 86_400)
    elif left < _SOON_S:
        _log.warning("the server's certificate expires in %.1f days", left / 86_400)


def _is_loopback(host: str) -> bool:
    host = plain_host(host)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
