"""When the certificates of a PEM file expire, read from their DER form, since Python's ssl has no function for that."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime

from recinfer.errors import ConfigError

__all__ = ["expiry_of"]

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
