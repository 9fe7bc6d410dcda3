"""The choices, options and small parsers that several verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.serving.client import InferenceClient

__all__ = [
    "DataFormat",
    "Device",
    "MissingShards",
    "ModelNameOption",
    "ModelVersionOption",
    "Precision",
    "TargetOption",
    "TimeoutOption",
    "TlsCaOption",
    "TlsCertOption",
    "TlsKeyOption",
    "TokenFileOption",
    "WaitOption",
    "open_client",
    "parse_pair",
    "wait_for",
]


class DataFormat(StrEnum):
    """Formats of raw rows that recinfer.data reads."""

    criteo = "criteo"
    movielens = "movielens"
    synthetic = "synthetic"


class Device(StrEnum):
    """Where shards live and lookups run."""

    cpu = "cpu"
    cuda = "cuda"


class MissingShards(StrEnum):
    """What a ranker does, or may do, without a rank."""

    error = "error"
    default_rows = "default-rows"

    @property
    def in_manifest(self) -> Literal["reject", "default_rows"]:
        """What an archive's manifest says to allow it."""
        return "default_rows" if self is MissingShards.default_rows else "reject"


class Precision(StrEnum):
    """Element types that tables are stored in."""

    int8 = "int8"
    int4 = "int4"
    int2 = "int2"
    fp16 = "fp16"
    fp32 = "fp32"


TargetOption = Annotated[str, typer.Option("--target", metavar="HOST:PORT", help="A running `recinfer serve`.")]
ModelNameOption = Annotated[str, typer.Option("--model", help="Served model; empty is the server's default.")]
ModelVersionOption = Annotated[str, typer.Option("--version", help="Its version; empty is the default one.")]
TimeoutOption = Annotated[float, typer.Option(min=0.001, help="Seconds to wait for each answer.")]

TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the server's bearer token; else RECINFER_TOKEN.", show_default=False),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option("--tls-ca", help="PEM file of the authority of the server's certificate.", show_default=False),
]
TlsCertOption = Annotated[
    Path | None, typer.Option("--tls-cert", help="PEM file of your certificate (mutual TLS).", show_default=False)
]
TlsKeyOption = Annotated[Path | None, typer.Option("--tls-key", help="PEM file of its key.", show_default=False)]

WaitOption = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the server to come up first.")]


def open_client(
    target: str,
    *,
    model: str,
    version: str,
    timeout: float,
    token_file: Path | None,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> InferenceClient:
    """A client as a verb's options say; raises ConfigError naming a file that cannot be read, InputError."""
    from recinfer import env
    from recinfer.serving.client import InferenceClient
    from recinfer.serving.security import read_token

    for path in (tls_ca, tls_cert, tls_key):
        if path is not None and not path.is_file():
            raise ConfigError(f"cannot read {path}: no such file")
    token = (env.token() or "") if token_file is None else read_token(token_file)
    return InferenceClient(
        target,
        model=model,
        version=version,
        timeout=timeout,
        token=token,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )


def wait_for(client: InferenceClient, seconds: float) -> None:
    """Return when the server takes requests; at once with ``seconds`` 0. Raises UnavailableError after them."""
    if seconds:
        client.wait_until_ready(seconds)


def parse_pair(text: str, option: str, expected: str, *, allow_empty: bool = False) -> tuple[str, str]:
    """``NAME=VALUE`` in two; raises ConfigError naming the option."""
    name, equals, value = text.partition("=")
    if not (name and equals and (value or allow_empty)):
        raise ConfigError(f"{option} {text!r}: expected {expected}")
    return name, value
