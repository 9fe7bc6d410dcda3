"""The order in which the streams of a GPU wait for one another, with simulated streams: no CPU machine has them."""

from __future__ import annotations

import contextlib
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

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("_"):
            raise AttributeError(asked)
        return lambda *others: self.done.append(" ".join([self.name, asked, *(other.name for other in others)]))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of streams and events; tensors are on the CPU."""
    Played.done = []
    events = iter(("copied", "read"))
    empty = torch.empty

    def on_cpu(*size: Any, pin_memory: bool = False, device: Any = None, **more: Any) -> torch.Tensor:
        return empty(*size, **more)

    class Graph(Played):
        def replay(self) -> None:
            self.done.append("replay")
            self.body()

    for name, value in {
        "Stream": lambda device: Played("side"),
        "Event": lambda: Played(next(events)),
        "CUDAGraph": lambda: Graph("graph"),
        "current_stream": lambda device: Played("current"),
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": lambda *args, **kwargs: contextlib.nullcontext(Played.done.append("record")),
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


def test_a_bucket_is_recorded_once_and_replayed_in_order(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ids: torch.Tensor, offsets: torch.Tensor, weights: object, batch: int, out: torch.Tensor) -> None:
        out.fill_(float(ids[: int(offsets[-1])].sum()))

    recorded = cuda_graphs._Recorded._recorded

    def with_body(self: Any, device: torch.device) -> Any:
        graph = recorded(self, device)
        graph.body = self._once
        return graph

    monkeypatch.setattr(cuda_graphs._Recorded, "_recorded", with_body)
    graphs = GraphedLookups(run, 1, 4, torch.float32, GPU)
    replay = ["copied synchronize", "current wait_event copied", "replay", "copied record current"]  # its only event
    for size, steps in (
        (3, ["side wait_stream current", "side synchronize", "record", *replay]),
        (3, replay),
        (4, replay),
    ):
        done.clear()
        out = graphs(torch.arange(size), torch.arange(size + 1), None, size)
        assert out is not None and out.tolist() == [[size * (size - 1) / 2] * 4] * size
        assert done == steps
