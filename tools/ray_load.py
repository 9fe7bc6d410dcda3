"""The client of tools/ray_trial.py, in a separate process: sends requests to rankers and checks every response.

It uses gRPC's own name resolution, round robin and retries; every response must match the version that it names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where recinfer is not installed

__all__ = ["TLS_NAME", "Client"]

TLS_NAME = "trial.example"


def load_main(store: str, callers: int) -> None:
    """Send requests continuously. Commands on stdin: ``targets A,B``, ``callers N``, ``tls FOLDER`` (of the calls from
    the next targets on; ``-``: none) and ``report``, which prints one JSON line."""
    import grpc.aio
    import torch
    from netns_trial import ROWS

    from recinfer.inference.predictor import load
    from recinfer.serving.server.server import SERVICE_NAME
    from recinfer.serving.wire import codec
    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

    versions = {path.name: load(path) for path in Path(store, "trial").iterdir() if path.name in "12"}
    random, requests = torch.Generator().manual_seed(1), []
    for batch in (1, 4, 16):
        lengths = torch.randint(0, 5, (len(ROWS), batch), generator=random)
        ids = [torch.randint(0, rows, (int(n.sum()),), generator=random) for rows, n in zip(ROWS.values(), lengths)]
        features = KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths.flatten().int())
        expected = {name: here.lookup(features).pooled for name, here in versions.items()}
        requests.append((codec.encode_lookup_request(features), {k: v.values() for k, v in expected.items() if v}))
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "0.05s",
        "maxBackoff": "0.5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [{"name": [{"service": SERVICE_NAME}], "retryPolicy": policy}],
    }
    options = [("grpc.service_config", json.dumps(config)), ("grpc.enable_http_proxy", 0)]

    state = Seen(wanted=callers)

    async def caller(number: int) -> None:
        turn = number
        while number < state.wanted:
            if state.lookup is None:
                await asyncio.sleep(0.1)
                continue
            turn += 1
            data, expected = requests[turn % len(requests)]
            start = time.perf_counter()
            try:
                got = codec.decode_lookup_response(await state.lookup(data, timeout=10))
                state.seen[got[2]] += 1
                right = got[0] is not None and torch.allclose(got[0].values(), expected[got[2]], rtol=1e-5, atol=1e-6)
                state.wrong += not right
            except grpc.aio.AioRpcError as error:
                state.failed.append(f"{error.code().name}: {error.details()}")
            state.times.append(time.perf_counter() - start)

    async def close_later(channel: Any) -> None:
        await asyncio.sleep(11)  # longer than any call
        await channel.close()

    async def serve() -> None:
        channel: Any = None
        tasks = [asyncio.create_task(caller(number)) for number in range(callers)]
        print("ready", flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).split():
            if line[0] == "targets":
                old, target = channel, f"ipv4:{line[1]}"
                if state.tls is None:
                    channel = grpc.aio.insecure_channel(target, options=options)
                else:
                    named = [*options, ("grpc.ssl_target_name_override", TLS_NAME)]
                    channel = grpc.aio.secure_channel(target, state.tls, options=named)
                state.lookup = channel.unary_unary(f"/{SERVICE_NAME}/Lookup")
                if old is not None:
                    tasks.append(asyncio.create_task(close_later(old)))
            elif line[0] == "tls":
                files = [Path(line[1], name) for name in ("ca.pem", "key.pem", "cert.pem")]
                state.tls = None if line[1] == "-" else grpc.ssl_channel_credentials(*(f.read_bytes() for f in files))
            elif line[0] == "callers":
                before, state.wanted = state.wanted, int(line[1])
                tasks += [asyncio.create_task(caller(number)) for number in range(before, state.wanted)]
            else:
                times, state.times = sorted(state.times), []
                found = {"answers": len(times), "failed": len(state.failed), "wrong": state.wrong}
                found |= {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)], "max": times[-1]}
                found |= {"versions": dict(state.seen), "errors": sorted(set(state.failed))[:3]}
                state.failed, state.wrong, state.seen = [], 0, Counter()
                print(json.dumps(found), flush=True)

    asyncio.run(serve())


@dataclass
class Seen:
    """The client's settings, and its counts since the last report."""

    wanted: int
    lookup: Any = None
    tls: Any = None
    times: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    seen: Counter[str] = field(default_factory=Counter)


class Client:
    """Runs the client process."""

    def __init__(self, store: Path, callers: int) -> None:
        command = [sys.executable, __file__, str(store), str(callers)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline().strip() == "ready"
        self.targets: list[str] = []

    def say(self, line: str) -> None:
        """Send one command."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def report(self) -> dict[str, Any]:
        """The results since the last report."""
        self.say("report")
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def follow(self, targets: list[str]) -> None:
        """Send requests to these targets from now on."""
        if targets and targets != self.targets:
            self.targets = targets
            self.say(f"targets {','.join(targets)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store")
    parser.add_argument("callers", type=int)
    options = parser.parse_args()
    load_main(options.store, options.callers)
