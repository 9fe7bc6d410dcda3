"""Tests a deployment on a Ray cluster of three nodes under constant load while its servers, actors and nodes are
killed.

    python tools/ray_trial.py                  # as root, about eight minutes; needs the extra ray, unshare and ip
    python tools/ray_trial.py --seconds 4

The nodes are three raylets with addresses 127.0.0.1 to 127.0.0.3 in their own network and process namespaces with
loopback only, because Ray listens on every interface. A client calls through gRPC's own name resolution, round robin
and retry, and checks every answer against the version that it names. Servers, actors and Serve's controller are killed, a
node with all it runs, the model configuration chooses another version, the one before, and one that is broken, servers are
added and removed by hand and by load (rankers, then shard servers), and some of it again behind mutual TLS. Prints a line for each part; exits
with 1 when an answer failed or was wrong, or something was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also where recinfer is not installed
sys.path.insert(0, str(ROOT / "tools"))
# For the nodes too: they are started from here. No usage report, and no killing of workers when memory is short.
os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "600")  # a minute is too little on a busy machine
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from ray_cluster import HEAD, MEMORY, NODES, Cluster, listening, wait  # noqa: E402
from ray_load import TLS_NAME, Client  # noqa: E402

from tests.certificates import certified  # noqa: E402

NAME = "trial"


# ---------------------------------------------------------------- the command


def recinfer(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the recinfer command."""
    command = [sys.executable, "-m", "recinfer", *map(str, arguments), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object of a command's last line; raises if it failed."""
    if done.returncode:
        raise RuntimeError(f"{done.args}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _listed(highest: dict[str, float]) -> str:
    """The highest load of each server."""
    return ", ".join(f"{name} {load:.0%}" for name, load in highest.items())


# ---------------------------------------------------------------- the parts


class Trial:
    """Runs the parts of the trial and prints the client's results of each."""

    def __init__(self, folder: Path, store: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self.store, self.options, self.folder, self.stack = store, options, folder, stack
        self.bad = 0
        self.ports: set[int] = set()
        self.shm = set(os.listdir("/dev/shm"))
        self.cluster = Cluster(folder)
        self.client = Client(store, options.callers)
        stack.callback(self.client.process.kill)
        self._over = threading.Event()
        from recinfer.deploy.ray import client, records

        self.ray, self.records, self.namespace = client, records.Records(), records.NAMESPACE
        stack.enter_context(client.connected(HEAD))
        import ray

        wait(lambda: len(ray.nodes()) == NODES, 600, "the nodes of the cluster")
        self.follower = threading.Thread(target=self._follow, daemon=True)
        self.follower.start()
        stack.callback(self._end)

    def _follow(self) -> None:
        """Point the client to the serving rankers, as a registry would."""
        while not self._over.wait(0.3):
            with contextlib.suppress(Exception):  # there is no deployment, or its controller is restarting
                self.client.follow(self.ray.rankers(NAME))
                for server in self.records.servers(NAME):
                    self.ports.update({server.port, server.metrics_port} - {0})

    def _end(self) -> None:
        self._over.set()
        self.follower.join()

    def servers(self, prefix: str = "") -> list[dict[str, Any]]:
        """The servers in the status."""
        return [server for server in self.ray.status(NAME)["servers"] if server["name"].startswith(prefix)]

    def wait_ready(self, seconds: float = 600) -> float:
        """Wait until all wanted servers serve in two consecutive status reports."""

        def is_ready() -> bool:
            with contextlib.suppress(Exception):
                return bool(self.ray.status(NAME)["ready"])
            return False

        return wait(is_ready, seconds, "all servers serve")

    def part(self, title: str, action: Callable[[], str] | None = None) -> None:
        """Run one part: the action, and the client's results from before it to some seconds after it."""
        time.sleep(0.5)
        self.client.report()
        time.sleep(self.options.seconds / 4)
        start = time.monotonic()
        did = action() if action else ""
        spent = time.monotonic() - start
        time.sleep(self.options.seconds)
        found = self.client.report()
        self.bad += found["failed"] + found["wrong"]
        row(
            title,
            f"{spent:.1f}" if action else "-",
            found["answers"],
            found["failed"],
            found["wrong"],
            *(f"{found[key] * 1e3:.0f}" for key in ("p50", "p99", "max")),
            " ".join(f"{version}:{count}" for version, count in sorted(found["versions"].items())),
            did,
        )
        for error in found["errors"]:
            print(f"    {error[:300]}", flush=True)

    def choose(self, versions: str, served: str) -> None:
        """Write the file that rankers follow: ``versions``, each of one digit, and the one that requests go to."""
        made = self.store / "models.new"
        made.write_text(f'[models.{NAME}]\nversions = {list(versions)}\nweights = {{"{served}" = 1}}\n')
        made.rename(self.store / "models.toml")

    def deploy(self, *more: object) -> None:
        """Deploy version 1 with the command."""
        start = time.monotonic()
        self.choose("1", "1")
        archive, config = self.store / NAME / "1", self.store / "models.toml"
        found = said(recinfer("deploy", archive, "--ray", HEAD, "--model-config", config, *more))
        print(f"deployed in {time.monotonic() - start:.1f} s: {len(found['servers'])} servers on {NODES} nodes")
        for server in found["servers"]:
            print(f"    {server['name']:10s} {server['address']}")
        places = Counter((server["host"], server["name"].rpartition("-")[0]) for server in found["servers"])
        assert max(places.values()) == 1, f"two of one kind on a node: {places}"
        wait(lambda: self.client.targets == found["rankers"], 60)
        row("under load", "s", "answers", "failed", "wrong", "p50", "p99", "max ms", "versions", "")

    # The actions of the parts; each returns a remark for its line.

    def kill_server(self) -> str:
        """Send SIGKILL to the process of a shard server."""
        os.kill(self.servers("shard-1")[0]["pid"], signal.SIGKILL)
        time.sleep(1.5)
        return f"served again after {self.wait_ready():.1f} s"

    def kill_actor(self, prefix: str) -> str:
        """Kill an actor's process, as when Ray's worker crashes."""
        import ray

        found = ray.util.list_named_actors(all_namespaces=True)
        name = next(each["name"] for each in found if each["name"].startswith(f"SERVE_REPLICA::{prefix}#"))
        ray.kill(ray.get_actor(name, namespace="serve"), no_restart=False)
        time.sleep(1.5)
        return f"served again after {self.wait_ready():.1f} s"

    def kill_node(self) -> str:
        """Kill the last node with all servers on it."""
        host = f"127.0.0.{NODES}"
        before = [server["name"] for server in self.servers() if server["host"] == host]
        count = self.cluster.kill(host)
        wait(lambda: not self.ray.status(NAME)["ready"], 240, "the loss to be noticed")
        spent = self.wait_ready()
        hosts = {server["name"]: server["host"] for server in self.servers()}
        assert host not in hosts.values(), hosts
        return f"{count} processes, {', '.join(before)}; all served again {spent:.0f} s after it was noticed"

    def kill_controller(self) -> str:
        """Kill Serve's controller, which Ray restarts."""
        import ray

        before = {server["pid"] for server in self.servers()}
        ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"), no_restart=False)
        time.sleep(1.0)
        spent = self.wait_ready()
        assert {server["pid"] for server in self.servers()} == before, "no server was touched"
        return f"ready again after {spent:.1f} s, no server touched"

    def roll(self, version: str) -> str:
        """Have rankers load versions 1 and 2, and send requests to one of them."""
        self.choose("12", version)
        wait(lambda: {ranker["version"] for ranker in self.servers("ranker")} == {version}, 300, f"version {version}")
        return f"serves {self.ray.status(NAME)['version']}"

    def kill_server_of_2(self) -> str:
        """Kill a shard server where the store has version 2 alone, which the deployment did not begin with."""
        gone, hidden = self.store / NAME / "1", self.store / NAME / ".1"
        self.choose("2", "2")
        time.sleep(5.0)  # rankers notice
        gone.rename(hidden)
        did = self.kill_server()
        hidden.rename(gone)
        return did

    def choose_broken(self) -> str:
        """Have rankers load a version whose rows differ from its manifest too; a ranker starts meanwhile."""
        from netns_trial import build

        build(self.folder, self.store / NAME / "3", "3")
        broken = next((self.store / NAME / "3" / "shards").iterdir())
        data = bytearray(broken.read_bytes())
        data[-100] ^= 1
        broken.write_bytes(data)
        self.choose("123", "1")
        did = self.kill_actor(f"{NAME}#ranker")
        assert {ranker["version"] for ranker in self.servers("ranker")} == {"1"}
        target = self.ray.rankers(NAME)[0]
        done = recinfer("admin", "load", "--target", target, "--model", NAME, "--version", "3")
        assert done.returncode == 2, done
        self.choose("12", "1")
        shutil.rmtree(self.store / NAME / "3")
        return f"{did}; {json.loads(done.stdout.splitlines()[-1])['error']['message'][:110]}"

    def scale(self, shards: int, rankers: int) -> str:
        """Set the numbers of servers by the command."""
        found = said(recinfer("deploy", "--ray", HEAD, "--scale", shards, "--scale-rankers", rankers))
        counts = Counter(server["role"] for server in found["servers"])
        wait(lambda: len(self.servers()) == 3 * shards + rankers, 300, "those that drain to end")
        assert counts["shard"] >= 3 * shards, counts
        return f"{len(self.servers())} servers"

    def load_up(self, kind: str) -> str:
        """Many callers: the load needs more servers of a kind; all started ones must serve."""
        before = len(self.servers(kind))
        self.client.say("callers 48")
        highest: dict[str, float] = {}

        def more() -> bool:
            servers = self.servers(kind)
            for server in servers:
                highest[server["name"]] = max(highest.get(server["name"], 0.0), server["load"])
            return len([server for server in servers if server["state"] == "serving"]) > before

        try:
            wait(more, 300, f"more {kind}s")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; highest load of each: {_listed(highest)}") from None
        self.wait_ready()
        return f"{before} to {len(self.servers(kind))}, highest load of each: {_listed(highest)}"

    def load_down(self, kind: str, least: int) -> str:
        """Few callers: fewer servers of that kind."""
        self.client.say("callers 1")
        wait(lambda: len(self.servers(kind)) == least, 300, f"fewer {kind}s")
        self.wait_ready()
        return f"{least} again"

    def certificates(self) -> Path:
        """The folder of an authority, and of a certificate of it that is for a name."""
        folder = self.folder / "tls"
        folder.mkdir()
        return certified(folder, f"DNS:{TLS_NAME}")

    def refuse_missing(self, tls: Path) -> None:
        """The error names a file that no node has, the server and its node, and nothing is left."""
        files = ["--tls-cert", tls / "gone.pem", "--tls-key", tls / "key.pem", "--tls-ca", tls / "ca.pem"]
        done = recinfer("deploy", self.store / NAME / "1", "--ray", HEAD, *files)
        message = json.loads(done.stdout.splitlines()[-1])["error"]["message"]
        assert done.returncode == 2 and "gone.pem" in message and " on 127.0.0." in message, message
        assert self.records.names() == [], "nothing is left"
        print(f"refused: {message[:200]}", flush=True)

    def down(self) -> list[str]:
        """Remove the deployment; returns what is left of it."""
        import ray
        from ray.util.placement_group import placement_group_table

        assert said(recinfer("deploy", "--ray", HEAD, "--down")) == {"removed": NAME}
        time.sleep(1.0)
        mine, left = {os.getpid(), self.client.process.pid}, list[str]()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "recinfer" in command and int(folder.name) not in mine and "ray_trial" not in command:
                    left.append(f"process {folder.name}: {command[:100]}")
        left += [f"actor {each}" for each in ray.util.list_named_actors(all_namespaces=True)]
        groups = placement_group_table().values()
        left += [f"placement group {group['name']}" for group in groups if group["state"] != "REMOVED"]
        left += [f"port {port}" for port in sorted(self.ports) if listening(port)]
        left += [f"/dev/shm/{each}" for each in set(os.listdir("/dev/shm")) - self.shm if "plasma" not in each]
        left += [str(path) for path in Path(tempfile.gettempdir()).glob("recinfer-*")]
        from ray.experimental.internal_kv import _internal_kv_list

        left += [f"key {key}" for key in _internal_kv_list(b"", namespace=self.namespace)]
        free = [ray._private.state.available_resources_per_node()[n["NodeID"]] for n in ray.nodes() if n["Alive"]]
        left += [f"memory is still reserved: {each}" for each in free if each["memory"] != MEMORY]
        print(f"taken down; left behind: {'; '.join(left) or 'nothing'}", flush=True)
        return left


def row(*values: object) -> None:
    """One line of the table."""
    widths = (40, 6, 8, 6, 5, 5, 5, 6, 18, 0)
    print(
        "  ".join(f"{value!s:{'<' if n in (0, 8, 9) else '>'}{w}}" for n, (value, w) in enumerate(zip(values, widths))),
        flush=True,
    )


def trial(folder: Path, options: argparse.Namespace, stack: ExitStack) -> int:
    """Set everything up, run each part, print it."""
    from netns_trial import build

    store = folder / "store"
    for version in ("1", "2"):
        (store / NAME).mkdir(parents=True, exist_ok=True)
        build(folder, store / NAME / version, version)
    run = Trial(folder, store, options, stack)
    left: list[str] = []
    for name, (chapter, more) in CHAPTERS.items():
        if not options.only or name in options.only:
            if name == "tls":
                more = behind_tls(run)
            run.deploy(*more)
            chapter(run)
            left += run.down()
    print(f"failed or wrong: {run.bad}")
    return int(bool(run.bad or left))


def faults(run: Trial) -> None:
    """The parts in which something fails."""
    run.part("nothing wrong")
    run.part("a shard server's process killed", run.kill_server)
    run.part("a shard's actor killed", lambda: run.kill_actor(f"{NAME}#shard-0"))
    run.part("a ranker's actor killed", lambda: run.kill_actor(f"{NAME}#ranker"))
    run.part("Serve's controller killed", run.kill_controller)
    run.part("a node killed", run.kill_node)
    run.cluster.begin(f"127.0.0.{NODES}")


def changes(run: Trial) -> None:
    """The parts with changes by hand."""
    run.part("version 2 rolled out", lambda: run.roll("2"))
    run.part("a ranker's actor killed: starts with 2", lambda: run.kill_actor(f"{NAME}#ranker"))
    run.part("a shard server killed: version 1 is gone", run.kill_server_of_2)
    run.part("rolled back", lambda: run.roll("1"))
    run.part("a broken version chosen, a ranker killed", run.choose_broken)
    # More than nodes: Serve replaces the servers of a kind for which each node then has to take two.
    run.part("scaled up by hand", lambda: run.scale(4, 3))
    run.part("scaled down by hand", lambda: run.scale(1, 1))


def load(run: Trial) -> None:
    """The parts in which load changes the number of rankers."""
    run.part("48 callers: rankers scaled up", lambda: run.load_up("ranker"))
    run.part("1 caller: rankers scaled down", lambda: run.load_down("ranker", 1))


def shard_load(run: Trial) -> None:
    """The parts in which load changes the number of shard servers, by one in each of the three groups."""
    run.part("48 callers: shard servers scaled up", lambda: run.load_up("shard"))
    run.part("1 caller: shard servers scaled down", lambda: run.load_down("shard", 3))
    run.client.say("callers 4")


def behind_tls(run: Trial) -> tuple[object, ...]:
    """The options of a deployment with mutual TLS, once one without a file was refused."""
    tls = run.certificates()
    run.refuse_missing(tls)
    run.client.say(f"tls {tls}")
    files = ("--tls-cert", "cert"), ("--tls-key", "key"), ("--tls-ca", "ca"), ("--tls-client-ca", "ca")
    return (*(word for option, file in files for word in (option, tls / f"{file}.pem")), "--tls-name", TLS_NAME)


def guarded(run: Trial) -> None:
    """The parts with mutual TLS."""
    run.part("mutual TLS: a shard server killed", run.kill_server)
    run.part("mutual TLS: version 2 rolled out", lambda: run.roll("2"))
    run.part("mutual TLS: Serve's controller killed", run.kill_controller)


CHAPTERS: dict[str, tuple[Callable[[Trial], None], tuple[object, ...]]] = {
    "faults": (faults, ()),
    "changes": (changes, ()),
    "load": (load, ("--replicas", 1, "--rankers", 1, "--max-rankers", 3, "--load-percent", 80, "--cool-down", 10)),
    "shards": (
        shard_load,
        ("--replicas", 1, "--max-replicas", 2, "--rankers", 2, "--busy-percent", 25, "--cool-down", 10),
    ),
    "tls": (guarded, ()),
}


def main() -> int:
    """Run the trial; 1 when an answer failed or was wrong, or something was left behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of load after each part's action")
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=list(CHAPTERS), help="of the five deployments")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare") or not importlib.util.find_spec("ray"):
        print("needs root, ip, unshare and the extra ray: pip install 'recinfer[cpu,serve,ray]'", file=sys.stderr)
        return 2
    if not options.inside:
        command = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, __file__]
        return subprocess.run([*command, *sys.argv[1:], "--inside"], check=False).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # A short path: the names of Ray's sockets have 107 characters.
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        os.environ["TMPDIR"] = tempfile.tempdir = name  # of all started processes too: files left in it are ours
        return trial(Path(name), options, stack)


if __name__ == "__main__":
    raise SystemExit(main())
