"""Raw rows as Arrow give the answers of the ids that the contract makes of them; damaged bytes are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from recinfer.arrow import as_raw
from recinfer.data.contract import DenseFeature, FeatureContract, Hash, Identity, SparseFeature
from recinfer.errors import InputError
from recinfer.inference.lookups import run_now
from recinfer.serving.client.bulk import batch_of
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.server.server import Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.loop import run_on_loop
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.raw_rows import read_raw
from tests.serving.conftest import ROWS
from tests.serving.paths import decoded

pyarrow = pytest.importorskip("pyarrow", reason="needs the arrow extra")

CONTRACT = FeatureContract(
    sparse=(
        SparseFeature("user", Hash(ROWS["user"])),
        SparseFeature("item", Identity(ROWS["item"])),
        SparseFeature("history", Identity(ROWS["history"]), separator="|"),
        SparseFeature("shop", Hash(ROWS["shop"])),
    ),
    dense=(DenseFeature("a"), DenseFeature("b"), DenseFeature("c")),
)
COLUMNS = {
    "user": ["ann", "bob", None],
    "item": [3, 39, 0],
    "history": [[1, 2], [], [39]],
    "shop": ["s1", "s2", "s3"],
    "a": [0.5, None, 2.0],
    "b": [1, 2, 3],
    "c": [True, False, True],
}
AS_TEXT = COLUMNS | {"history": ["1|2", "", "39"], "c": [1, 0, 1]}


def stream(columns: dict[str, object], **options: object) -> bytes:
    batch = pyarrow.RecordBatch.from_pydict(columns)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def service(predictor: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[InferenceService]:
    monkeypatch.setattr(predictor, "contract", CONTRACT)
    yield InferenceService(ModelRegistry({"tiny": predictor}))


def test_raw_rows_equal_their_ids(service: InferenceService):
    dense, features = CONTRACT.apply(AS_TEXT)
    expected = decoded(service, "Predict", codec.encode_predict_request(dense, features))
    assert decoded(service, "Predict", pb.PredictRequest(raw=stream(COLUMNS)).SerializeToString()) == expected
    lists_of_text = [["1", "2"], [], ["39"]]
    text, large = pyarrow.string(), pyarrow.large_string()  # as polars and pandas have it
    for kind in (pyarrow.list_(text), pyarrow.list_(large), pyarrow.large_list(large)):
        rows = COLUMNS | {"history": pyarrow.array(lists_of_text, kind)}
        assert decoded(service, "Predict", pb.PredictRequest(raw=stream(rows)).SerializeToString()) == expected


def test_lists_of_one_size_and_lists_that_are_all_empty(service: InferenceService):
    for lists, texts in (
        (pyarrow.array([[1, 2], None, [3, 39]], pyarrow.list_(pyarrow.int32(), 2)), ["1|2", None, "3|39"]),
        (pyarrow.array([[], None, []]), ["", None, ""]),  # a list of nulls, for Arrow
    ):
        expected = decoded(
            service, "Predict", codec.encode_predict_request(*CONTRACT.apply(AS_TEXT | {"history": texts}))
        )
        rows = stream(COLUMNS | {"history": lists})
        assert decoded(service, "Predict", pb.PredictRequest(raw=rows).SerializeToString()) == expected


def test_both_clients_send_rows(service: InferenceService, predictor: object):
    dense, features = CONTRACT.apply(AS_TEXT)
    expected = predictor.predict(dense, features)["output"]
    table = pyarrow.table(COLUMNS)
    halves = pyarrow.concat_tables([table.slice(0, 1), table.slice(1)])
    encoded = table.set_column(0, "user", table["user"].dictionary_encode())
    in_chunks = {name: halves[name] for name in COLUMNS}
    forms = [COLUMNS, table, halves, encoded, table.to_batches()[0], stream(COLUMNS), in_chunks]
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        if find_spec("pandas") is not None:
            import pandas

            frame = pandas.DataFrame(COLUMNS)
            forms += [frame, frame.assign(shop=frame.shop.astype("category"))]
        for rows in forms:
            assert torch.equal(client.predict_raw(rows)["output"], expected), type(rows)
        with pytest.raises(InputError, match="'item', which is missing"):
            client.predict_raw({key: value for key, value in COLUMNS.items() if key != "item"})

        async def ask() -> torch.Tensor:
            async with AsyncInferenceClient(server.target, timeout=60) as mine:
                return (await mine.predict_raw(COLUMNS))["output"]

        assert torch.equal(run_on_loop(ask(), timeout=90), expected)


class Lent:
    """Rows as another library lends them through Arrow's PyCapsule interface."""

    def __init__(self, rows: object) -> None:
        self.rows = rows

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.rows.__arrow_c_stream__(requested_schema)


def test_views_and_dictionaries_are_sent_as_plain_columns():
    pa = pyarrow
    text, ids = ["ann", None, "bob", "ann"], [[1, 7], None, [], [2]]
    words = [["1", "7"], None, [], ["2"]]
    codes = pa.DictionaryArray.from_arrays(
        pa.array([0, None, 1, 0], pa.uint32()), pa.array(["ann", "bob"], pa.string_view())
    )
    nested = pa.ListArray.from_arrays(
        pa.array([0, 2, 2, 2, 3], pa.int32()),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), pa.array(["1", "7", "2"], pa.string_view())),
        mask=pa.array([False, True, False, False]),
    )
    columns = {
        "view": (pa.array(text, pa.string_view()), text),
        "codes": (codes, text),
        "plain codes": (pa.array(text).dictionary_encode(), text),
        "lists": (pa.array(ids, pa.list_view(pa.int64())), ids),
        "narrow lists": (pa.array(ids, pa.list_view(pa.int32())), ids),
        "large lists": (pa.array(ids, pa.large_list_view(pa.int64())), ids),
        "texts": (pa.array(words, pa.list_view(pa.string_view())), words),
        "views": (pa.array(words, pa.list_(pa.string_view())), words),
        "lists of codes": (nested, words),
        "pairs": (pa.array([["a", "b"], None, ["c", "d"], ["e", None]], pa.list_(pa.string_view(), 2)), None),
    }
    table = pa.table({name: column for name, (column, _) in columns.items()})
    halves = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    mapping = {name: column for name, (column, _) in columns.items()}
    lent = {name: Lent(pa.chunked_array(column)) for name, column in mapping.items()}
    for rows in (table, halves, Lent(table), Lent(halves), table.to_batches()[0], mapping, lent):
        messages = [message.type for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(as_raw(rows)))]
        assert messages == ["schema", "record batch"]
        found = pa.ipc.open_stream(as_raw(rows)).read_all()
        assert found.to_pylist() == table.to_pylist()
        for name, (_, values) in columns.items():
            assert values is None or found[name].to_pylist() == values
            assert not any(kind in str(found.schema.field(name).type) for kind in ("view", "dictionary"))
    assert pa.ipc.open_stream(as_raw(table.slice(2))).read_all().to_pylist() == table.slice(2).to_pylist()


def test_polars_rows(service: InferenceService):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    expected = decoded(service, "Predict", codec.encode_predict_request(*CONTRACT.apply(AS_TEXT)))
    frame = polars.DataFrame(COLUMNS)
    coded = frame.with_columns(
        polars.col("user").cast(polars.Categorical),
        polars.col("history").cast(polars.List(polars.String)).cast(polars.List(polars.Categorical)),
    )
    for rows in (frame, coded, {name: frame[name] for name in COLUMNS}, {name: coded[name] for name in COLUMNS}):
        assert decoded(service, "Predict", pb.PredictRequest(raw=as_raw(rows)).SerializeToString()) == expected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([1, 2], "got list"),
        (Lent(pyarrow.chunked_array([[1, 2]])), "^rows: "),
        ({"a": [1], "b": [1, 2]}, "length"),
        ({"a": [1, "x"]}, "rows: "),
        (pyarrow.table({"a": []}), "^rows: got none, expected columns of at least one row"),
        ({"a": []}, "^rows: got none, expected columns of at least one row"),
        ({}, "^rows: got none, expected columns of at least one row"),
    ],
)
def test_rows_that_are_none_are_refused(rows: object, words: str):
    with pytest.raises(InputError, match=words):
        as_raw(rows)


def test_what_is_no_stream_of_one_batch_is_refused(service: InferenceService):
    limits, good = Limits(), stream(COLUMNS)
    for data, words in (
        (b"nothing", "not an Arrow IPC stream|an Arrow stream of nothing"),
        (stream(COLUMNS, compression="zstd"), "compressed"),
        (stream(COLUMNS | {"history": [["1|2"], [], []]}), r"a value with '\|' in it"),
        (stream(COLUMNS | {"user": [["a"], [], []]}), "'user' holds lists"),
        (stream(COLUMNS | {"history": [[None, 1], [], []]}), "a list with a null"),
        (stream({k: v for k, v in COLUMNS.items() if k != "item"}), "'item', which is missing"),
        (stream({k: [] for k in COLUMNS}), "got 0 rows, expected 1 to"),
    ):
        with pytest.raises(InputError, match=words):
            read_raw(data, CONTRACT, limits)
    with pytest.raises(InputError, match="no feature contract"):
        read_raw(good, None, limits)
    with pytest.raises(InputError, match="got 3 rows, expected 1 to 2"):
        read_raw(good, CONTRACT, Limits(max_batch=2))
    dense, features = CONTRACT.apply(AS_TEXT)
    with pytest.raises(InputError, match="raw rows hold all the inputs"):
        decoded(
            service,
            "Predict",
            codec.encode_predict_request(dense, features) + pb.PredictRequest(raw=good).SerializeToString(),
        )


def test_damaged_streams_raise_nothing_else():
    rng, good, refused = random.Random(5), stream(COLUMNS), 0
    for _ in range(400):
        data = bytearray(good[: rng.randrange(len(good))] if rng.random() < 0.3 else good)
        for _ in range(rng.randrange(1, 6) if data else 0):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            dense, *_ = read_raw(bytes(data), CONTRACT, Limits())
            assert dense.dtype == torch.float32
        except InputError:
            refused += 1
    assert refused > 100


SHARED = {"user": ["ann"], "history": [[1, 2]], "b": [4]}
EACH = {name: column for name, column in COLUMNS.items() if name not in SHARED}


def test_a_row_that_applies_to_all_rows(predictor: object, service: InferenceService):
    dense, features = CONTRACT.apply(AS_TEXT | {"user": ["ann"] * 3, "history": ["1|2"] * 3, "b": [4] * 3})
    expected = predictor.predict(dense, features)["output"]
    found = read_raw(stream(EACH), CONTRACT, Limits(), None, stream(SHARED))
    assert torch.equal(found[0], dense)
    assert (found[1].keys(), found[2].keys()) == (["item", "shop"], ["user", "history"])
    numbers = {"a": [0.5], "b": [4], "c": [1]}
    rest = {name: column for name, column in COLUMNS.items() if name not in numbers}
    assert read_raw(stream(rest), CONTRACT, Limits(), None, stream(numbers))[2] is None
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        torch.testing.assert_close(client.predict_raw(EACH, context=SHARED)["output"], expected)
        features_too = {"user": ["ann"], "item": [3], "history": [[1, 2]], "shop": ["s1"]}
        same = client.predict_raw({"a": [0.5, 2], "b": [4, 4], "c": [1, 0]}, context=features_too)["output"]
        repeated = {name: column * 2 for name, column in (features_too | {"history": ["1|2"]}).items()}
        dense, features = CONTRACT.apply(repeated | {"a": [0.5, 2], "b": [4, 4], "c": [1, 0]})
        torch.testing.assert_close(same, predictor.predict(dense, features)["output"])

        async def ask() -> torch.Tensor:
            async with AsyncInferenceClient(server.target, timeout=60) as mine:
                return (await mine.predict_raw(EACH, context=SHARED))["output"]

        torch.testing.assert_close(run_on_loop(ask(), timeout=90), expected)
        with pytest.raises(InputError, match="context: column 'user' is also in the rows"):
            client.predict_raw(COLUMNS, context=SHARED)


def test_a_context_that_does_not_fit_is_refused(service: InferenceService):
    for rows, context, words in (
        (EACH, {name: column * 2 for name, column in SHARED.items()}, "context: got 2 rows, expected one"),
        (EACH, SHARED | {"user": [["a"]]}, "^raw_context: column 'user' holds lists"),
        (EACH, SHARED | {"history": [[40]]}, "history"),
        (EACH, {"user": ["ann"]}, "reads columns 'history', 'b', which are missing"),
        ({"z": [1]}, {name: column[:1] for name, column in COLUMNS.items()}, "context: it has all columns"),
    ):
        with pytest.raises(InputError, match=words):
            read_raw(stream(rows), CONTRACT, Limits(), None, stream(context))
    with pytest.raises(
        InputError, match=r"^raw_context: 7 bytes are not an Arrow|^raw_context: got an Arrow stream of"
    ):
        read_raw(stream(EACH), CONTRACT, Limits(), None, b"nothing")
    with pytest.raises(InputError, match="raw_context: got it without raw"):
        decoded(service, "Predict", pb.PredictRequest(raw_context=stream(SHARED)).SerializeToString())


def test_many_rows_with_one_context(predictor: object):
    context = {"user": [[3, 9]], "history": [[1, 2]]}
    rows = [{"item": [at], "shop": [], "dense": [0.5, at, -2.0]} for at in range(5)]
    dense, features, _ = batch_of(rows)
    expected = predictor.predict(dense, features, context)["output"]
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        found = [row.outputs["output"] for row in client.predict_many(rows, batch_size=2, context=context)]
        torch.testing.assert_close(torch.stack(found), expected)

        async def ask() -> list[torch.Tensor]:
            async with AsyncInferenceClient(server.target, timeout=60) as mine:
                return [row.outputs["output"] async for row in mine.predict_many(rows, context=context)]

        torch.testing.assert_close(torch.stack(run_on_loop(ask(), timeout=90)), expected)
        twice = client.predict_many([rows[0] | {"user": [1]}], context=context)
        assert "user" in str(next(iter(twice)).error)


def test_context_on_the_wire(predictor: object):
    from tests.serving.conftest import make_request

    service = InferenceService(ModelRegistry({"tiny": predictor}))
    dense, features = make_request(1, 5, keys=["item", "shop"])
    context = make_request(2, 1, keys=["user", "history"])[1]
    data = codec.encode_predict_request(dense, features, context=context)
    got = codec.decode_predict_response(decoded(service, "Predict", data))[0]["output"]
    assert torch.equal(got, predictor.predict(dense, features, context)["output"])
    calls = [service.decode("Predict", each) for each in (data, codec.encode_predict_request(*make_request(3, 2)))]
    merged = [codec.decode_predict_response(answer)[0]["output"] for answer in run_now(service.run(calls))]
    torch.testing.assert_close(merged[0], got, rtol=0, atol=1e-6)
    assert merged[1].shape == (2, 1)
    assert calls[0].key == calls[1].key
