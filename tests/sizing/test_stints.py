"""The record of what others had of the cores, with a real process, and what the simulation makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from recinfer.errors import ConfigError
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.simulate import Deployment, simulate
from recinfer.sizing.stints import Stint, StintRecorder, Switch, can_record_switches, stints_of
from recinfer.sizing.workload import shards_of
from tests.sizing.models import COSTS, model_of

WORKS = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print("here", flush=True)
sys.stdin.readline()
begin = time.process_time()
while time.process_time() < begin + 0.3: pass
print(time.process_time() - begin, flush=True)
sys.stdin.readline()
"""


def test_what_a_strange_process_has_of_a_core_is_seen_and_ours_is_not() -> None:
    if not can_record_switches():
        pytest.skip("this system does not tell who has its cores")
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-c", WORKS, str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin and child.stdout
        try:
            child.stdout.readline()
            begin = time.perf_counter()
            with StintRecorder() as ours, StintRecorder(strangers=[child.pid]) as recorder:
                child.stdin.write("go\n")
                child.stdin.flush()
                spent = float(child.stdout.readline())
            end = time.perf_counter()
            child.stdin.write("end\n")
            child.stdin.flush()
        finally:
            child.kill()
    its = [stint for stint in recorder.stints if stint.pid == child.pid]
    # It has the core for at least as long as it computes: longer where the hypervisor takes the core away meanwhile.
    assert sum(stint.seconds for stint in its) > 0.5 * spent
    assert all(begin <= stint.begin and stint.begin + stint.seconds <= end for stint in its)
    assert {stint.core for stint in its} == {sorted(os.sched_getaffinity(0)).index(core)}
    assert recorder.cores == len(os.sched_getaffinity(0))
    assert 0 < recorder.seconds <= end - begin
    assert not {child.pid, os.getpid()} & {stint.pid for stint in ours.stints}


def test_a_stint_goes_on_until_the_thread_sleeps() -> None:
    def has(core: int, pid: int, begin: float, end: float, ready: bool = False) -> list[Switch]:
        return [Switch(begin, core, pid, pid), Switch(end, core, pid, pid, out=True, ready=ready)]

    switches = [
        *has(0, 7, 1.0, 1.2, ready=True),  # somebody else's turn, and then it goes on elsewhere
        *has(1, 7, 1.5, 1.6),
        *has(1, 7, 2.0, 2.1),
        *has(0, 0, 1.2, 3.0),  # nobody
        *has(0, 1, 3.0, 3.5),  # ours
        Switch(3.1, 0, 8, 8, parent=1),
        *has(1, 8, 3.2, 3.3),  # what ours has started
        Switch(3.6, 0, 10, 10, parent=9),
        *has(1, 10, 3.7, 3.8),
        Switch(0.5, 0, 11, 11, out=True),  # it had begun before anybody looked
        *has(0, 12, 4.0, 4.1, ready=True),  # and this was not over
    ]
    found = stints_of(sorted(switches, key=lambda switch: switch.core), mine=[1])
    assert [(stint.core, stint.begin, stint.pid) for stint in found] == [
        (0, 1.0, 7),
        (1, 2.0, 7),
        (1, 3.7, 10),
        (0, 4.0, 12),
    ]
    assert [stint.seconds for stint in found] == pytest.approx([0.3, 0.1, 0.1, 0.1])


MODEL, ONE = model_of(), Deployment(1, 1, 0, cores=2, co_located=True)
TRACE, PLAN = poisson(50.0, 200, ids_per_sample=MODEL.ids_per_sample, seed=3), shards_of(MODEL, 1)


def test_who_comes_while_others_have_all_cores_waits_for_a_slice() -> None:
    begin = float(TRACE.times[100]) - 1e-3
    calm, one, both = (
        simulate(ONE, TRACE, MODEL, PLAN, COSTS, stints=[Stint(core, begin, 0.05) for core in cores])
        for cores in ((), (1,), (0, 1))
    )
    later = both.latencies - calm.latencies
    assert 1e-3 < later[100] < 0.03, "threads take turns: it does not wait for their end"
    touched = np.flatnonzero(later > 1e-4)
    assert ((TRACE.times[touched] > begin - 0.02) & (TRACE.times[touched] < begin + 0.2)).all()
    assert one.latencies[100] < both.latencies[100]
    before = simulate(ONE, TRACE, MODEL, PLAN, COSTS, stints=[Stint(0, -1.0, 0.5)])
    assert (before.latencies == calm.latencies).all()


def test_measured_stints_come_as_often_as_they_did() -> None:
    costs = replace(COSTS, stints_per_s=20.0, stint_s=(0.001, 0.01))
    trace = poisson(300.0, 3000, ids_per_sample=MODEL.ids_per_sample, seed=5)
    whole = Deployment(1, 1, 0, cores=2)
    calm, beside = (simulate(whole, trace, MODEL, PLAN, each) for each in (COSTS, costs))
    assert beside.busy["servers"] - calm.busy["servers"] == pytest.approx(20.0 * 0.0055, rel=0.2)
    assert beside.percentile(99) > calm.percentile(99) + 1e-3
    assert beside.percentile(50) == pytest.approx(calm.percentile(50), rel=0.1)


def test_stints_of_other_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="stints: they are of one host"):
        simulate(Deployment(1, 1, 0, cores=2), TRACE, MODEL, PLAN, COSTS, stints=[])
    with pytest.raises(ConfigError, match="stints: got core 2, expected 0 to 1"):
        simulate(ONE, TRACE, MODEL, PLAN, COSTS, stints=[Stint(2, 0.0, 1.0)])
