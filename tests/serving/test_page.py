"""The status page in a real headless browser: what it shows while requests arrive, and when the server has ended."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.registry import ServedModel
from recinfer.serving.server.server import Server
from tests.serving.conftest import make_request

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")


@contextmanager
def browser(url: str, folder: Path) -> Iterator[str]:
    """Chromium with ``url`` open; yields the address of the page's debugger."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium here (Debian package chromium)")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "--remote-allow-origins=*", url]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 120
            while not (folder / "DevToolsActivePort").exists():
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    pytest.skip(f"chromium does not start here: {log.read().strip().splitlines()[-1:]}")
                time.sleep(0.1)
            port = (folder / "DevToolsActivePort").read_text().split()[0]
            pages: list[dict[str, Any]] = []
            while not pages:
                assert time.monotonic() < end
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=60) as answer:
                    pages = [page for page in json.loads(answer.read()) if page["url"].startswith(url)]
                time.sleep(0.1)
            yield pages[0]["webSocketDebuggerUrl"]
        finally:
            process.kill()
            process.wait()


class Page:
    """The page's text, read through its debugger."""

    def __init__(self, address: str) -> None:
        self._address = address

    def evaluate(self, expression: str) -> Any:
        async def ask() -> Any:
            async with aiohttp.ClientSession() as session, session.ws_connect(self._address) as socket:
                question = {"expression": expression, "returnByValue": True}
                await socket.send_json({"id": 1, "method": "Runtime.evaluate", "params": question})
                return (await socket.receive_json(timeout=60))["result"]["result"].get("value")

        return asyncio.run(ask())

    def text(self, element: str) -> str:
        return str(self.evaluate(f"document.getElementById('{element}').textContent"))

    def until(self, expression: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.2)


def is_above_0(text: str) -> bool:
    """The number, or None: the page shows a dash where it has none."""
    return bool(re.fullmatch(r"[\d.]+", text)) and float(text) > 0


def test_page_shows_requests_and_the_end_of_the_server(predictor: Predictor, tmp_path: Path):
    server = Server([ServedModel.of("tiny", predictor), ServedModel.of("tiny", predictor, "4")], metrics_port=0).start()
    try:
        server.service.registry.set_weights("tiny", {"3": 90, "4": 10})
        with browser(f"http://127.0.0.1:{server.metrics_port}/", tmp_path / "profile") as address:
            page = Page(address)
            page.until("document.getElementById('state')?.textContent === 'live'")
            assert page.text("queue") == "0"
            with InferenceClient(server.target, timeout=60) as client:
                with pytest.raises(InputError):
                    client.lookup({"user": [99]})
                page.until("document.getElementById('errors').textContent === '1'")
                end = time.monotonic() + 120
                both = "['p50', 'rate'].map(id => document.getElementById(id).textContent)"  # from one snapshot
                while not (
                    re.fullmatch(r"[\d.]+ (µs|ms|s)", (shown := page.evaluate(both))[0]) and is_above_0(shown[1])
                ):
                    assert time.monotonic() < end, page.evaluate("document.body.innerText")
                    for seed in range(20):
                        client.predict(*make_request(seed, 3))
            page.until("document.querySelectorAll('#chart path').length >= 2")
            times = page.evaluate("[0.1, 0.5, 0.01, 0.0999, 0.0015, 2e-5, 2].map(seconds)")
            assert times == ["100 ms", "500 ms", "10 ms", "99.9 ms", "1.5 ms", "20 µs", "2.0 s"]
            shown = page.evaluate("document.body.innerText")
            for words in (
                "tiny version 3, 90 % of the requests",
                "tiny version 4, 10 % of the requests",
                "Load per rank",
                "t_item",
                "int8",
                "table_wise",
                "dense part by onnx",
                "decode",
                "INVALID_ARGUMENT",
                "requests waiting",
                "errors since it was loaded",
            ):
                assert words in shown, (words, shown)
            problems = page.evaluate("performance.getEntriesByType('resource').map(r => new URL(r.name).host)")
            assert set(problems) == {f"127.0.0.1:{server.metrics_port}"}  # it requests nothing from other hosts
            server.stop()
            page.until("document.getElementById('state').textContent === 'no answer from the server'")
    finally:
        server.stop()
