"""Run a function on 1 to 8 real gloo ranks and get every rank's result: ``run_ranks(2, check_sum, 3)``.

The ranks are processes that live as long as the test session; each call makes a process group of its own on the first
``world_size`` of them, so nothing of a test reaches the next one but a warm interpreter. A failure shows the traceback
of the rank that failed first, and a test that hangs is killed with all its ranks; the next call starts fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.warm import warm_context

__all__ = ["RankError", "run_ranks"]

_MAX_RANKS = 8
_KEPT_RANKS = 4  # further ones end with the call that needed them


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    backend: str | None = "gloo",
    timeout: float = 300.0,
    **kwargs: Any,
) -> list[Any]:
    """``[function(rank, world_size, *args, **kwargs) for each rank]``, each in its own process, in one process group.

    Args:
        world_size: 1 to 8 ranks.
        function: a function at the top of a module (it travels by name); the default process group is there when it
            runs, with one torch thread. What it returns must pickle.
        env: environment variables for this call, for example ``{"LOCAL_WORLD_SIZE": "2"}`` to play two hosts.
        timeout: seconds until the ranks are killed, their start included; time during which this process was stopped
            does not count.

    Raises:
        RankError: naming the rank that failed first, with its traceback.
    """
    ranks = _pool(world_size)
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "world_size": world_size,
            "init": f"file://{folder}/store",
            "env": env or {},
            "backend": backend,
            "timeout": timeout,
        }
        work = pickle.dumps((function, args, kwargs))
        for rank, (_, pipe) in enumerate(ranks):
            pipe.send((rank, job, work))
        answers = [pickle.loads(answer) for answer in _answers(ranks, timeout)]
    _end(_KEPT_RANKS)
    return answers


def _answers(ranks: list[tuple[Any, Connection]], timeout: float) -> list[bytes]:
    """What every rank sent back; kills them all when one fails, since the others may wait for it forever."""
    answers: dict[int, bytes] = {}
    failures: list[tuple[float, int, str]] = []
    pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    waited, patience = 0.0, timeout
    while pipes and waited < patience:
        # In slices, each counted as no more than itself: a stopped machine is no reason to give up.
        ready = wait(list(pipes), timeout=0.5)
        waited += 0.0 if ready else 0.5
        for pipe in ready:
            rank = pipes.pop(pipe)  # type: ignore[call-overload]
            try:
                when, ok, answer = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                ranks[rank][0].join(5)
                # First of all: what the others raise when a peer is gone is not the cause.
                failures.append((0.0, rank, f"the process died (exit code {ranks[rank][0].exitcode})"))
                continue
            if ok:
                answers[rank] = answer
            else:
                failures.append((when, rank, answer.decode()))
        if failures:
            patience = min(patience, waited + 2.0)  # the others may have the better message; they get a moment
    if not failures and not pipes:
        return [answers[rank] for rank in range(len(ranks))]
    _kill_pool()
    if failures:
        _, rank, text = min(failures)
        others = sorted(r for _, r, _ in failures if r != rank)
        raise RankError(f"rank {rank} of {len(ranks)} failed (others that failed: {others}):\n{text}")
    raise RankError(
        f"ranks {sorted(pipes.values())} of {len(ranks)} did not answer within {timeout} s; all were killed"
    )


# ------------------------------------------------------------------------------------------------- the pool of processes

_ranks: list[tuple[Any, Connection]] = []


def _pool(world_size: int) -> list[tuple[Any, Connection]]:
    if not 1 <= world_size <= _MAX_RANKS:
        raise ValueError(f"world_size {world_size}; expected 1 to {_MAX_RANKS}")
    if any(not process.is_alive() for process, _ in _ranks):
        _kill_pool()
    context = warm_context()
    while len(_ranks) < world_size:
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True, name=f"rank {len(_ranks)}")
        process.start()
        theirs.close()
        _ranks.append((process, mine))
    return _ranks[:world_size]


def _kill_pool() -> None:
    _end(0)


def _end(keep: int) -> None:
    """Kill all ranks but the first ``keep``."""
    for process, pipe in _ranks[keep:]:
        process.kill()
        pipe.close()
    for process, _ in _ranks[keep:]:
        process.join(5)
    del _ranks[keep:]


atexit.register(_kill_pool)


def _serve(pipe: Connection) -> None:
    """The life of a rank: one job after another until the test session ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, job, work = pipe.recv()
        except EOFError:
            return
        _run(rank, job, work, pipe)


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _run(rank: int, job: dict[str, Any], work: bytes, pipe: Connection) -> None:
    """Do it and send the answer: (when, whether it went well, what came out or the traceback)."""
    import torch
    import torch.distributed as dist

    set_before = {name: os.environ.get(name) for name in job["env"]}
    os.environ.update(job["env"])
    torch.manual_seed(0)
    try:
        function, args, kwargs = pickle.loads(work)
        dist.init_process_group(
            job["backend"],
            init_method=job["init"],
            rank=rank,
            world_size=job["world_size"],
            timeout=timedelta(seconds=job["timeout"] + 120),
        )
        answer = pickle.dumps(function(rank, job["world_size"], *args, **kwargs))
        dist.barrier()  # no rank tears its group down while another still talks to it
    except BaseException:
        # Before its group goes: the others fail when it does, and this is the cause.
        pipe.send((time.monotonic(), False, traceback.format_exc().encode()))
        answer = None
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        for name, value in set_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    if answer is not None:
        pipe.send((time.monotonic(), True, answer))
