"""The order in which the streams of a GPU wait for one another, with simulated streams: no CPU machine has them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recinfer.quant import cuda_graphs, host_inputs
from recinfer.quant.cuda_graphs import GraphedLookups
from recinfer.quant.host_inputs import Staging

GPU = torch.device("cuda", 0)


class Played:
    """Records its calls under the name of the stream or event."""

    done: list[str]
    priorities: list[int]

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("_"):
            raise AttributeError(asked)
        return lambda *others: self.done.append(" ".join([self.name, asked, *(other.name for other in others)]))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of streams and events; tensors are on the CPU."""
    Played.done, Played.priorities = [], []
    events = itertools.chain(("copied", "read"), itertools.repeat("of a bucket"))
    empty = torch.empty

    def on_cpu(*size: Any, pin_memory: bool = False, device: Any = None, **more: Any) -> torch.Tensor:
        return empty(*size, **more)

    class Graph(Played):
        fails = False

        def capture_begin(self, capture_error_mode: str) -> None:
            self.done.append(f"capture_begin {capture_error_mode}")

        def capture_end(self) -> None:
            self.done.append("capture_end")
            if self.fails:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self) -> None:
            self.done.append("replay")
            self.body()

    monkeypatch.setattr(cuda_graphs, "_failed", [])
    monkeypatch.setattr(cuda_graphs, "_MOST_BATCH", 4)
    monkeypatch.setattr(cuda_graphs, "_MOST_IDS", 64)

    for name, value in {
        "Stream": lambda device, priority=0: (Played.priorities.append(priority), Played("side"))[1],
        "Event": lambda: Played(next(events)),
        "CUDAGraph": lambda: Graph("graph"),
        "current_stream": lambda device: Played("current"),
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (host_inputs, cuda_graphs):
        monkeypatch.setattr(module.torch, "empty", on_cpu)
    yield Played.done


def bring(staging: Staging, size: int) -> None:
    ids, weights = torch.arange(size), torch.rand(size)
    got = staging.to_device(ids, torch.tensor([0, size]), weights)
    assert torch.equal(got[0], ids) and got[1].tolist() == [0, size]
    assert got[2] is not None and torch.equal(got[2], weights)
    staging.record_lookup()


def test_copies_and_lookups_wait_for_one_another(done: list[str]) -> None:
    staging = Staging(GPU)
    steps = [
        "side wait_event read",  # the last lookup has read the memory that this copy overwrites
        "copied record side",
        "current wait_event copied",
        "read record current",
    ]
    bring(staging, 100)
    assert done == ["copied synchronize", "read synchronize", "side wait_stream current", *steps]
    done.clear()
    bring(staging, 3)
    assert done == ["copied synchronize", *steps]  # the host waits for the last copy alone


def total(ids: torch.Tensor, offsets: torch.Tensor, weights: object, batch: int, out: torch.Tensor) -> None:
    out.fill_(float(ids[: int(offsets[-1])].sum()))


def test_buckets_are_recorded_once_and_replayed_in_order(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph_of = cuda_graphs._graph_of

    def with_body(run: Any) -> Any:
        graph: Any = graph_of(run)
        graph.body = run
        return graph

    monkeypatch.setattr(cuda_graphs, "_graph_of", with_body)
    graphs = GraphedLookups(total, 1, 4, torch.float32, 10, GPU)
    recording = [
        "side wait_stream current",
        "side synchronize",  # the host's memory is read, and the kernel compiled
        "capture_begin thread_local",
        "capture_end",
        "replay",
    ]
    replay = ["copied synchronize", "current wait_event copied", "replay", "copied record current"]
    done.clear()
    for size, steps in ((1, recording * 3 + replay), (1, replay)):
        out = graphs(torch.tensor([7]), torch.arange(size + 1), None, size)
        assert out is not None and out.tolist() == [[7.0] * 4] * size
        assert done == steps
        done.clear()
    assert len(graphs) == 3


def test_no_copy_is_on_a_stream_on_which_another_thread_records(done: list[str]) -> None:
    """torch gives out 32 streams of a priority in turn, so only those of different priorities are never the same."""
    Staging(GPU)
    of_copies = Played.priorities.copy()
    GraphedLookups(total, 1, 4, torch.float32, 10, GPU)(torch.tensor([7]), torch.arange(2), None, 1)
    of_graphs = Played.priorities[len(of_copies) :]
    assert of_copies and of_graphs and set(of_copies).isdisjoint(of_graphs)


def test_after_a_failed_recording_nothing_more_is_recorded(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is kept: torch's allocators may go on to ask it."""
    graph = torch.cuda.CUDAGraph()
    graph.fails = True  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    for lookups in (GraphedLookups(total, 1, 4, torch.float32, 10, GPU) for _ in range(2)):
        assert lookups(torch.tensor([7]), torch.arange(2), None, 1) is None and not len(lookups)
    assert cuda_graphs._failed == [graph]
    assert done.count("capture_begin thread_local") == done.count("capture_end") == 1
