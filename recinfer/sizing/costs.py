"""What a call costs around the lookup, as data: measured by ``recinfer calibrate --serving``, used by the simulation."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recinfer.errors import ConfigError, NotFoundError
from recinfer.sizing.clock import COLD_S, Points

__all__ = ["FORMAT", "READ", "TAKEN", "DirectCosts", "EndCosts", "FanCosts", "RunCosts", "ServingCosts"]

FORMAT = "recinfer.serving/4"
READ = 1 / 2  # of what gRPC's own threads do for a call: on its way; the rest is beside it
TAKEN = 2 / 3  # of what the thread that takes gRPC's events does for a call: before the answer; the rest is after it
_EARLIER = ("recinfer.serving/1", "recinfer.serving/2", "recinfer.serving/3")


@dataclass(frozen=True)
class EndCosts:
    """CPU of one end of a call, apart from what is run for it, by the threads of the process that do it: the event loop's, the
    one that takes gRPC's events (0 where there is none), and one that stands for gRPC's own, which read what comes.

    Attributes:
        loop_s, grpc_s, io_s: seconds a call of either thread when calls come one behind another.
        loop_cold_s, grpc_cold_s, io_cold_s: seconds more when the thread had been asleep for a moment.
        loop_byte_s, grpc_byte_s, io_byte_s: seconds more a byte of request and answer.
        loop_cooling, grpc_cooling, io_cooling: seconds more for each second that the thread had been asleep, up to 20 ms; of files
            of before 2026-11-22.
        loop_cooled, grpc_cooled, io_cooled: in their place (seconds asleep, seconds more), ascending; the last holds beyond.
    """

    loop_s: float
    grpc_s: float
    io_s: float
    loop_cold_s: float
    grpc_cold_s: float
    io_cold_s: float
    loop_byte_s: float
    grpc_byte_s: float
    io_byte_s: float
    loop_cooling: float = 0.0
    grpc_cooling: float = 0.0
    io_cooling: float = 0.0
    loop_cooled: Points = ()
    grpc_cooled: Points = ()
    io_cooled: Points = ()

    def cooled(self, thread: str) -> Points:
        """What the sleep of its ``"loop"``, ``"grpc"`` or ``"io"`` costs beyond the cold seconds."""
        points: Points = getattr(self, f"{thread}_cooled")
        cooling: float = getattr(self, f"{thread}_cooling")
        return points or (((COLD_S, COLD_S * cooling),) if cooling else ())


@dataclass(frozen=True)
class RunCosts:
    """CPU of a run of the server beyond the lookup op and the dense program: decoding, checks, encoding.

    Attributes:
        base_s: seconds a run.
        request_s: seconds for each request of it.
        byte_s: seconds a byte of requests and answers.
    """

    base_s: float
    request_s: float
    byte_s: float


@dataclass(frozen=True)
class FanCosts:
    """CPU of a ranker for asking shards, apart from the calls' own ends.

    Attributes:
        run_s: seconds a run.
        call_s: seconds for each shard that it asks.
        byte_s: seconds a byte of the vectors that come back.
        away_s: of a small request that passes by queue and event loop, in place of a run's and ``run_s``: before it asks.
        ask_s, told_s: of such a request, for each shard that it asks: on the thread that took the request, and on the one that
            hears of the answer.
        back_s: of such a request, on the latter, once all have answered.
        request_s: of each request of a run, more than where the run asks nobody.
        heard_s: of a run that goes by the loop, for each shard that it asks, on the latter thread too.
        io_s: of threads of gRPC's own, for each answer; 0: they have nothing to do with it; None: as for the answers that callers get.
        asks_cold_s, asks_cooled: of the thread that hears of answers, as in EndCosts; None: as the thread that takes requests has them.
        grpc_cooled, loop_cooled, io_cooled: of a ranker's other two threads of Python, and of gRPC's own, which others wake there to
            send; empty: as a server has them that asks nobody.
    """

    run_s: float
    call_s: float
    byte_s: float
    away_s: float
    ask_s: float
    told_s: float
    back_s: float
    request_s: float = 0.0
    asks_cold_s: float | None = None
    asks_cooled: Points = ()
    grpc_cooled: Points = ()
    loop_cooled: Points = ()
    heard_s: float = 0.0
    io_s: float | None = None
    io_cooled: Points = ()


@dataclass(frozen=True)
class DirectCosts:
    """Of a small request that a server answers past its queue, on the thread that takes gRPC's events.

    Attributes:
        server: its end of the call; shard servers have it too.
        client: the caller's end: less of the machine's caches is in use by the server than where there are runs.
        run: what is run for it.
        saved_s: of the lookup op, which it does without.
    """

    server: EndCosts
    client: EndCosts
    run: RunCosts
    saved_s: float = 0.0


@dataclass(frozen=True)
class ServingCosts:
    """Measured costs of one machine.

    Attributes:
        server, client: the two ends of a call.
        run: of what a server runs for its calls.
        shard: of what a shard server runs for them.
        fan: of what a ranker does to ask shards.
        wire_s: seconds that a lone call takes beyond the CPU on its way, there and back, over loopback.
        spread: a lone call's seconds over their mean: the means of equal parts of many calls, ascending.
        stalls_per_s: how often a core stood still for a moment, or was slow for a while, a second.
        stall_s: for how long: the seconds of each time that it was seen.
        stall_lost: which share of its work a core did not do, each of these times.
        stints_per_s: how often another program, or the kernel, wanted a core, a second and core; 0 where nobody could see that.
        stint_s: for how long: seconds of each time, or means of equal parts of them, ascending.
        paces: seconds that the recorder's small work took while each kind of server was measured: the speed of the machine that its
            costs are of. Empty: unknown, as of files of before 2026-11-23.
        notes: machine and versions, for people.
        direct: of small requests of servers that hold all tables; None: they go through the queue like all others.
        wakes: (seconds asleep, seconds from when a thread is woken until it runs on a core that is free), ascending; what is
            shorter or longer is as the first or the last. Empty: that is in ``wire_s``.
        shard_end: a shard's end of a call; None: as that of small requests of servers that hold all tables.
        caller_s: of the caller's loop, for each request that it sends at a time of its own: a timer and a task.
    """

    server: EndCosts
    client: EndCosts
    run: RunCosts
    shard: RunCosts
    fan: FanCosts
    wire_s: float
    spread: tuple[float, ...]
    stalls_per_s: float
    stall_s: tuple[float, ...]
    stall_lost: tuple[float, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)
    direct: DirectCosts | None = None
    stints_per_s: float = 0.0
    stint_s: tuple[float, ...] = ()
    paces: dict[str, float] = field(default_factory=dict)
    wakes: Points = ()
    shard_end: EndCosts | None = None
    caller_s: float = 0.0

    def __post_init__(self) -> None:
        figures: dict[str, Any] = {
            name: getattr(self, name) for name in ("wire_s", "stalls_per_s", "stints_per_s", "caller_s")
        }
        figures |= {f"paces.{name}": pace for name, pace in self.paces.items()}
        cooled: dict[str, Points] = {"wakes": self.wakes}
        kinds: dict[str, Any] = {name: getattr(self, name) for name in ("server", "client", "run", "shard", "fan")}
        if self.direct is not None:
            kinds |= {f"direct.{name}": getattr(self.direct, name) for name in ("server", "client", "run")}
            figures["direct.saved_s"] = self.direct.saved_s
        if self.shard_end is not None:
            kinds["shard_end"] = self.shard_end
        for name, kind in kinds.items():
            for field_ in dataclasses.fields(kind):
                into = cooled if field_.name.endswith("cooled") else figures
                into[f"{name}.{field_.name}"] = getattr(kind, field_.name)  # type: ignore[index]
        for name in ("asks_cold_s", "io_s"):
            if getattr(self.fan, name) is None:
                del figures[f"fan.{name}"]
        for name, points in cooled.items():
            flat = [number for point in points for number in point]
            if any(not 0 <= number < math.inf for number in flat) or any(
                not (a < c and b <= d) for (a, b), (c, d) in zip(((0.0, 0.0), *points), points)
            ):
                raise ConfigError(
                    f"serving costs: {name}: expected ascending pairs of seconds, above 0 the first of each"
                )
        for name, value in figures.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"serving costs: {name} is {value!r}; expected seconds, 0 or more")
        if len(self.spread) < 2 or any(not 0 < a <= b < math.inf for a, b in zip(self.spread, self.spread[1:])):
            raise ConfigError("serving costs: spread: expected at least two ascending figures above 0")
        if any(not 0 <= s < math.inf for s in self.stall_s) or (self.stalls_per_s and not self.stall_s):
            raise ConfigError("serving costs: stall_s: expected the seconds of each stall")
        if any(not 0 <= s < math.inf for s in self.stint_s) or (self.stints_per_s and not self.stint_s):
            raise ConfigError("serving costs: stint_s: expected the seconds of each stint of others")
        if len(self.stall_lost) != len(self.stall_s) or any(not 0 < lost <= 1 for lost in self.stall_lost):
            raise ConfigError("serving costs: stall_lost: expected a share, above 0 and at most 1, for each of stall_s")

    @property
    def parts(self) -> float:
        """As how many equal parts the jobs on a lone call's way vary, when each varies by itself."""
        server, client = self.server, self.client
        jobs = [server.io_s * READ + server.io_cold_s, server.grpc_s * TAKEN + server.grpc_cold_s, server.loop_s / 2]
        jobs += [server.loop_s / 2 + server.loop_cold_s, client.loop_s / 2, client.io_s * READ + client.io_cold_s]
        jobs += [client.loop_s / 2 + client.loop_cold_s, self.run.base_s + self.run.request_s]
        return sum(jobs) ** 2 / max(sum(job**2 for job in jobs), 1e-30) if any(jobs) else 1.0

    def to_json(self) -> str:
        """Deterministic text."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> ServingCosts:
        """Read :meth:`to_json`'s text; raises ConfigError on anything else."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the serving costs are not JSON: {error}") from None
        found = data.pop("format", None) if isinstance(data, dict) else None
        if found in _EARLIER:
            raise ConfigError(
                f"serving costs of format {found!r}: they are of an earlier server, or do not say what sleep costs each thread; "
                "measure again with recinfer calibrate --serving FILE"
            )
        if found != FORMAT:
            raise ConfigError(
                f"not serving costs of format {FORMAT!r}; write them with recinfer calibrate --serving FILE"
            )
        try:
            for name, kind in (
                ("server", EndCosts),
                ("client", EndCosts),
                ("run", RunCosts),
                ("shard", RunCosts),
                ("fan", FanCosts),
            ):
                data[name] = kind(**_with_points(data[name]))
            if data.get("direct") is not None:
                direct = dict(data["direct"])
                server, client = (EndCosts(**_with_points(direct.pop(name))) for name in ("server", "client"))
                data["direct"] = DirectCosts(server, client, RunCosts(**direct.pop("run")), **direct)
            if data.get("shard_end") is not None:
                data["shard_end"] = EndCosts(**_with_points(data["shard_end"]))
            data |= {name: tuple(data[name]) for name in ("spread", "stall_s", "stall_lost")}
            data["stint_s"] = tuple(data.get("stint_s", ()))  # files of before 2026-11-22 do not say
            data.pop("work_s", None)  # of files of before 2026-11-23: of work in the caches, which tells less
            data["paces"] = dict(data.get("paces", {}))
            data["wakes"] = _points(data.get("wakes", ()))
            return cls(**data)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the serving costs are incomplete or have unknown keys: {error!r}; run recinfer calibrate --serving again"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ServingCosts:
        """Read the JSON; raises NotFoundError when there is no such file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotFoundError(
                f"no serving costs {str(path)!r}; write them with recinfer calibrate --serving FILE"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read the serving costs {str(path)!r}: {error}") from None


def _points(found: Any) -> Points:
    return tuple((asleep + 0.0, seconds + 0.0) for asleep, seconds in found)


def _with_points(found: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one kind of costs: JSON has lists for tuples."""
    return {name: _points(value) if name.endswith("cooled") else value for name, value in found.items()}
