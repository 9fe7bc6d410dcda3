"""Tests network faults between hosts in network namespaces: 3 shard hosts x 2 replicas, 2 rankers, a client, one
bridge.

    python tools/netns_trial.py                  # as root, about two minutes; needs ip and tc
    python tools/netns_trial.py --seconds 8

Each host has its own address behind a veth pair. The load checks every response against a single process. The parts
are: no fault; one replica killed and restarted; one host cut off (its link goes down); one host slowed by 50 ms, with
hedging and without (by tc netem, or by a relay on that host if the kernel lacks it). Prints failed and wrong responses,
p50 and p99 of each part; exits with 1 if a response failed or was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also where recinfer is not installed
os.environ.setdefault("OMP_NUM_THREADS", "1")

PORT, NET = 50051, "10.77.0"
RANKS, REPLICAS, RANKERS = 3, 2, 2
SLOW_MS = 50
ROWS = {"a": 3000, "b": 5000, "c": 5000, "d": 900, "e": 4000}


def build(folder: Path, out: Path | None = None, version: str = "1") -> Path:
    """Build an archive with every sharding type over three ranks, and SUM and MEAN; each version has different
    weights."""
    import torch
    from torch import nn

    from recinfer.checkpoint import CheckpointReader
    from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan
    from recinfer.inference.export import export_archive
    from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    mean = PoolingType.MEAN
    torch.manual_seed(int(version) - 1)
    tables = [
        EmbeddingBagConfig(3000, 16, "t_a", feature_names=["a"]),
        EmbeddingBagConfig(5000, 16, "t_b", feature_names=["b", "c"], pooling=mean),
        EmbeddingBagConfig(900, 24, "t_d", feature_names=["d"], pooling=mean),
        EmbeddingBagConfig(4000, 16, "t_e", feature_names=["e"]),
    ]
    model: nn.Module = EmbeddingBagCollection(tables=tables)
    torch.save(model.state_dict(), folder / "weights.pt")
    cuts = {
        "t_a": ("table_wise", [(0, 0, 3000, 0, 16)]),
        "t_b": ("row_wise", [(0, 0, 1700, 0, 16), (1, 1700, 3400, 0, 16), (2, 3400, 5000, 0, 16)]),
        "t_d": ("column_wise", [(2, 0, 900, 0, 12), (1, 0, 900, 12, 24)]),
        "t_e": (
            "grid_shard",
            [(0, 0, 2000, 0, 8), (1, 2000, 4000, 0, 8), (2, 0, 2000, 8, 16), (0, 2000, 4000, 8, 16)],
        ),
    }
    plans = []
    for config in tables:
        kind, rects = cuts[config.name]
        size = config.num_embeddings, config.embedding_dim
        shards = tuple(ShardRect(*rect) for rect in rects)
        plans.append(TablePlan("", config.name, kind, "quant", DataType.INT8, *size, shards))
    out = out or folder / "trial.rqa"
    reader, plan = CheckpointReader(folder / "weights.pt"), Plan(RANKS, "cpu", tuple(plans))
    export_archive(model, reader, plan, out, name="trial", version=version, progress=False)
    return out


# ---------------------------------------------------------------- the client, in its own namespace


def load_main(archive: str, targets: list[str], callers: int) -> None:
    """Send requests for the number of seconds in each line of stdin; prints one JSON line for each."""
    import grpc.aio
    import torch

    from recinfer.inference.predictor import load
    from recinfer.serving.server.server import SERVICE_NAME
    from recinfer.serving.wire import codec
    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

    here, random = load(archive), torch.Generator().manual_seed(1)
    requests = []
    for batch in (1, 4, 16, 64):
        lengths = torch.randint(0, 5, (len(ROWS), batch), generator=random)
        ids = [torch.randint(0, rows, (int(n.sum()),), generator=random) for rows, n in zip(ROWS.values(), lengths)]
        features = KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths.flatten().int())
        pooled = here.lookup(features).pooled
        assert pooled is not None
        requests.append((codec.encode_lookup_request(features), pooled.values()))

    async def run(seconds: float, channels: list[Any]) -> dict[str, Any]:
        lookups = [channel.unary_unary(f"/{SERVICE_NAME}/Lookup") for channel in channels]
        times: list[float] = []
        failed: list[str] = []
        wrong = 0
        end = time.perf_counter() + seconds

        async def caller(number: int) -> None:
            nonlocal wrong
            turn = number
            while (start := time.perf_counter()) < end:
                turn += 1
                data, expected = requests[turn % len(requests)]
                try:
                    answer = await lookups[turn % len(lookups)](data, timeout=5)
                    got = codec.decode_lookup_response(answer)[0]
                    wrong += got is None or not torch.allclose(got.values(), expected, rtol=1e-5, atol=1e-6)
                except grpc.aio.AioRpcError as error:
                    failed.append(f"{error.code().name}: {error.details()}")
                times.append(time.perf_counter() - start)

        await asyncio.gather(*(caller(number) for number in range(callers)))
        times.sort()
        return {
            "answers": len(times),
            "failed": len(failed),
            "wrong": int(wrong),
            "p50_ms": round(times[len(times) // 2] * 1e3, 2),
            "p99_ms": round(times[int(len(times) * 0.99)] * 1e3, 2),
            "max_ms": round(times[-1] * 1e3, 1),
            "errors": sorted(set(failed))[:3],
        }

    async def serve() -> None:
        channels = [grpc.aio.insecure_channel(target) for target in targets]
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await run(float(line), channels)), flush=True)

    asyncio.run(serve())


# ---------------------------------------------------------------- a slow host where there is no netem


def relay_main(host: str, milliseconds: float, ports: dict[int, int]) -> None:
    """Relay connections from ``ports`` to a server on 127.0.0.1; between SIGUSR1 and SIGUSR2 hold back its
    responses."""
    loop = asyncio.new_event_loop()
    delay = 0.0

    def set_delay(seconds: float) -> None:
        nonlocal delay
        delay = seconds

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slowed: bool) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(delay if slowed else 0.0, writer.write, data)
        loop.call_later(delay, writer.close)

    async def connected(target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", target)
        except OSError:  # the server is not there yet
            return writer.close()
        await asyncio.gather(pump(reader, there, slowed=False), pump(there_reader, writer, slowed=True))

    loop.add_signal_handler(signal.SIGUSR1, set_delay, milliseconds / 1e3)
    loop.add_signal_handler(signal.SIGUSR2, set_delay, 0.0)
    for port, target in ports.items():
        loop.run_until_complete(asyncio.start_server(functools.partial(connected, target), host, port))
    loop.run_forever()


# ---------------------------------------------------------------- the hosts


def ip(*arguments: str, inside: str | None = None) -> None:
    """Run ``ip``, or another network command given by its name, in a namespace."""
    command = list(arguments) if arguments[0] == "tc" else ["ip", *arguments]
    if inside is not None:
        command = ["ip", "netns", "exec", inside, *command]
    subprocess.run(command, check=True, capture_output=True)


class Hosts:
    """Namespaces on one bridge, which is also in a namespace, so that the machine's own network is unaffected."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.names = prefix, []  # type: ignore[var-annotated]
        self.bridge = f"{prefix}br"
        ip("netns", "add", self.bridge)
        ip("link", "add", "br0", "type", "bridge", inside=self.bridge)
        ip("link", "set", "br0", "up", inside=self.bridge)

    def add(self, name: str, address: str) -> None:
        """Add a host with one address."""
        space, port = f"{self.prefix}{name}", f"v{name}"
        ip("netns", "add", space)
        self.names.append(space)
        ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self.bridge)
        ip("link", "set", port, "master", "br0", "up", inside=self.bridge)
        ip("addr", "add", f"{address}/24", "dev", "eth0", inside=space)
        ip("link", "set", "eth0", "up", inside=space)
        ip("link", "set", "lo", "up", inside=space)

    def cut(self, name: str, up: bool) -> None:
        """Take a host's link at the bridge down, or up again, without closing connections."""
        ip("link", "set", f"v{name}", "up" if up else "down", inside=self.bridge)

    def can_slow(self) -> bool:
        """Whether the kernel has netem."""
        inside = ["ip", "netns", "exec", self.bridge, "tc", "qdisc"]
        found = subprocess.run([*inside, "add", "dev", "br0", "root", "netem"], check=False, capture_output=True)
        subprocess.run([*inside, "del", "dev", "br0", "root"], check=False, capture_output=True)
        return not found.returncode

    def slow(self, name: str, milliseconds: int) -> None:
        """Delay a host's packets; 0 ends the delay."""
        if milliseconds:
            ip(
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "netem",
                "delay",
                f"{milliseconds}ms",
                inside=self.prefix + name,
            )
        else:
            ip("tc", "qdisc", "del", "dev", "eth0", "root", inside=self.prefix + name)

    def start(self, name: str, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a process on a host."""
        return subprocess.Popen(["ip", "netns", "exec", self.prefix + name, *command], text=True, cwd=ROOT, **options)

    def remove(self) -> None:
        """Remove all namespaces and processes."""
        for space in [*self.names, self.bridge]:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def main() -> int:
    """Run the trial; returns 1 if a request failed or had a wrong response."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of load per part")
    parser.add_argument("--callers", type=int, default=2)
    parser.add_argument("--relay", help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load_main(options.load[0], options.load[1:], options.callers)
        return 0
    if options.relay:
        relay_main(options.relay, SLOW_MS, {PORT: PORT + 1, PORT + 2: PORT + 2})
        return 0
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        print("needs root, ip and tc", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        return trial(Path(name), options, stack)


def trial(folder: Path, options: argparse.Namespace, stack: ExitStack) -> int:
    """Set everything up, run each part, print it."""
    archive = build(folder)
    hosts = Hosts(f"rt{os.getpid() % 10000}")
    stack.callback(hosts.remove)
    netem = hosts.can_slow()
    running: dict[str, subprocess.Popen[str]] = {}
    stack.callback(lambda: [end(process) for process in running.values()])
    log = stack.enter_context((folder / "log").open("w"))
    serve = [sys.executable, "-m", "recinfer", "serve", str(archive), "--port", str(PORT), "--insecure"]

    def begin(name: str, address: str, *more: str) -> None:
        running[name] = hosts.start(name, *serve, "--host", address, *more, stdout=log, stderr=log)

    addresses = {f"s{rank}{n}": f"{NET}.{10 * (rank + 1) + n}" for rank in range(RANKS) for n in range(REPLICAS)}
    listed = {str(r): [f"{addresses[f's{r}{n}']}:{PORT}" for n in range(REPLICAS)] for r in range(RANKS)}
    shards = folder / "shards.json"

    def settings(**given: Any) -> None:
        document = {"format": "recinfer.shards", "version": 1, "ranks": listed, "settings": given}
        (folder / "new.json").write_text(json.dumps(document))
        (folder / "new.json").replace(shards)

    settings()
    for name, address in addresses.items():
        hosts.add(name, address)
        if name == "s21" and not netem:
            running["relay"] = hosts.start(name, sys.executable, __file__, "--relay", address)
            begin(name, "127.0.0.1", "--ranks", name[1], "--port", str(PORT + 1), "--socket-port", str(PORT + 2))
        else:
            begin(name, address, "--ranks", name[1])
    rankers = [f"{NET}.{100 + n}" for n in range(RANKERS)]
    for number, address in enumerate(rankers):
        hosts.add(f"r{number}", address)
        begin(f"r{number}", address, "--shards", str(shards))
    hosts.add("client", f"{NET}.200")
    targets = [f"{address}:{PORT}" for address in rankers]
    command = [sys.executable, __file__, "--callers", str(options.callers), "--load", str(archive), *targets]
    client = hosts.start("client", *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    running["client"] = client
    assert client.stdout is not None and client.stdout.readline().strip() == "ready"
    for _ in range(60):  # until all shards are there
        if ask(client, 0.5)["failed"] == 0:
            break
        time.sleep(0.5)
    time.sleep(3)
    bad = 0

    def part(title: str, fault: Any = None, undo: Any = None) -> None:
        nonlocal bad
        say(client, options.seconds)
        time.sleep(options.seconds / 4)
        if fault is not None:
            fault()
        result = hear(client)
        if undo is not None:
            undo()
            time.sleep(6)
        bad += result["failed"] + result["wrong"]
        print(f"{title:40s} {json.dumps(result)}", flush=True)

    def slow(on: bool) -> None:
        if netem:
            hosts.slow("s21", SLOW_MS if on else 0)
        else:
            running["relay"].send_signal(signal.SIGUSR1 if on else signal.SIGUSR2)

    how = "netem" if netem else "a relay"
    part("nothing wrong")
    part("one replica killed", lambda: kill(running["s01"]), lambda: begin("s01", addresses["s01"], "--ranks", "0"))
    part("one host cut off", lambda: hosts.cut("s11", up=False), lambda: hosts.cut("s11", up=True))
    part(f"one host {SLOW_MS} ms slow ({how}), hedged", lambda: slow(True), lambda: slow(False))
    settings(hedge=False)
    time.sleep(2)
    part("the same, not hedged", lambda: slow(True), lambda: slow(False))
    print(f"failed or wrong: {bad}")
    return int(bad > 0)


def say(client: subprocess.Popen[str], seconds: float) -> None:
    """Have the client send requests."""
    assert client.stdin is not None
    client.stdin.write(f"{seconds}\n")
    client.stdin.flush()


def hear(client: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the client's report."""
    assert client.stdout is not None
    found: dict[str, Any] = json.loads(client.stdout.readline())
    return found


def ask(client: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Have the client send requests, and read its report."""
    say(client, seconds)
    return hear(client)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process, as on a power failure. ``ip netns exec`` replaces itself by the process."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def end(process: subprocess.Popen[str]) -> None:
    """Stop a process in any state."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
