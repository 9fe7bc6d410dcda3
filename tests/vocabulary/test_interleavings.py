"""A delta changes ids and rows at once in every protocol, on a server and by a ranker: no answer is of two states."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.errors import UnavailableError
from recinfer.inference.predictor import load
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import ModelStore, StoreManager
from recinfer.serving.server import shard_server
from recinfer.serving.server.server import Server
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto.shards_pb2 import ShardRequest
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import NUM_DENSE
from tests.caller_threads import CallerThreads
from tests.serving.remote.fleet import asking, shard, write_shards
from tests.serving.ways_in import Asked, Way, ways_of
from tests.vocabulary.made import MAX, MIN
from tests.vocabulary.test_deltas import Chain, chain
from tests.waiting import until

__all__ = ["chain"]

NOT_OVER_THE_NET = "Python in process", "command line"


def asked_of(made: Chain) -> dict[str, Asked]:
    """A lookup and a prediction of ids of all states, and of ids of none."""
    every = np.unique(np.concatenate([vocabulary.ids for _, vocabulary in made[2]]))
    ids = torch.from_numpy(np.concatenate((np.random.default_rng(2).permutation(every)[:60], [MIN, -1, MAX])))
    features = KeyedJaggedTensor(["f_item"], ids, lengths=torch.ones(len(ids), dtype=torch.int32))
    dense = torch.randn(len(ids), NUM_DENSE, generator=torch.Generator().manual_seed(0))
    return {"lookup": Asked("", "small", features), "predict": Asked("", "small", features, dense)}


def expected_of(made: Chain, asked: dict[str, Asked]) -> dict[str, list[np.ndarray]]:
    """The vectors and the predictions of each state."""
    predictor = load(made[0].root)
    found: dict[str, list[np.ndarray]] = {"lookup": [], "predict": []}
    for delta in (None, *made[1]):
        if delta is not None:
            predictor.apply_delta(delta)
        found["lookup"].append(predictor.lookup(asked["lookup"].features)["f_item"].numpy())
        found["predict"].append(predictor.predict(asked["predict"].dense, asked["predict"].features)["output"].numpy())
    for vectors in found.values():
        assert not any(np.allclose(a, b, rtol=1e-4) for a, b in itertools.combinations(vectors, 2))
    return found


class Callers(CallerThreads):
    """Callers that send the same requests in every protocol again and again.

    Attributes:
        seen: (protocol, call, state) -> number of answers.
        wrong: answers of no state, and errors.
    """

    def __init__(self, server: Server, made: Chain, folder: Path, count: int = 2) -> None:
        super().__init__(count)
        self.asked = asked_of(made)
        self.expected = expected_of(made, self.asked)
        self.seen: Counter[tuple[str, str, int]] = Counter()
        self.wrong: list[object] = []
        self.names: set[str] = set()
        self._server, self._folder = server, folder

    def state(self, call: str, answer: np.ndarray) -> int | None:
        """The state that an answer is of."""
        for number, values in enumerate(self.expected[call]):
            same = np.array_equal(answer, values) if call == "lookup" else np.allclose(answer, values, rtol=1e-5)
            if same:
                return number
        return None

    def _call(self, number: int) -> None:
        with ExitStack() as stack:  # each thread has clients of its own
            ways = ways_of({"small": None}, {}, self._server, stack, self._folder)  # type: ignore[dict-item]
            own = {n: w for n, w in ways.items() if n not in NOT_OVER_THE_NET and not n.startswith("TorchServe")}
            self.names |= own.keys()
            order = [*itertools.product(own, self.asked)]
            while not self._stop.is_set():
                random.Random(number).shuffle(order)
                for name, call in order:
                    self._once(name, own[name], call)

    def _once(self, name: str, way: Way, call: str) -> None:
        try:
            (answer,) = way(self.asked[call]).values()
            state = self.state(call, np.asarray(answer, np.float32))
        except Exception as error:
            self.wrong.append((name, call, error))
            return
        if state is None:
            self.wrong.append((name, call, answer))
        else:
            self.seen[name, call, state] += 1

    def all_see(self, state: int) -> None:
        """Wait until each protocol has two more answers of ``state``, as many as there are callers."""
        before = self.seen.copy()
        keys = [(name, call, state) for name in self.names for call in self.asked]
        until(lambda: self.wrong or all(self.seen[key] >= before[key] + 2 for key in keys))
        assert not self.wrong, self.wrong[0]


@contextmanager
def served(made: Chain, folder: Path, *, remote: bool) -> Iterator[tuple[Server, list[ShardTables]]]:
    """A server with the archive and the deltas in its store; ``remote``: its rows are on two shard servers."""
    store = folder / "store"
    shutil.copytree(made[0].root, store / "small" / "7")
    for delta in made[1]:
        shutil.copy(delta, store / "small")
    with ExitStack() as stack:
        options, tables = {}, []
        models = ModelStore(store)
        if remote:
            ranks: dict[int, list[str]] = {}
            for group in ((0,), (1, 2)):
                server = stack.enter_context(shard(store / "small" / "7", group, store=store))
                tables.append(server.tables)
                ranks |= {rank: [server.target] for rank in group}
            fan_out = stack.enter_context(asking(write_shards(folder / "shards.json", ranks)))
            options["shards"] = fan_out
            models = ModelStore(store, lookups=MakeLookups(fan_out, str(store)))
        registry = ModelRegistry([ServedModel.of("small", models.open("small", "7"), "7")])
        manager = StoreManager(registry, models)
        yield stack.enter_context(Server(registry, admin=manager, http_port=0, **options)), tables


@pytest.mark.parametrize("remote", [False, True], ids=["server", "ranker"])
def test_every_protocol_answers_of_one_state_while_deltas_come_and_go(
    chain: Chain, remote: bool, tmp_path: Path
) -> None:
    with served(chain, tmp_path, remote=remote) as (server, _), AdminClient(server.target) as admin:
        with Callers(server, chain, tmp_path) as callers:
            until(lambda: callers.wrong or len(callers.names) == len({name for name, *_ in callers.seen}) > 5)
            for _ in range(2):
                for number, delta in enumerate(chain[1], 1):
                    admin.apply_delta("small", delta.name)
                    callers.all_see(number)
                for number in reversed(range(len(chain[1]))):
                    admin.undo_delta("small")
                    callers.all_see(number)
        assert not callers.wrong, callers.wrong[0]


@pytest.mark.parametrize("gone", [False, True], ids=["mapped", "unmapped"])
def test_rows_that_shards_look_up_after_the_switch_are_of_the_requests_own_state(
    chain: Chain, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranker has mapped the ids; its shards look up the rows when three deltas have given a third of them each to other ids.

    ``gone``: the shards have no version any more in which the rows are the ids'.
    """
    asked = asked_of(chain)
    expected = expected_of(chain, asked)["lookup"]
    go, held = threading.Event(), []
    with served(chain, tmp_path, remote=True) as (server, tables), AdminClient(server.target) as admin:
        (base,) = tables[0].keys()
        find = ShardTables.find

        def later(self: ShardTables, data: bytes, limits: Limits) -> bytes:
            if ShardRequest.FromString(data).version == base:
                held.append(data)
                assert go.wait(90)
            return find(self, data, limits)

        monkeypatch.setattr(shard_server, "_SMALL_BYTES", -1)  # smaller requests run on the thread that receives them
        monkeypatch.setattr(ShardTables, "find", later)
        with InferenceClient(server.target, retries=0, timeout=90) as client, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.lookup, asked["lookup"].features)
            until(lambda: len(held) == 2)
            for delta in chain[1]:
                admin.apply_delta("small", delta.name)
            for each in tables if gone else ():
                assert each._versions.pop(base)
            go.set()
            if gone:
                with pytest.raises(UnavailableError):
                    answer.result(90)
            else:
                assert np.array_equal(answer.result(90)["f_item"].numpy(), expected[0])
            assert np.array_equal(client.lookup(asked["lookup"].features)["f_item"].numpy(), expected[-1])
