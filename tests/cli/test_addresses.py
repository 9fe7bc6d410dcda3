"""The addresses that ``recinfer serve`` prints can be copied, also with names that look like markup."""

from __future__ import annotations

import json
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


# Servers in a network namespace of their own, forked from this program, which has imported what takes long.
_REACHED = """
import ctypes, fcntl, json, os, runpy, signal, socket, struct, sys

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
if libc.unshare(NEW_NETWORK):
    if libc.unshare(NEW_USER | NEW_NETWORK):
        sys.exit("no namespaces")
    for name, said in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(said)

with socket.socket() as lo:
    fcntl.ioctl(lo, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))  # SIOCSIFFLAGS: up, and running

def reaches(host, port):
    try:
        socket.create_connection((host, port), timeout=30).close()
    except OSError:
        return False
    return True

def start(arguments):
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writes, 1)
        sys.argv = ["recinfer", *arguments]
        runpy.run_module("recinfer", run_name="__main__", alter_sys=True)
        sys.exit()
    os.close(writes)
    return pid, open(reads)

commands = json.load(sys.stdin)
servers = [start(command) for command in commands]
for (_, said), command in zip(servers, commands):
    said = json.loads(said.readline())
    ports = [said.get(name) for name in ("port", "http_port", "metrics_port")]
    ports += command[command.index("--socket-port") + 1 :][:1] if "--ranks" in command else []
    print(json.dumps([[reaches(host, port) for host in ("127.0.0.1", "::1")] for port in ports if port]), flush=True)
for pid, _ in servers:
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_all_ports_of_all_servers_listen_on_the_same_families(exported: Exported):
    """In a network namespace of its own, where nobody else can connect and no port is taken."""
    one = [exported.archive, "--http-port", "0"]
    two, shard = [*one, "--workers", "2"], [exported.archive, "--ranks", "0", "--socket-port"]
    both, ipv4, ipv6 = [True, True], [True, False], [False, True]
    wanted = [
        (one, "::", [both] * 3),
        ([*shard, "8503"], "[::]", [both] * 3),
        (two, "0.0.0.0", [ipv4] * 3),
        (one, "0.0.0.0", [ipv4] * 3),
        ([*shard, "8504"], "0.0.0.0", [ipv4] * 3),
        (one, "[::1]", [ipv6] * 3),
        (one, "localhost", [ipv4] * 3),
    ]
    more = ["--insecure", "--port", "0", "--metrics-port", "0", "--json"]
    commands = [["serve", *map(str, kind), "--host", host, *more] for kind, host, _ in wanted]
    with Program(_REACHED) as program:
        out, err = program.communicate(json.dumps(commands))
    if "no namespaces" in err:
        pytest.skip("no network namespaces here")
    assert [json.loads(line) for line in out.splitlines()] == [families for _, _, families in wanted], err
    assert program.returncode == 0, err
