"""Certificates made by the openssl command, for tests and trials of TLS."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["certified", "need_openssl", "self_signed"]

_NEW = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "90"]


def need_openssl() -> None:
    """Skips the test where the command is missing."""
    import pytest  # here: trials use the rest without it

    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")


def self_signed(folder: Path, names: Sequence[str], valid_for: str) -> Path:
    """NAME.pem and NAME.key in ``folder``, each its own authority; ``valid_for`` is as "DNS:name" or "IP:address"."""
    for name in names:
        _make(folder, name, f"{name}.key", f"{name}.pem", "-addext", f"subjectAltName={valid_for}")
    return folder


def certified(folder: Path, valid_for: str) -> Path:
    """An authority, ca.pem, its certificate cert.pem with key.pem, and another authority, other.pem, in ``folder``."""
    self_signed(folder, ("ca", "other"), "DNS:authority.example")
    by = ("-CA", "ca.pem", "-CAkey", "ca.key")
    _make(folder, "holder", "key.pem", "cert.pem", *by, "-addext", f"subjectAltName={valid_for}")
    return folder


def _make(folder: Path, name: str, key: str, certificate: str, *more: str) -> None:
    command = [*_NEW, "-subj", f"/CN={name}", "-keyout", key, "-out", certificate, *more]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
