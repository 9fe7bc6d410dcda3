"""Reading of PEM files, the expiry of their certificates, and bearer tokens of clients and servers."""

from __future__ import annotations

import base64
import os
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

import grpc

from recinfer.errors import ConfigError, InputError

__all__ = [
    "File",
    "authorization",
    "credentials_of",
    "expiry_of",
    "fits_a_header",
    "load_pem",
    "read_file",
    "read_token",
    "tokens_of",
]

File = str | os.PathLike[str]
"""Path of a PEM or token file."""


def read_token(path: File) -> str:
    """The token in a file, of several lines the first; empty for an empty file. Raises ConfigError."""
    return next(iter(tokens_of(read_file(path))), "")


def tokens_of(content: bytes) -> tuple[str, ...]:
    """The tokens in a file's content, one per line, without white space around them."""
    lines = content.decode("ascii", "replace").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def load_pem(context: ssl.SSLContext, cert: File | None, key: File | None, authority: File | None) -> None:
    """Put PEM files into ``context``: a certificate chain with its key, and the trusted authority; None leaves a file out.

    Raises:
        ConfigError: a file that cannot be read or holds something else, a key of another certificate or with a passphrase.
    """
    for path in (cert, key, authority):
        if path is not None:
            read_file(path)  # ssl's error would not name the file
    try:
        if cert is not None:
            context.load_cert_chain(
                cert, key, password=""
            )  # without a password ssl prompts for a passphrase on the terminal
    except OSError as error:  # ssl's own errors are among them
        raise ConfigError(
            f"TLS: {cert} and {key} are no certificate with its key, PEM without a passphrase ({error})"
        ) from None
    try:
        if authority is not None:
            context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(f"TLS: {authority} holds no certificate of an authority, PEM ({error})") from None


def credentials_of(ca: File | None, cert: File | None, key: File | None) -> grpc.ChannelCredentials | None:
    """A channel's credentials from PEM files, as InferenceClient takes them; None without TLS. Raises InputError."""
    if (cert is None) != (key is None):
        raise InputError("TLS: got one of certificate and key, expected both or neither")
    if ca is None:
        if cert is not None:
            raise InputError("TLS: got a certificate without tls_ca, expected the server's authority too")
        return None
    try:
        # With a wrong file, gRPC would report that the server does not answer.
        load_pem(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cert, key, ca)
    except ConfigError as error:
        raise InputError(str(error)) from None
    return grpc.ssl_channel_credentials(
        *(None if path is None else Path(path).read_bytes() for path in (ca, key, cert))
    )


def authorization(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with ``token``, without the white space around the token; no metadata for an empty token.

    Raises:
        InputError: a token that no header can hold.
    """
    plain = token.strip()
    if not fits_a_header(plain):
        raise InputError(
            f"token: got {len(plain)} characters, some no printable ASCII; expected the server's token alone"
        )
    return (("authorization", f"Bearer {plain}"),) if plain else ()


def fits_a_header(text: str) -> bool:
    """Whether a header can hold ``text`` as it is."""
    return text.isascii() and text.isprintable() and text == text.strip()


def read_file(path: File) -> bytes:
    """The bytes of a PEM or token file; raises ConfigError if the file cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


_BLOCK = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)-----END ", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_LONG_FORM = 0x80
_BEFORE_VALIDITY = 3  # serial number, algorithm and issuer


def expiry_of(pem: bytes) -> float:
    """Seconds since 1970 at which the first certificate of a PEM file expires.

    Raises:
        ConfigError: the file holds no certificate that can be read.
    """
    try:
        return min(_expiry(base64.b64decode(block)) for block in _BLOCK.findall(pem))
    except (ValueError, IndexError):
        raise ConfigError("TLS: the file holds no certificate whose validity can be read, expected PEM") from None


def _expiry(der: bytes) -> float:
    """The end of a certificate's validity (RFC 5280, 4.1)."""
    signed, _ = _content(der, 0, _SEQUENCE)
    at, _ = _content(der, signed, _SEQUENCE)
    if der[at] == _VERSION:
        at = _end(der, at)
    for _ in range(_BEFORE_VALIDITY):
        at = _end(der, at)
    begin, _ = _content(der, at, _SEQUENCE)
    last = _end(der, begin)
    kind = der[last]
    start, end = _content(der, last, kind)
    text = der[start:end].decode("ascii")
    if kind == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("not a time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _content(der: bytes, at: int, tag: int) -> tuple[int, int]:
    """Begin and end of the content of the element at ``at``."""
    if der[at] != tag:
        raise ValueError("another element")
    length, begin = der[at + 1], at + 2
    if length >= _LONG_FORM:
        count = length - _LONG_FORM
        length, begin = int.from_bytes(der[begin : begin + count], "big"), begin + count
    return begin, begin + length


def _end(der: bytes, at: int) -> int:
    return _content(der, at, der[at])[1]
