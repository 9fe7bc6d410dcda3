"""Authentication and encryption of a server: TLS from files, a bearer token, and loopback by default."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
import grpc.aio

from recinfer.errors import ConfigError
from recinfer.serving.server.ending import Ending
from recinfer.serving.server.grpc_call import CoreCall
from recinfer.serving.wire.address import plain_host
from recinfer.serving.wire.tls import File, fits_a_header, load_pem, read_file

__all__ = ["NO_TOKEN", "Security"]

NO_TOKEN = Ending("UNAUTHENTICATED", "this server needs a token: send 'authorization: Bearer <token>'")
"""The ending of a call without the token."""

_HEADER, _SCHEME = "authorization", "bearer "
_MIN_TOKEN = 16
_OPEN = ("/grpc.health.v1.Health/",)


@dataclass(frozen=True)
class Security:
    """The protection of a server: token, TLS, and the hosts on which it may listen.

    Attributes:
        token: every call except health needs ``authorization: Bearer <token>``; None: no call needs a token.
        tls_cert, tls_key: PEM files of the server's certificate chain and key; both or neither.
        client_ca: PEM file of the authority whose certificates clients must show (mutual TLS); needs tls_cert.
        insecure: listen beyond this machine also without a token.
    """

    token: str | None = field(default=None, repr=False)
    tls_cert: File | None = None
    tls_key: File | None = None
    client_ca: File | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS: got one of certificate and key, expected both or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ConfigError("TLS: got a client authority without a server certificate; mutual TLS needs both")
        if self.token is not None and (len(self.token) < _MIN_TOKEN or not self.token.isascii()):
            raise ConfigError(f"token: got {len(self.token)} characters, expected ASCII of at least {_MIN_TOKEN}")
        if self.token is not None and not fits_a_header(self.token):  # no caller could send it
            raise ConfigError(
                "token: got several lines, control characters or white space at its ends, expected one line"
            )

    def check_host(self, host: str) -> None:
        """Raise ConfigError if ``host`` is not loopback and no token, ``client_ca`` or ``insecure`` is set."""
        if self.insecure or self.token is not None or self.client_ca is not None or _is_loopback(host):
            return
        raise ConfigError(
            f"host {host} can be reached from other machines, and there is no token: set RECINFER_TOKEN, give "
            "--token-file or --tls-client-ca, or say --insecure"
        )

    def credentials(self) -> grpc.ServerCredentials | None:
        """gRPC's credentials for a secure port; None without TLS. Raises ConfigError, which names an unreadable or wrong
        file."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        self.tls_context()  # gRPC would report a wrong file as a port that cannot be bound
        key, chain = read_file(self.tls_key), read_file(self.tls_cert)
        authority = None if self.client_ca is None else read_file(self.client_ca)
        return grpc.ssl_server_credentials(
            [(key, chain)], root_certificates=authority, require_client_auth=authority is not None
        )

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context for the HTTP port; None without TLS. Raises ConfigError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_pem(context, self.tls_cert, self.tls_key, self.client_ca)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def allows(self, authorization: str | None) -> bool:
        """Whether a call with this ``authorization`` header may pass."""
        if self.token is None:
            return True
        given = authorization or ""
        if given[: len(_SCHEME)].lower() != _SCHEME:
            return False
        # Bytes that are no text arrive as lone surrogates, which plain UTF-8 would not take.
        return hmac.compare_digest(given[len(_SCHEME) :].strip().encode(errors="surrogatepass"), self.token.encode())

    def admits(self, path: str, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Whether a gRPC call with this path and metadata may pass; health is open to all, for probes."""
        if self.token is None or path.startswith(_OPEN):
            return True
        return self.allows(next((value for key, value in metadata if key == _HEADER), None))

    def client_identity(self, call: CoreCall) -> str:
        """The client of a call, for the log: the subject of the certificate, else the token's fingerprint, else the address."""
        if subject := call.certificate_subject():
            return subject
        if self.token is not None:
            return f"token {sha256(self.token.encode()).hexdigest()[:8]}"
        return call.peer() or "unknown"


def _is_loopback(host: str) -> bool:
    host = plain_host(host)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
