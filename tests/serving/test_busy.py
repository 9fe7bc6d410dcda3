"""How busy a server is: the share of time, and a thread's time from the kernel."""

from __future__ import annotations

import math
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from recinfer.errors import UnavailableError
from recinfer.serving.engine.busy import BusyShare, thread_seconds
from recinfer.serving.server import shard_server
from recinfer.serving.shards.fan_out import waited_for
from recinfer.serving.shards.fan_out_request import ShardQuery, begin_fan_out
from tests.serving.remote.fleet import asking, shard, write_shards
from tests.serving.remote.test_direct import make_archive
from tests.waiting import until


class Time:
    def __init__(self) -> None:
        self.now = self.busy = 0.0

    def share(self) -> BusyShare:
        return BusyShare(lambda: self.busy, lambda: self.now)

    def passes(self, seconds: float, busy: float) -> None:
        self.now, self.busy = self.now + seconds, self.busy + busy


def test_the_share_is_of_the_last_ten_seconds():
    time = Time()
    share = time.share()
    assert share.now() == 0.0, "nothing has passed"
    time.passes(4.0, 1.0)
    assert share.now() == pytest.approx(0.25)
    for _ in range(100):
        time.passes(1.0, 0.5)
        share.now()
    assert share.now() == pytest.approx(0.5), "the first seconds are forgotten"
    for _ in range(11):
        time.passes(1.0, 0.0)
        share.now()
    assert share.now() == 0.0


def test_readings_in_quick_succession_are_not_all_kept():
    time = Time()
    share = time.share()
    for _ in range(30_000):
        time.passes(0.001, 0.0003)
        share.now()
    assert len(share._looks) < 50 and share.now() == pytest.approx(0.3)


def test_rare_readings_have_the_share_since_the_last_one():
    time = Time()
    share = time.share()
    for busy in (6.0, 30.0, 0.0):
        time.passes(60.0, busy)
        assert share.now() == pytest.approx(busy / 60)


def test_share_is_between_0_and_1():
    time = Time()
    share = time.share()
    time.passes(1.0, 1.2)
    assert share.now() == 1.0
    time.passes(10.0, -5.0)
    assert share.now() == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are Linux's")
def test_cpu_time_of_a_thread_and_of_a_missing_one():
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count what threads wait")
    own = threading.get_native_id()
    before = thread_seconds(own)
    for _ in range(1_000):  # the kernel counts at its ticks
        sum(range(300_000))
        if thread_seconds(own) > before:
            break
    assert thread_seconds(own) > before
    assert thread_seconds(0) == 0.0


def test_shard_server_reports_its_busy_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The busy time of all answering threads counts: those that read, and the pool."""
    threads: list[int] = []
    monkeypatch.setattr(shard_server, "thread_seconds", lambda native_id: threads.append(native_id) or 0.0)
    archive = make_archive(tmp_path, "row_wise")
    with shard(archive, (0,)) as server:
        assert server.status()["held"]["busy"] == 0.0
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        assert {names[native_id] for native_id in threads} == {"recinfer-shards"}
        monkeypatch.setattr(shard_server, "_SMALL_BYTES", -1)
        with asking(write_shards(tmp_path / "shards.json", {0: [server.target]})) as fan_out:
            (replica,) = fan_out.pool.everyone()
            replica.versions.add("nobody has it")
            with pytest.raises(UnavailableError, match="has not prepared"):  # the server says so
                parts = {0: [[b""]]}
                query = ShardQuery("nobody has it", 1, parts, math.inf, False, lambda rank, arrays: True)
                waited_for(partial(begin_fan_out, fan_out, query)).result()
        until(lambda: server._pool_seconds > 0.0)  # counted once the answer is sent
        assert 0.0 < server.status()["held"]["busy"] <= 1.0
