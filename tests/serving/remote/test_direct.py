"""Between ranker and shards the byte path sends and returns exactly the decoded path's bytes, or declines."""

from __future__ import annotations

import functools
import math
import queue
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.reader import open_archive
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import Plan, TablePlan, embedding_tables
from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.inference.bags import bags_of
from recinfer.inference.export import export_archive
from recinfer.inference.lookups import run_steps
from recinfer.inference.predictor import load
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.engine.remote_byte_path import MOST_FAN_OUTS
from recinfer.serving.engine.request import CallName
from recinfer.serving.server.server import Server
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.shards.messages import decode_response, join_request
from recinfer.serving.shards.rank_modules import ModuleLayout, module_layouts
from recinfer.serving.shards.rank_structs import is_packed
from recinfer.serving.shards.split import ModuleSplit
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.proto import shards_pb2 as shards_pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.kept import kept
from tests.serving.mutations import mutated
from tests.serving.paths import BytePath
from tests.serving.remote.fleet import allowing_default_rows, asking, shard, write_shards
from tests.serving.remote.models import KINDS, rectangles_of, unpacked
from tests.waiting import until

NUM_DENSE = 3
ROWS = {"a": 53, "b": 301, "c": 301, "d": 97, "e": 40}


class Pooled(nn.Module):
    """One module of sums, means, a table of two features and one feature of two tables' heights; a dense part."""

    def __init__(self, pooling: PoolingType = PoolingType.MEAN) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(53, 12, "t_a", feature_names=["a"], pooling=pooling),
                EmbeddingBagConfig(301, 16, "t_b", feature_names=["b", "c"], pooling=PoolingType.MEAN),
                EmbeddingBagConfig(97, 20, "t_d", feature_names=["d"], pooling=pooling),
                EmbeddingBagConfig(40, 8, "t_e", feature_names=["e"], pooling=PoolingType.MEAN),
            ]
        )
        self.over = nn.Linear(NUM_DENSE + 72, 2)

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        """Something of everything."""
        return self.over(torch.cat([dense, self.bags(kjt).values()], 1))


@kept
def make_archive(
    folder: Path, kind: str, precision: DataType = DataType.INT8, pooling: PoolingType = PoolingType.SUM
) -> Path:
    torch.manual_seed(7)
    model = Pooled(pooling)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "weights.pt")
    tables = []
    for path, _, configs, _ in embedding_tables(model):
        for config in configs:
            size = config.num_embeddings, config.embedding_dim
            tables.append(
                TablePlan(path, config.name, kind, "quant", precision, *size, rectangles_of(kind, *size, len(tables)))
            )
    out = folder / f"{kind}.rqa"
    export_archive(
        model,
        CheckpointReader(folder / "weights.pt"),
        Plan(3, "cpu", tuple(tables)),
        out,
        name="pooled",
        version="1",
        progress=False,
    )
    return out


def make_request(
    batch: int,
    seed: int = 0,
    *,
    longest: int = 4,
    keys: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Random bags of 0 to ``longest`` - 1 ids; exactly one where it is 1."""
    random = torch.Generator().manual_seed(seed)
    names = list(keys or ROWS)
    lengths = torch.randint(0, longest, (len(names), batch), generator=random)
    if longest == 1:
        lengths = torch.ones_like(lengths)
    ids = [torch.randint(0, ROWS[key], (int(n.sum()),), generator=random) for key, n in zip(names, lengths)]
    return KeyedJaggedTensor(names, torch.cat(ids).to(dtype), lengths=lengths.flatten().int())


def requests() -> list[KeyedJaggedTensor]:
    return [
        make_request(1, 1, longest=1),
        make_request(5, 2, longest=1, dtype=torch.int32),
        make_request(7, 3),
        make_request(33, 4, longest=9, dtype=torch.int32),
        make_request(2, 5, longest=400),
        make_request(3, 6, keys=("d", "b")),
        make_request(3, 7, keys=("e", "d", "c", "b", "a"), longest=1),
        make_request(200, 8, longest=1),
    ]


@contextmanager
def served(archive: Path, folder: Path, *, missing: str | None = None, **settings: Any) -> Iterator[InferenceService]:
    """A ranker's service and two shard servers of it."""
    with ExitStack() as stack:
        ranks: dict[int, list[str]] = {}
        for group in ((0,), (1, 2)):
            server = stack.enter_context(shard(archive, group))
            for rank in group:
                ranks.setdefault(rank, []).append(server.target)
        fan_out = stack.enter_context(asking(write_shards(folder / "shards.json", ranks, **settings), missing=missing))
        yield service_of(archive, fan_out)


def service_of(archive: Path, fan_out: FanOut, limits: Limits | None = None) -> InferenceService:
    return InferenceService(ModelRegistry({"pooled": load(archive, lookups=MakeLookups(fan_out))}), limits)


def straight(service: InferenceService, call: CallName, data: bytes) -> bytes | None:
    """The answer of the byte path."""
    found = BytePath(service).remote(call, data)
    if isinstance(found, Exception):
        raise found
    return found


def ordinary(service: InferenceService, call: CallName, data: bytes) -> bytes:
    """The answer of the decoded path, waited for as a server does."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    run_steps(service.run([service.decode(call, data)]), math.inf, done.put, lambda work: work())
    found = done.get(timeout=90)
    answer = found if isinstance(found, Exception) else found[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


# -- a shard ----------------------------------------------------------------------------------------------------------


def shard_messages(archive: Path, request: KeyedJaggedTensor, ranks: tuple[int, ...], key: str) -> bytes:
    """The message of a ranker's decoded path to a server of ``ranks``."""
    bags = bags_of(request)
    parts = []
    for number, layout in enumerate(layouts_of(archive)):
        sections = ModuleSplit(number, layout).split(bags)
        parts += [sections[rank].parts for rank in ranks if rank in sections]
    return join_request(key, bags.batch, parts)


@functools.cache
def layouts_of(archive: Path) -> list[ModuleLayout]:
    opened = open_archive(archive, ranks=())
    return module_layouts(opened.manifest, opened.plan)


def vectors_of(answer: bytes | None, data: bytes, archive: Path) -> list[list[float]]:
    """What a shard answered to ``data``, packed or not."""
    assert answer is not None
    request, layouts, found = shards_pb.ShardRequest.FromString(data), layouts_of(archive), []
    for part, array in zip(request.parts, decode_response(answer), strict=True):
        if is_packed(array):
            array = unpacked(array, layouts[part.module], part.rank, request.batch_size)
        found.append(array.reshape(-1).tolist())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_answers_from_the_bytes(tmp_path: Path, kind: str):
    archive = make_archive(tmp_path, kind)
    for ranks in ((0,), (2,), (0, 1, 2)):
        tables = ShardTables(ranks)
        key = tables.add(archive)
        for request in requests():
            data = shard_messages(archive, request, ranks, key)
            if b"\x1a" in data[len(key) + 2 :]:  # at least one rank gets a request
                expected = vectors_of(tables.find_any(data, Limits()), data, archive)
                assert vectors_of(tables.find_directly(data, Limits()), data, archive) == expected


@pytest.mark.parametrize("precision", [DataType.INT4, DataType.INT2, DataType.FP16, DataType.BF16, DataType.FP32])
def test_a_shard_of_every_precision(tmp_path: Path, precision: DataType):
    for pooling in (PoolingType.SUM, PoolingType.MEAN):
        archive = make_archive(tmp_path / pooling.name, "table_wise", precision, pooling)
        for rank in range(3):
            tables = ShardTables((rank,))
            key = tables.add(archive)
            for request in requests():
                data = shard_messages(archive, request, (rank,), key)
                expected = vectors_of(tables.find_any(data, Limits()), data, archive)
                assert vectors_of(tables.find_directly(data, Limits()), data, archive) == expected


def test_a_shard_leaves_what_is_not_plain(tmp_path: Path):
    archive = make_archive(tmp_path, "table_wise")
    tables = ShardTables((0, 1))
    key = tables.add(archive)
    data = shard_messages(archive, make_request(3, longest=1), (0, 1), key)
    assert tables.find_directly(data, Limits()) is not None
    whole = make_request(3, longest=1)
    beyond = KeyedJaggedTensor(whole.keys(), whole.values() + 1000, lengths=whole.lengths())
    for other in (
        shard_messages(archive, beyond, (0, 1), key),
        shard_messages(archive, whole, (0, 1), "another"),
        shard_messages(archive, whole, (2,), key),
        data + b"\x20\x01",
        data[:-1],
        b"",
    ):
        assert tables.find_directly(other, Limits()) is None
    assert tables.find_directly(data, Limits(max_concurrent=1, max_batch=2)) is None


def test_mutated_messages_to_a_shard(tmp_path: Path, num_mutated: int):
    archive = make_archive(tmp_path, "grid_shard")
    tables = ShardTables((0, 1))
    key = tables.add(archive)
    starts = [
        shard_messages(archive, make_request(batch, batch, longest=longest), (0, 1), key)
        for batch, longest in ((1, 1), (2, 4), (1, 300))
    ]
    answered = 0
    for data in mutated(random.Random(5), starts, num_mutated):
        found = tables.find_directly(data, Limits())
        if found is not None:
            answered += 1
            assert vectors_of(found, data, archive) == vectors_of(tables.find_any(data, Limits()), data, archive)
    assert answered > num_mutated // 100


# -- a ranker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_ranker_splits_and_joins_as_the_ordinary_way(tmp_path: Path, kind: str):
    archive = make_archive(tmp_path, kind)
    opened = open_archive(archive, ranks=())
    here = load(archive)
    with served(archive, tmp_path) as service:
        lookups = service.registry.get().predictor.lookups
        (layout,) = module_layouts(opened.manifest, opened.plan)
        for request in requests():
            data = codec.encode_lookup_request(request)
            asked = BytePath(service).split("Lookup", data)
            assert asked is not None
            sections = ModuleSplit(0, layout).split(bags_of(request))
            assert {r: b"".join(*parts) for r, parts in asked.items()} == {
                r: b"".join(section.parts) for r, section in sections.items()
            }
            assert straight(service, "Lookup", data) == ordinary(service, "Lookup", data)
            if not any(rank.mine.cuts_rows for rank in lookups._splits[0].ranks):
                found = here.lookup(request)
                assert codec.encode_lookup_response(found.pooled, {}, request.stride(), "1") == straight(
                    service, "Lookup", data
                )


@pytest.mark.parametrize(("samples", "longest"), [(6_000, 1), (9_000, 9), (16_000, 3)])
def test_thousands_of_samples_get_the_answers_of_few(tmp_path: Path, samples: int, longest: int):
    """Over sockets, outside the shard servers' reading threads, and as calls."""
    archive = make_archive(tmp_path, "row_wise")
    with served(archive, tmp_path) as service:
        for seed in range(3):
            data = codec.encode_lookup_request(make_request(samples, seed, longest=longest))
            assert len(data) > 128 << 10
            assert straight(service, "Lookup", data) == ordinary(service, "Lookup", data)


def test_predictions_and_a_lookup_without_ids(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise", pooling=PoolingType.MEAN)
    with served(archive, tmp_path) as service:
        for seed, batch in enumerate((1, 5, 40)):
            dense = torch.randn(batch, NUM_DENSE, generator=torch.Generator().manual_seed(seed))
            data = codec.encode_predict_request(dense, make_request(batch, seed))
            found = straight(service, "Predict", data)
            assert found is not None
            pair = [pb.PredictResponse.FromString(x) for x in (found, ordinary(service, "Predict", data))]
            (a,), (b,) = (answer.outputs for answer in pair)
            assert (a.name, list(a.shape)) == (b.name, list(b.shape))
            np.testing.assert_allclose(
                np.frombuffer(a.values, np.float32), np.frombuffer(b.values, np.float32), rtol=1e-5, atol=1e-6
            )
        data = codec.encode_lookup_request(make_request(4, 1, longest=9))
        assert straight(service, "Lookup", data) == ordinary(service, "Lookup", data)
        nothing = KeyedJaggedTensor(
            ["a", "d"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int32)
        )
        data = codec.encode_lookup_request(nothing)
        assert straight(service, "Lookup", data) == ordinary(service, "Lookup", data)


def test_a_ranker_leaves_what_is_not_plain(tmp_path: Path):
    archive = make_archive(tmp_path, "table_wise")
    whole = make_request(2, longest=1)
    weighted = KeyedJaggedTensor(whole.keys(), whole.values(), lengths=whole.lengths(), weights=torch.ones(10))
    unknown = KeyedJaggedTensor(["none"], torch.tensor([1]), lengths=torch.tensor([1], dtype=torch.int32))
    with served(archive, tmp_path) as service:
        for request in (
            KeyedJaggedTensor(whole.keys(), whole.values() + 1000, lengths=whole.lengths()),
            KeyedJaggedTensor(whole.keys(), whole.values() - 1000, lengths=whole.lengths()),
            weighted,
            unknown,
            make_request(17_000),  # more samples than may be asked for
            make_request(100, longest=3000),  # more ids than the receiving thread splits
        ):
            assert BytePath(service).split("Lookup", codec.encode_lookup_request(request)) is None
        for dense, request in (
            (torch.full((2, NUM_DENSE), float("nan")), whole),
            (torch.zeros(2, NUM_DENSE + 1), whole),
            (torch.zeros(2, NUM_DENSE), make_request(2, keys=("a", "b"), longest=1)),
        ):
            assert BytePath(service).split("Predict", codec.encode_predict_request(dense, request)) is None
        starts = [codec.encode_lookup_request(make_request(batch, batch, longest=2)) for batch in (1, 3)]
        begun, paths = 0, BytePath(service)
        for data in mutated(random.Random(3), starts, 3_000):
            asked = paths.split("Lookup", data)
            if asked is not None:  # then the decoded path accepts it too
                begun += 1
                sections = (
                    service.registry.get().predictor.lookups._splits[0].split(service.decode("Lookup", data).features)
                )
                assert {r: b"".join(*parts) for r, parts in asked.items()} == {
                    r: b"".join(section.parts) for r, section in sections.items()
                }
        assert begun > 50


def test_a_split_that_fails_ends_its_request_and_frees_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = codec.encode_lookup_request(make_request(3, 1, longest=1))
    with served(make_archive(tmp_path, "table_wise"), tmp_path) as service:
        paths = BytePath(service)

        def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr("recinfer.serving.shards.remote_tables.split", fail)
            for _ in range(MOST_FAN_OUTS + 1):
                assert isinstance(paths.remote("Lookup", data), RuntimeError)
        assert isinstance(paths.remote("Lookup", data), bytes)


def test_missing_rank_is_an_error_or_zeros_with_a_flag(tmp_path: Path):
    archive = allowing_default_rows(make_archive(tmp_path, "row_wise"), tmp_path / "allowing.rqa")
    data = codec.encode_lookup_request(make_request(3, 1, longest=1))
    predict = codec.encode_predict_request(torch.zeros(3, NUM_DENSE), make_request(3, 1, longest=1))
    for missing in ("error", None, "default_rows"):
        with served(archive, tmp_path, missing=missing) as service:
            fan_out = service.registry.get().predictor.lookups._fan_out
            fan_out.pool.replicas(0)[0].up = False  # its health does not change, so it stays like this
            if missing == "error":
                with pytest.raises(UnavailableError, match="rank 0 has no living replica"):
                    straight(service, "Lookup", data)
                continue
            for call, message, kind in (("Lookup", data, pb.LookupResponse), ("Predict", predict, pb.PredictResponse)):
                found = straight(service, call, message)
                assert found is not None
                assert list(kind.FromString(found).missing_ranks) == [0]
                if call == "Lookup":
                    assert found == ordinary(service, call, message)
            assert fan_out.default_rows[0] == 3


def test_default_rows_need_the_manifests_permission(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise")
    data = codec.encode_lookup_request(make_request(3, 1, longest=1))
    with served(archive, tmp_path) as service:
        fan_out = service.registry.get().predictor.lookups._fan_out
        fan_out.pool.replicas(0)[0].up = False
        fan_out._missing = "default_rows"  # as a shards.json does that is changed while the ranker runs
        for way in (straight, ordinary):
            with pytest.raises(UnavailableError, match=r"rank 0 has no living replica.*manifest does not allow them"):
                way(service, "Lookup", data)
        with pytest.raises(ConfigError, match="pooled 1 does not allow default rows; export or reshard it"):
            load(archive, lookups=MakeLookups(fan_out))


def test_through_a_server_and_in_its_figures(tmp_path: Path):
    archive = make_archive(tmp_path, "grid_shard")
    here = load(archive)
    request = make_request(3, 1)
    with served(archive, tmp_path) as service:
        predictor = service.registry.get().predictor
        with (
            Server({"pooled": predictor}, shards=predictor.lookups._fan_out) as server,
            InferenceClient(server.target, timeout=60) as client,
        ):
            before = predictor.stages.state()["lookup"].count
            found = client.lookup(request)
            torch.testing.assert_close(
                found.pooled.values(), here.lookup(request).pooled.values(), rtol=1e-5, atol=1e-6
            )
            outputs = client.predict(torch.zeros(3, NUM_DENSE), request)
            torch.testing.assert_close(outputs["output"], here.predict(torch.zeros(3, NUM_DENSE), request)["output"])
            scheduler = server.scheduler
            assert scheduler is not None
            until(lambda: scheduler.state.running == 0)  # an answer is sent before its worker counts as free
            assert (scheduler.state.requests, scheduler.state.samples) == (2, 6)
            assert server.stats.requests() == {("Lookup", "OK"): 1, ("Predict", "OK"): 1}
            assert predictor.stages.state()["lookup"].count == before + 2
            assert server.stats.batch.state().count == 2


def test_missing_feature_is_refused_before_a_request_to_a_shard(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise")
    some, dense = make_request(3, 6, keys=("d", "b")), torch.zeros(3, NUM_DENSE)
    with pytest.raises(InputError, match=r"^missing features: 'a', 'c', 'e'; got d, b") as here:
        load(archive).predict(dense, some)
    with served(archive, tmp_path) as service:
        data = codec.encode_predict_request(dense, some)
        assert straight(service, "Predict", data) is None
        with pytest.raises(InputError) as there:
            ordinary(service, "Predict", data)
        assert str(there.value) == str(here.value)
        assert straight(service, "Lookup", codec.encode_lookup_request(some)) is not None


@pytest.mark.parametrize("samples", [2, 500], ids=["short", "long"])
@pytest.mark.parametrize("call", ["Lookup", "Predict"])
def test_each_has_a_fan_out_of_its_own_and_dense_parts_share_runs(tmp_path: Path, call: str, samples: int):
    archive = make_archive(tmp_path, "row_wise")
    here, dense = load(archive), torch.zeros(samples, NUM_DENSE)
    requests = [make_request(samples, seed) for seed in range(6)]

    def asked(client: InferenceClient, number: int) -> Tensor:
        request = requests[number % len(requests)]
        if call == "Lookup":
            return client.lookup(request).pooled.values()
        return client.predict(dense, request)["output"]

    def expected(request: KeyedJaggedTensor) -> Tensor:
        return here.lookup(request).pooled.values() if call == "Lookup" else here.predict(dense, request)["output"]

    def ask_all(client: InferenceClient, callers: int, each: int) -> None:
        with ThreadPoolExecutor(callers) as pool:
            found = list(pool.map(lambda number: asked(client, number), range(callers * each)))
        for number, values in enumerate(found):
            torch.testing.assert_close(values, right[number % len(requests)], rtol=1e-5, atol=1e-6)

    right = [expected(request) for request in requests]
    with served(archive, tmp_path) as service:
        predictor = service.registry.get().predictor
        with (
            Server({"pooled": predictor}, shards=predictor.lookups._fan_out) as server,
            InferenceClient(server.target, timeout=60) as client,
        ):
            assert server.scheduler is not None
            ask_all(client, 16, 6)
            state = server.scheduler.state
            assert state.requests == 96
            assert state.runs == 96 if call == "Lookup" else state.runs <= 96
