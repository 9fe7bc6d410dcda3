"""The addresses that ``recinfer serve`` prints can be copied, also with names that look like markup."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import urllib.request
from pathlib import Path

import pytest

from tests.certificates import certified, need_openssl
from tests.cli.conftest import Exported
from tests.warm import RECINFER, Program, warm_workers


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_said_of_the_ports_can_be_copied(exported: Exported, tmp_path: Path, workers: int) -> None:
    need_openssl()
    shutil.copytree(exported.archive, tmp_path / "store" / "tiny[red]" / "1")
    (tmp_path / "tls").mkdir()
    tls = certified(tmp_path / "tls", "IP:::1")
    arguments = ["--model-store", tmp_path / "store", "--host", "::1", "--port", 0, "--workers", workers]
    arguments += ["--http-port", 0, "--metrics-port", 0, "--tls-cert", tls / "cert.pem", "--tls-key", tls / "key.pem"]
    with Program(warm_workers() if workers > 1 else RECINFER, "serve", *arguments) as process:
        said = [process.stdout.readline() for _ in range(4)]
        assert said[0].startswith("serving tiny[red] 1") and " on [::1]:" in said[0]
        assert said[3] == "the dense part of tiny[red] 1 runs on onnxruntime\n"
        context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
        http, page = said[1].split()[-1], said[2].split()[-1]
        for url, words in ((f"https://{http}/v2/models/tiny%5Bred%5D", '"tiny[red]"'), (page, "<html")):
            with urllib.request.urlopen(url, context=context, timeout=60) as answer:
                assert words in answer.read().decode(), url
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert out == "" and err.count("serving") == 0 and err.count("stopped") == 1, (out, err)
