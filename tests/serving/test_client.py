"""The clients, blocking and asyncio: every form of ids gives the same answer; only safe calls are retried."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.wrappers_pb2 import BytesValue

from recinfer.columns import FeatureArrays, as_features, as_matrix
from recinfer.errors import DeadlineError, InputError, NotFoundError, RecinferError, UnavailableError
from recinfer.inference.predictor import Predictor
from recinfer.input_arrays import as_input
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.client.torchserve import TorchServeClient
from recinfer.serving.server.server import Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.loop import run_on_loop
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.ports import free_port
from tests.serving.conftest import make_request
from tests.serving.remote.test_frames import Proxy

USER, HISTORY = [3, 9, 1], [[1, 2], [], [39]]
EXPECTED = KeyedJaggedTensor(
    ["user", "history"], torch.tensor([3, 9, 1, 1, 2, 39]), lengths=torch.tensor([1, 1, 1, 2, 0, 1])
)


def check(found: FeatureArrays) -> None:
    assert list(found.keys) == EXPECTED.keys() and found.batch == 3
    assert found.values.dtype == np.int64 and found.lengths.dtype == np.int32
    assert found.values.tolist() == EXPECTED.values().tolist()
    assert found.lengths.tolist() == EXPECTED.lengths().tolist()


@pytest.mark.parametrize(
    "data", [[[0.5, True]], [[False, 2.0]], [[True, False]], ((1, np.True_),), [[0.0, 1.0], [1, 0], [3, False]]]
)
def test_a_bool_in_a_list_is_no_dense_number(data: Any) -> None:
    with pytest.raises(InputError, match=r"dense\[\d\]\[\d\]: got (true|false), expected a number"):
        as_matrix(data)


def test_arrays_of_flags_are_ones_and_zeros_but_no_weights() -> None:
    flags = torch.tensor([[True, False]])
    for data in (flags, flags.numpy(), list(flags.numpy())):
        assert as_matrix(data).tolist() == [[1.0, 0.0]]
    assert as_matrix([[1, 0.0], [0, 1.0]]).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    lengths = torch.tensor([2], dtype=torch.int32)
    features = KeyedJaggedTensor(["user"], torch.tensor([1, 2]), torch.tensor([True, True]), lengths=lengths)
    with pytest.raises(InputError, match=r"features.weights: got bool values, expected numbers"):
        as_features(features)


def test_lists_and_arrays():
    check(as_features({"user": USER, "history": HISTORY}))
    check(as_features({"user": np.int32(USER), "history": [(1, 2), None, np.array([39])]}))
    check(as_features({"user": torch.tensor(USER), "history": HISTORY}))
    assert as_features({"pair": np.array([[1, 2], [3, 4]])}).lengths.tolist() == [2, 2]
    check(as_features(EXPECTED))


def test_ids_and_lists_of_them_mix():
    columns = {
        "a": [1, 2],
        "b": [[3], [4]],
        "c": [[], [5, 6]],
        "d": [[0], [1]],
        "e": [[9, 10], []],
        "f": [[1], [2**40]],
    }
    found = as_features(columns)
    assert found.values.tolist() == [1, 2, 3, 4, 5, 6, 0, 1, 9, 10, 1, 2**40]
    assert found.lengths.tolist() == [1, 1, 1, 1, 0, 2, 1, 1, 2, 0, 1, 1]
    arrays = as_features({name: np.array(column, object) for name, column in columns.items()})
    assert arrays.values.tolist() == found.values.tolist() and arrays.lengths.tolist() == found.lengths.tolist()


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_float32_become_infinite_without_a_warning() -> None:
    assert as_matrix([[1e300]]).tolist() == [[float("inf")]]
    weights = as_input("tags", ([1.0], [1], [1e300])).weights
    assert weights is not None and weights.tolist() == [float("inf")]


def test_integers_beyond_float64_are_refused() -> None:
    """JSON has integers of any size."""
    for rows in ([[10**400]], [[0.5, 10**400]]):
        with pytest.raises(InputError, match="dense: got a number beyond float64; expected rows of numbers"):
            as_matrix(rows)


def test_pandas_columns():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    check(as_features(pandas.DataFrame({"user": USER, "history": HISTORY})))
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    assert as_matrix(frame).tolist() == [[1, 3], [2, 4]]
    for missing in (None, float("nan"), pandas.NA):
        history = pandas.Series([HISTORY[0], missing, HISTORY[2]], dtype=object)
        check(as_features({"user": pandas.Series(USER), "history": history}))
    nullable = as_features({"user": pandas.Series([2**60 + 1, None, 3], dtype="Int64")})
    assert (nullable.values.tolist(), nullable.lengths.tolist()) == ([2**60 + 1, 3], [1, 0, 1])
    with pytest.raises(InputError, match="'user' more than once"):
        as_features(pandas.DataFrame([[1, 2]], columns=["user", "user"]))


def test_whole_floats_are_ids_where_pandas_made_them_for_what_is_missing():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for dtype in (None, "float32", "Float64"):
        found = as_features(pandas.DataFrame({"user": pandas.Series([3, None, 5], dtype=dtype)}))
        assert (found.values.tolist(), found.lengths.tolist()) == ([3, 5], [1, 0, 1])
    nothing = as_features(pandas.DataFrame({"user": [None, float("nan")]}))
    assert (nothing.values.tolist(), nothing.lengths.tolist()) == ([], [0, 0])
    for values in ([3.0, 5.0], [3.5, None], [float("inf"), None]):
        with pytest.raises(InputError, match=r"'user'.*expected integer ids"):
            as_features(pandas.DataFrame({"user": values}))
    for values, dtype in (([2**53, None], None), ([2**24, None], "float32")):
        with pytest.raises(InputError, match=r"'user'.*'Int64'"):
            as_features(pandas.DataFrame({"user": pandas.Series(values, dtype=dtype)}))


class Lent:
    """A column of another library that has only Arrow's PyCapsule interface."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.data.__arrow_c_stream__(requested_schema)


def test_columns_of_any_library_that_speaks_arrow():
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    users = pa.chunked_array([USER[:1], USER[1:]])
    codes = pa.array(USER, pa.int64()).dictionary_encode()
    nested = pa.ListArray.from_arrays(
        pa.array([0, 2, 2, 3], pa.int32()), pa.array([*HISTORY[0], *HISTORY[2]]).dictionary_encode()
    )
    for user in (users, codes, pa.chunked_array([codes])):
        for view in (pa.list_view, pa.large_list_view, pa.large_list):
            history = pa.chunked_array([pa.array(HISTORY, view(pa.int64()))])
            check(as_features({"user": Lent(pa.chunked_array(user)), "history": Lent(history)}))
            check(as_features(Lent(pa.table({"user": user, "history": history}))))
        check(as_features({"user": user, "history": nested}))
    two = Lent(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["user", "user"]))
    with pytest.raises(InputError, match="got column 'user' more than once"):
        as_features(two)
    strings = as_features({"user": Lent(pa.chunked_array([["a", "b"]]))}).strings
    assert strings is not None and strings.data == b"ab"
    with pytest.raises(InputError, match="features: "):
        as_features(Lent(users))
    assert as_matrix(Lent(pa.table({"a": [1, 2], "b": [0.5, 0.25]}))).tolist() == [[1.0, 0.5], [2.0, 0.25]]


def test_polars_columns():
    polars = pytest.importorskip("polars", reason="polars is not installed")
    check(as_features(polars.DataFrame({"user": USER, "history": HISTORY})))
    check(as_features({"user": polars.Series(USER), "history": polars.Series(HISTORY)}))
    found = as_features({"user": polars.Series([3, None, 5], dtype=polars.UInt32)})
    assert (found.values.tolist(), found.lengths.tolist()) == ([3, 5], [1, 0, 1])
    assert as_matrix(polars.DataFrame({"a": [1, 2]})).tolist() == [[1.0], [2.0]]


def test_pyarrow_columns():
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    check(as_features(pa.table({"user": USER, "history": HISTORY})))
    chunked = pa.chunked_array([[[1, 2]], [None, [39]]], type=pa.list_(pa.int32()))
    check(as_features(pa.table({"user": pa.array(USER, pa.int32()), "history": chunked})))
    assert as_features({"user": pa.array([1, None])}).lengths.tolist() == [1, 0]
    for kind in (pa.list_(pa.int64(), 2), pa.list_view(pa.int64())):
        found = as_features({"pair": pa.array([[0, 0], [1, 2], None, [3, 4]], kind)[1:]})
        assert (found.values.tolist(), found.lengths.tolist()) == ([1, 2, 3, 4], [2, 0, 2])
    for of in (pa.table, pa.record_batch):
        assert as_matrix(of({"a": [1.0, 2.0], "b": [3, 4], "c": [True, False]})).tolist() == [[1, 3, 1], [2, 4, 0]]
        assert np.isnan(as_matrix(of({"a": [1.0, None]}))).tolist() == [[False], [True]]
    with pytest.raises(InputError, match="'user' more than once"):
        as_features(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["user", "user"]))
    with pytest.raises(InputError, match="null among ids"):
        as_features({"user": pa.array([[1, None]])})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "got none"),
        ([1, 2], "got a list"),
        ({"user": "abc"}, "got a str"),
        ({"user": [1.5]}, "expected integer ids"),
        ({"user": [True]}, "expected integer ids"),
        ({"user": [[[1]]]}, "expected integer ids"),
        ({"user": [2**63]}, "expected ids of 64 bits"),
        ({"user": np.array([2**63], np.uint64)}, r"got 9223372036854775808, expected ids .* up to 2\^63 - 1"),
        ({"user": [[3], [10**30]]}, "got an integer of more than 64 bits"),
        ({"user": np.zeros((1, 1, 1), int)}, "shape"),
        ({"user": [1], "shop": [1, 2]}, "got 2 samples, expected 1"),
    ],
)
def test_other_things_are_refused(data: Any, words: str):
    with pytest.raises(InputError, match=words):
        as_features(data)


def test_masked_values_are_not_ids():
    masked = np.ma.array([[1, 2], [3, 4], [5, 6]], mask=[[0, 1], [1, 1], [0, 0]])
    features = as_features({"user": np.ma.array([1, 49, 7], mask=[0, 1, 0]), "clicks": masked})
    assert features.lengths.tolist() == [1, 0, 1, 1, 0, 2]
    assert features.values.tolist() == [1, 7, 1, 5, 6]


def test_arrays_of_no_dimension_are_ids():
    assert as_features({"user": [np.array(3), np.int32(4), torch.tensor(5)]}).values.tolist() == [3, 4, 5]


@pytest.mark.parametrize("name", [1, None, "\ud800"])
def test_names_are_text(name: Any):
    with InferenceClient("127.0.0.1:1") as client, pytest.raises(InputError, match="features: got names"):
        client.lookup({name: [1]})
    for what in ("model", "version"):
        with pytest.raises(InputError, match=f"{what}: got .*expected text"):
            InferenceClient("127.0.0.1:1", **{what: name})


def test_dense_is_a_matrix_and_features_stand_behind_it():
    with pytest.raises(
        InputError, match="dense: got a dict, expected rows of numbers; features are the argument after it"
    ):
        as_matrix({"user": [1]})


def test_a_client_prints_its_target():
    with InferenceClient("127.0.0.1:1") as client:
        assert repr(client) == "<InferenceClient of 127.0.0.1:1>"


WRONG_TARGETS = ["http://127.0.0.1:8501", "grpc://localhost:8500", "8500", "", None]
# gRPC connects to port 443 of a target without a port.
WITHOUT_A_PORT = ["localhost", "ranker.example", "10.0.0.1", "localhost:", "[::1]", "::1", "::1:8500", "dns:///ranker"]


@pytest.mark.parametrize("target", [*WRONG_TARGETS, *WITHOUT_A_PORT])
def test_a_target_is_a_host_and_a_port(target: Any):
    def torchserve(target: Any) -> TorchServeClient:
        return TorchServeClient(target, "tiny")

    for make in (InferenceClient, AsyncInferenceClient, AdminClient, torchserve):
        with pytest.raises(InputError, match=r"target: got .*, expected HOST:PORT of the server's gRPC port"):
            make(target)


@pytest.mark.parametrize(
    "target",
    [
        "localhost:8500",
        "[::1]:8500",
        "a_b.example:1",
        "dns:ranker:8500",
        "dns:///ranker:8500",
        "dns://8.8.8.8/ranker:8500",
        "unix:server.sock",
        "unix:///run/server.sock",
        "unix-abstract:name",
        "ipv4:10.0.0.1:8500,10.0.0.2:8500",
    ],
)
def test_all_forms_of_grpcs_addresses_are_targets(target: str):
    InferenceClient(target).close()


def test_a_client_of_the_http_port_is_told_so(predictor: Predictor):
    with (
        Server({"tiny": predictor}, http_port=0) as both,
        InferenceClient(f"127.0.0.1:{both.http_port}", retries=0, timeout=60) as client,
        pytest.raises(UnavailableError, match=r"it speaks HTTP/1.1, .* give the server's gRPC port \(--port\)"),
    ):
        client.get_model()


@pytest.mark.parametrize("context", [{"user": "x"}, {"user": [1], "history": [1, 2]}])
def test_errors_of_a_context_name_it(client: InferenceClient, predictor: Predictor, context: Any):
    dense, candidates = make_request(3, 5, keys=["item", "shop"])
    for predict in (client.predict, predictor.predict):
        with pytest.raises(
            InputError, match=r"^context: .*\(a context is one sample: a list with one entry for each feature\)"
        ):
            predict(dense, candidates, context=context)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "3"])
def test_timeout_must_be_positive(timeout: Any):
    with pytest.raises(InputError, match="timeout: got"):
        InferenceClient("127.0.0.1:1", timeout=timeout)
    with InferenceClient("127.0.0.1:1") as client, pytest.raises(InputError, match="timeout: got"):
        client.lookup({"user": [1]}, timeout=timeout)


def test_dense_is_a_matrix():
    masked = np.ma.array([[1.0]], mask=[[True]])
    for data in ([1.0], [[1.0], [1.0, 2.0]], [["x"]], [["1"]], [[1j]], masked):
        with pytest.raises(InputError, match="dense"):
            as_matrix(data)


def test_both_clients_give_the_predictors_numbers(server: Server, client: InferenceClient, predictor: Predictor):
    dense, kjt = make_request(3, 4)
    expected = predictor.predict(dense, kjt)["output"]
    bags = {key: [bag.tolist() for bag in jagged.to_dense()] for key, jagged in kjt.to_dict().items()}
    torch.testing.assert_close(client.predict(dense.tolist(), bags)["output"], expected)

    async def ask() -> None:
        async with AsyncInferenceClient(server.target, timeout=60) as mine:
            many = await asyncio.gather(*(mine.predict(dense, bags) for _ in range(8)), mine.lookup(kjt))
            for answer in many[:-1]:
                torch.testing.assert_close(answer["output"], expected)
            torch.testing.assert_close(many[-1].pooled.values(), predictor.lookup(kjt).pooled.values())
            assert (await mine.get_model()).version == "3"
            with pytest.raises(InputError, match="'user'"):
                await mine.lookup({"user": [99]})
            async with AsyncInferenceClient(server.target, model="other", timeout=60) as other:
                with pytest.raises(NotFoundError):
                    await other.get_model()
        with pytest.raises(UnavailableError, match="make a new client"):
            await mine.get_model()

    run_on_loop(ask(), timeout=90)


def test_a_closed_async_client_ends_its_calls_with_an_error():
    """Not with a CancelledError, which the awaiting code would take for the cancellation of its own task."""
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def ask() -> None:
            client = AsyncInferenceClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout=60)
            call = asyncio.create_task(client.lookup({"user": [1]}))
            cancelled = asyncio.create_task(client.lookup({"user": [1]}))
            connection, _ = await asyncio.to_thread(silent.accept)  # both calls are under way
            cancelled.cancel()
            await asyncio.wait([cancelled])
            assert cancelled.cancelled()
            await client.close()
            with pytest.raises(UnavailableError, match="make a new client"):
                await asyncio.wait_for(call, 30)
            connection.close()

        run_on_loop(ask(), timeout=60)


def test_an_async_client_may_be_made_before_its_loop(server: Server):
    client = AsyncInferenceClient(server.target, timeout=60)

    async def ask() -> str:
        return (await client.get_model()).version

    async def ask_and_close() -> None:
        assert await ask() == "3"
        with pytest.raises(InputError, match="one for each loop"):
            await asyncio.to_thread(asyncio.run, ask())
        await client.close()

    asyncio.run(ask_and_close())


def test_any_timeout_may_be_given(server: Server):
    for seconds in (float("inf"), 1e12):
        with InferenceClient(server.target, timeout=seconds) as client:
            assert client.get_model().version == "3"
        with AdminClient(server.target, timeout=seconds) as admin, pytest.raises(RecinferError, match="another kind"):
            admin.list_models()


def test_a_description_prints_a_line_for_each_input_and_embedding(server: Server):
    with InferenceClient(server.target, timeout=60) as client:
        about = client.get_model()
    first, *lines = str(about).splitlines()
    assert repr(about) == f"<{first}>" and first.startswith("tiny 3: ")
    assert len(lines) == len(about.inputs) + len(about.features)
    one = about.features[0]
    assert f"  emb  {one.name}: a vector of {one.dim} per sample, from the {one.rows:,} rows of {one.table}" in lines


def test_both_clients_wait_for_a_server(server: Server):
    with InferenceClient(server.target, timeout=60) as client:
        client.wait_until_ready(60)
        assert client.is_ready()
    with (
        InferenceClient(f"127.0.0.1:{free_port()}") as nobody,
        pytest.raises(UnavailableError, match=r"not ready after 0\.2 s"),
    ):
        nobody.wait_until_ready(0.2)

    async def ask() -> None:
        async with AsyncInferenceClient(server.target, timeout=60) as mine:
            await mine.wait_until_ready(60)
            assert await mine.is_ready()
        async with AsyncInferenceClient(f"127.0.0.1:{free_port()}") as nobody:
            assert not await nobody.is_ready(timeout=1)
            with pytest.raises(UnavailableError, match=r"not ready after 0\.2 s"):
                await nobody.wait_until_ready(0.2)

    run_on_loop(ask(), timeout=90)


def test_both_clients_send_a_context(server: Server, client: InferenceClient, predictor: Predictor):
    dense, candidates = make_request(3, 5, keys=["item", "shop"])
    _, user = make_request(4, 1, keys=["history", "user"])
    expected = predictor.predict(dense, candidates, user)["output"]
    whole = {key: value.to_dense() for key, value in candidates.to_dict().items()}
    whole |= {key: value.to_dense() * 5 for key, value in user.to_dict().items()}
    ids = {key: [bag.long().tolist() for bag in bags] for key, bags in whole.items()}
    as_lists = {key: [bag.long().tolist() for bag in value.to_dense()] for key, value in user.to_dict().items()}
    torch.testing.assert_close(client.predict(dense, ids)["output"], expected, rtol=0, atol=1e-6)
    for context in (user, as_lists):
        assert torch.equal(client.predict(dense, candidates, context=context)["output"], expected)
    of_user = {
        **as_lists,
        "dense": dense[:1].double().tolist(),
    }  # one matrix for all candidates, as lists of 64-bit numbers
    found = client.predict(None, candidates, context=of_user)["output"]
    assert torch.equal(found, client.predict(dense[:1].repeat(5, 1), candidates, context=user)["output"])
    with pytest.raises(InputError, match=r"dense: got none, expected float32 \[5, \d+\]"):
        client.predict(None, candidates, context=user)
    with pytest.raises(InputError, match="context: feature 'user' is also in features"):
        client.predict(dense, KeyedJaggedTensor.concat([candidates, repeated_user()]), context=user)
    with pytest.raises(InputError, match="context: got 2 samples, expected 1"):
        client.predict(dense, candidates, context={"user": [1, 2], "history": [[], []]})

    async def ask() -> torch.Tensor:
        async with AsyncInferenceClient(server.target, timeout=60) as mine:
            return (await mine.predict(dense, candidates, context=user))["output"]

    assert torch.equal(run_on_loop(ask(), timeout=90), expected)


def repeated_user() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["user"], torch.ones(5, dtype=torch.int64), lengths=torch.ones(5, dtype=torch.int32))


class Refusing(grpc.GenericRpcHandler):
    """A server that refuses so many calls with one code, then answers."""

    def __init__(self, code: grpc.StatusCode, times: int, pushback: str | None) -> None:
        self.code, self.times, self.pushback, self.calls = code, times, pushback, 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        self.calls += 1
        if self.calls <= self.times:
            if self.pushback is not None:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", self.pushback),))
            context.abort(self.code, "not now")
        return b""


@pytest.fixture
def refusing(request: pytest.FixtureRequest) -> Iterator[tuple[Refusing, str]]:
    handler = Refusing(*request.param)
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield handler, f"127.0.0.1:{port}"
        server.stop(None).wait()


UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("refusing", "calls", "answers"),
    [
        ((UNAVAILABLE, 2, None), 3, True),
        ((UNAVAILABLE, 3, None), 3, False),
        ((grpc.StatusCode.CANCELLED, 1, None), 2, True),  # of a server that is stopping
        ((EXHAUSTED, 1, "5"), 2, True),
        ((EXHAUSTED, 1, None), 1, False),  # a message that is too large
        ((EXHAUSTED, 1, "60000"), 2, True),  # waits at most a second
        ((grpc.StatusCode.INVALID_ARGUMENT, 1, None), 1, False),
        ((grpc.StatusCode.INTERNAL, 1, None), 1, False),
        ((grpc.StatusCode.DEADLINE_EXCEEDED, 1, None), 1, False),
    ],
    indirect=["refusing"],
)
def test_only_safe_calls_are_retried(refusing: tuple[Refusing, str], calls: int, answers: bool):
    handler, target = refusing

    def ask(work: Any) -> None:
        if answers:
            work()
        else:
            with pytest.raises(Exception, match=r"not now|did not answer"):
                work()
        assert handler.calls == calls
        handler.calls = 0

    with InferenceClient(target, timeout=60) as client:
        ask(client.get_model)

    async def asynchronous() -> None:
        async with AsyncInferenceClient(target, timeout=60) as mine:
            await mine.get_model()

    ask(lambda: run_on_loop(asynchronous(), timeout=90))


@pytest.mark.parametrize("refusing", [(UNAVAILABLE, 9, None)], indirect=True)
def test_no_retries_when_disabled(refusing: tuple[Refusing, str]):
    handler, target = refusing
    with InferenceClient(target, retries=0, timeout=60) as client, pytest.raises(UnavailableError):
        client.get_model()
    assert handler.calls == 1


def test_client_reconnects_soon_after_a_restart():
    """gRPC's own delay between reconnects grows to two minutes, in which a restarted server would have no callers."""
    looks = 0
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(0.05)
        with (
            InferenceClient(f"127.0.0.1:{nobody.getsockname()[1]}", retries=0) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            while (
                looks < 14
            ):  # with gRPC's own the fourteenth comes after nine minutes, and pytest ends a test after five
                asked = pool.submit(client.is_ready, timeout=0.1)
                with suppress(TimeoutError):
                    nobody.accept()[0].close()
                    looks += 1
                asked.result(30)


@pytest.mark.slow  # the time until a ping, and until it counts as lost
def test_a_torchserve_client_notices_a_dead_connection():
    reply = BytesValue(value=codec.encode_lookup_response(None, {}, 1, "3")).SerializeToString()

    class Stub(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(lambda data, context: reply)

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(Stub(),))
        proxy = Proxy(server.add_insecure_port("127.0.0.1:0"))
        server.start()
        with TorchServeClient(f"127.0.0.1:{proxy.port}", "tiny", timeout=30) as client:
            client.lookup({"user": [1]})
            proxy.fall_silent()
            with pytest.raises(UnavailableError, match="no answer from") as lost:
                client.lookup({"user": [1]})
        assert not isinstance(lost.value, DeadlineError)  # which comes after the 30 s
        server.stop(None).wait()
        proxy.close()


def test_the_two_clients_have_the_same_methods_with_the_same_arguments():
    def methods(client: type) -> dict[str, list[str]]:
        public = {name: getattr(client, name) for name in vars(client) if name[0] != "_" or name == "__init__"}
        return {name: list(map(str, inspect.signature(method).parameters.values())) for name, method in public.items()}

    assert methods(InferenceClient) == methods(AsyncInferenceClient)
    assert {"lookup", "predict", "predict_raw", "predict_many", "get_model", "close"} <= set(methods(InferenceClient))
