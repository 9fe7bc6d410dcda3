"""Tokens and certificates of a server and its clients that are rotated while callers send requests, for tests and the trial."""

from __future__ import annotations

import http.client
import itertools
import secrets
import shutil
import ssl
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from tests.certificates import certified
from tests.waiting import until

__all__ = ["Callers", "Files"]


class Files:
    """The files of one server and its clients: an authority for both, a certificate, and a token.

    Args:
        folder: of the files; ``sides``: the two sides, each with its own copy of every file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.server, self.client = folder / "server", folder / "client"
        for side in (self.server, self.client):
            side.mkdir()
        self.generation, self.token = self._new()
        for side in (self.server, self.client):
            self._write(side, [self.generation], [self.token], self.generation)

    def _new(self) -> tuple[Path, str]:
        made = self._folder / str(next(self._numbers))
        made.mkdir()
        return certified(made, "IP:127.0.0.1"), secrets.token_urlsafe(24)

    def _write(self, side: Path, trusted: Sequence[Path], tokens: Sequence[str], holder: Path) -> None:
        """One file after the other, as a careless script does."""
        (side / "ca.pem").write_bytes(b"".join((made / "ca.pem").read_bytes() for made in trusted))
        (side / "token").write_text("".join(f"{token}\n" for token in tokens))
        for name in ("cert.pem", "key.pem"):
            shutil.copy(holder / name, side / name)

    def security(self) -> Security:
        """Of the server: TLS with client certificates, and a token."""
        side = self.server
        return Security(
            tls_cert=side / "cert.pem", tls_key=side / "key.pem", client_ca=side / "ca.pem", token_file=side / "token"
        )

    def arguments(self) -> dict[str, Any]:
        """Of a client."""
        side = self.client
        return {
            "token_file": side / "token",
            "tls_ca": side / "ca.pem",
            "tls_cert": side / "cert.pem",
            "tls_key": side / "key.pem",
        }

    def swap(self, server: Security, clients: Sequence[InferenceClient], seconds: float = 60.0) -> None:
        """Change authority, certificates and token of both sides: both trust the new ones first, use them next, and forget the
        old ones last. Waits after each step until both sides have read the files."""
        old, old_token = self.generation, self.token
        self.generation, self.token = new, new_token = self._new()
        steps: list[tuple[list[Path], list[str], Path]] = [
            ([old, new], [old_token, new_token], old),
            ([old, new], [new_token, old_token], new),
            ([new], [new_token], new),
        ]
        for trusted, tokens, holder in steps:
            for side in (self.server, self.client):
                self._write(side, trusted, tokens, holder)
            until(lambda tokens=tokens: server.tokens == tuple(tokens) and self._is_read(server, clients), seconds)

    def _is_read(self, server: Security, clients: Sequence[InferenceClient]) -> bool:
        tls = server._live.tls
        side = self.server
        read = (side / "cert.pem").read_bytes(), (side / "key.pem").read_bytes(), (side / "ca.pem").read_bytes()
        if tls is None or (tls.chain, tls.key, tls.authority) != read:
            return False
        wanted = {path: path.read_bytes() for path in self.client.iterdir()}
        return all(client._credentials._files.used == wanted for client in clients)


class Callers:
    """Threads that send requests to ``server``, each with its own client; every tenth request over a new connection to HTTP."""

    def __init__(self, server: Server, files: Files, count: int, features: Any) -> None:
        self.counts: Counter[str] = Counter()
        self.clients = [
            InferenceClient(server.target, timeout=60, retries=0, **files.arguments()) for _ in range(count)
        ]
        self._server, self._files, self._features = server, files, features
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._send, args=(client,)) for client in self.clients]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Requests are sent in the block; the callers' first requests are answered when it begins."""
        for thread in self._threads:
            thread.start()
        try:
            until(lambda: self.counts["OK"] >= len(self._threads))
            yield
        finally:
            self._ends.set()
            for thread in self._threads:
                thread.join()
            for client in self.clients:
                client.close()

    def _send(self, client: InferenceClient) -> None:
        for number in itertools.count():
            if self._ends.is_set():
                return
            try:
                if number % 10 == 9 and self._server.http_port is not None:
                    self.ask_http()
                else:
                    client.lookup(self._features)
                outcome = "OK"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            with self._lock:
                self.counts[outcome] += 1

    def ask_http(self) -> None:
        """One request over a new connection, with the client's files; raises an error unless it is answered."""
        side = self._files.client
        status = 0
        while status != 200:
            try:
                context = ssl.create_default_context(cafile=str(side / "ca.pem"))
                context.load_cert_chain(side / "cert.pem", side / "key.pem")
            except ssl.SSLError:  # they are being written
                continue
            token = (side / "token").read_text().split()
            if not token:
                continue
            connection = http.client.HTTPSConnection("127.0.0.1", self._server.http_port, timeout=60, context=context)
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {token[0]}"})
            status = connection.getresponse().status
            connection.close()
            if status != 200:
                raise RuntimeError(f"HTTP status {status}")
