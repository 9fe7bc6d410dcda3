"""Reading of PEM files, and bearer tokens of clients and servers."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import grpc

from recinfer.errors import ConfigError, InputError

__all__ = [
    "File",
    "authorization",
    "credentials_of",
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
