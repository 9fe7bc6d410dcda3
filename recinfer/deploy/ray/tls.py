"""TLS settings of a deployment: files on every node, and the credentials of its own clients (rankers, replicas)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from recinfer.errors import ConfigError
from recinfer.serving.wire.tls import load_pem

__all__ = ["Tls", "missing_files"]


@dataclass(frozen=True)
class Tls:
    """PEM files, each at the same absolute path on every node; a node may have its own certificate and key there.

    Attributes:
        cert, key: certificate chain and key of every server. With ``client_ca``, rankers present it to shard servers
        and replicas present it to their servers, so it must be valid for server and client use.
        ca: the certificate authority of these certificates, which rankers and replicas verify servers with.
        client_ca: the certificate authority of client certificates (mutual TLS); None if clients need none.
        name: host name in the servers' certificates, if it differs from the node's address.
    """

    cert: str
    key: str
    ca: str
    client_ca: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for path in self.files:
            if not Path(path).is_absolute():
                raise ConfigError(f"TLS: got {path!r}, expected an absolute path that exists on every node")

    @property
    def files(self) -> list[str]:
        """All files, each once."""
        return list(dict.fromkeys(filter(None, (self.cert, self.key, self.ca, self.client_ca))))

    @property
    def shown(self) -> tuple[str, str] | None:
        """Certificate and key that a client presents; None if servers do not ask for one."""
        return None if self.client_ca is None else (self.cert, self.key)

    def arguments(self) -> list[str]:
        """Arguments of ``recinfer serve``."""
        arguments = ["--tls-cert", self.cert, "--tls-key", self.key]
        return arguments if self.client_ca is None else [*arguments, "--tls-client-ca", self.client_ca]

    def settings(self) -> dict[str, str]:
        """Settings of shards.json: see recinfer.serving.shards.config.ShardsSettings."""
        cert, key = self.shown or (None, None)
        values = {"tls_ca": self.ca, "tls_cert": cert, "tls_key": key, "tls_name": self.name}
        return {name: value for name, value in values.items() if value is not None}

    def context(self) -> ssl.SSLContext:
        """SSL context of an HTTP connection to a server's metrics. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts no authority but the one below
        cert, key = self.shown or (None, None)
        load_pem(context, cert, key, self.ca)
        return context

    @classmethod
    def of(
        cls,
        cert: Path | None,
        key: Path | None,
        client_ca: Path | None,
        ca: Path | None,
        name: str | None,
    ) -> Tls | None:
        """The TLS settings of command-line options; None for no TLS. Paths become absolute; links are not followed.
        Raises ConfigError."""
        given = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
        lacking = [option for option, path in given.items() if path is None]
        if len(lacking) == len(given) and client_ca is None and name is None:
            return None
        if cert is None or key is None or ca is None:
            raise ConfigError(
                f"TLS: {' and '.join(lacking)} missing; expected the servers' --tls-cert and --tls-key, and --tls-ca, "
                "the certificate authority that rankers and replicas verify them with"
            )
        paths = {"cert": cert, "key": key, "ca": ca, "client_ca": client_ca}
        return cls(**{k: None if path is None else str(path.absolute()) for k, path in paths.items()}, name=name)  # type: ignore[arg-type]


def missing_files(paths: list[str]) -> list[str]:
    """The ``paths`` that are not readable files on this machine."""
    missing = []
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except OSError:
            missing.append(path)
    return missing
