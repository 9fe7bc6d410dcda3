"""Strings as ids: their keys and indexes, requests in Python and through every protocol, and archives that break a rule."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recinfer.serving.wire._wire import read_request, split
from recinfer.vocabulary._strings import keys

import recinfer
from recinfer.archive.check import REQUESTS, read_requests
from recinfer.archive.reader import open_archive
from recinfer.archive.tensors import pack_tensors, unpack_tensors
from recinfer.cli.lookup import parse_features
from recinfer.cli.rows import read_rows
from recinfer.columns import as_features, strings_of
from recinfer.data.contract import FeatureContract, SparseFeature, Vocabulary
from recinfer.data.features import DenseFeature
from recinfer.errors import ArchiveError, ConfigError, InputError
from recinfer.inference.id_steps import IdCounts
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.verify import verify
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.wire import codec, json_codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.proto import open_inference_pb2 as oip
from recinfer.vocabulary import strings as own
from recinfer.vocabulary.index import HEADER_BYTES, build_index
from recinfer.vocabulary.info import StringInfo
from recinfer.vocabulary.options import read_vocabularies
from recinfer.vocabulary.plain import id_vocabularies
from recinfer.vocabulary.strings import StringRows, StringVocabulary, string_indexes, string_keys
from recinfer.vocabulary.table import TableVocabulary, even_segments
from tests.archive.models import NUM_DENSE, RANKER_ROWS, Ranker, make_archive
from tests.e2e.commands import run_json
from tests.hostile.damage import edit_manifest, rewrite
from tests.serving.paths import BytePath, decoded
from tests.serving.remote import test_direct as remote
from tests.vocabulary.strings import CITIES, ITEMS, STRINGS, both_requests, row_of, string_archive

# ---- keys


def test_keys_are_those_of_siphash() -> None:
    """The vectors of the authors' reference code: key 00 to 0f, messages 00, 00 01, ..."""
    expected = {
        0: 0x726FDB47DD0E0E31,
        1: 0x74F839C593DC67FD,
        7: 0xAB0200F58B01D137,
        8: 0x93F5F5799A932462,
        15: 0xA129CA6149BE45E5,
    }
    low, high = int.from_bytes(bytes(range(8)), "little"), int.from_bytes(bytes(range(8, 16)), "little")
    for size, value in expected.items():
        out = np.zeros(1, np.int64)
        keys(bytes(range(size)), None, np.array([size], np.int32), low, high, out)
        assert int(out.view(np.uint64)[0]) == value
        shifted = b"x" + bytes(range(size)) + b"y"
        keys(shifted, np.array([1], np.int64), np.array([size], np.int64), low, high, out)
        assert int(out.view(np.uint64)[0]) == value


@pytest.mark.parametrize(
    "data, starts, lengths",
    [(b"abc", None, [4]), (b"abc", None, [2]), (b"abc", None, [-1, 4]), (b"abc", [3], [1]), (b"abc", [-1], [1])],
)
def test_strings_outside_the_bytes_are_refused(data: bytes, starts: list[int] | None, lengths: list[int]) -> None:
    first = None if starts is None else np.array(starts, np.int64)
    with pytest.raises(ValueError, match="outside"):
        keys(data, first, np.array(lengths, np.int32), 0, 0, np.zeros(len(lengths), np.int64))


def test_strings_behind_their_lengths_are_taken_apart() -> None:
    data = b"\1\0\0\0a\0\0\0\0\2\0\0\0bc"
    assert split(data, 3) == (b"abc", np.array([1, 0, 2], np.int32).tobytes())
    assert split(memoryview(bytearray(data)), 3) == split(data, 3)
    assert split(b"", 0) == (b"", b"")
    for wrong, count in (
        (data, 2),
        (data, 4),
        (data[:-1], 3),
        (data + b"x", 3),
        (b"\xff\xff\xff\xff", 1),
        (data, -1),
        (b"a", 0),
    ):
        assert split(wrong, count) is None


def test_another_seed_is_taken_where_two_strings_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_collision(data: Any, lengths: Any, seed: int, starts: Any = None) -> Any:
        found = string_keys(data, lengths, seed, starts)
        if seed < 2:
            found[1] = found[0]
        return found

    monkeypatch.setattr(own, "string_keys", with_collision)
    ((info, index),) = string_indexes({"f": StringVocabulary(("a", "b", "c"))})
    assert (info.seed, index.shape.ids) == (2, 3)


def test_features_of_different_seeds_have_their_own_keys() -> None:
    def of_seed(seed: int) -> tuple[Any, Any]:
        ((info, _),) = string_indexes({f"f{seed}": StringVocabulary(("a", "b", "c"))})
        texts = strings_of("f", ("a", "b", "c"))
        found = string_keys(texts.data, texts.lengths, seed)
        rows = np.arange(3, dtype=np.int64)
        return replace(info, seed=seed), build_index(TableVocabulary(found, rows, info.rows, info.segments))

    counts = IdCounts(lambda by_feature: None, {"f0": 0, "f5": 1}, np.zeros((2, 2), np.int64))
    rows = StringRows([of_seed(0), of_seed(5)], counts)
    assert rows.rows(strings_of("f", ("c", "x", "b", "a"), ("f5", "f0")), [3, 1]).tolist() == [2, 3, 1, 0]
    assert rows.rows(strings_of("f", ("c", "x"), ("f5",)), [2]).tolist() == [2, 3]
    assert counts.found.tolist() == [[1, 0], [3, 2]]


# ---- in Python


@pytest.fixture(scope="module")
def served_archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Predictor]:
    root = string_archive(tmp_path_factory.mktemp("strings")).root
    return root, load(root)


Served = tuple[Path, Predictor]


def test_strings_read_the_rows_of_their_vocabulary(served_archive: Served) -> None:
    root, predictor = served_archive
    for batch in (1, 5, 40):
        dense, strings, rows = both_requests(batch, batch)
        expected = predictor.predict(dense, rows)["output"]
        assert torch.equal(predictor.predict(dense, strings)["output"], expected)
        found, wanted = predictor.lookup(strings), predictor.lookup(rows)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted.keys())  # noqa: SIM118 - not a dict
        part = {name: strings[name] for name in ("f_cat", "f_item")}
        assert torch.equal(predictor.lookup(part)["f_cat"], wanted["f_cat"])
    assert verify(root).ok


def test_columns_of_strings_have_the_forms_of_columns_of_integers(served_archive: Served) -> None:
    pa = pytest.importorskip("pyarrow")
    _, predictor = served_archive
    expected = predictor.lookup({"f_cat": [0, 1, 296]})["f_cat"]
    names = ["paris", "New York", "nowhere"]
    columns: list[Any] = [
        names,
        [[name] for name in names],
        np.array(names),
        np.array(names)[:, None],
        np.array(names, object),
        [name.encode() for name in names],
        pa.array(names),
        pa.array(names).dictionary_encode(),
        pa.array([[name] for name in names]),
    ]
    missing: list[Any] = [["paris", None], pa.array(["paris", None])]
    if importlib.util.find_spec("pandas"):
        import pandas

        columns += [pandas.Series(names), pandas.Series(names, dtype="category")]
        missing.append(pandas.Series(["paris", None]))
    for column in columns:
        assert torch.equal(predictor.lookup({"f_cat": column})["f_cat"], expected), type(column)
    for column in missing:
        assert as_features({"f_cat": column}).lengths.tolist() == [1, 0]
    mixed = as_features({"a": [1, 2], "b": ["x", "é"], "c": [[1], [2, 3]], "d": [["q"], []], "e": [[], []]})
    assert mixed.strings is not None and mixed.strings.data == "xéq".encode()
    assert (mixed.strings.keys, mixed.strings.lengths.tolist()) == (("b", "d"), [1, 2, 1])
    assert (mixed.values.tolist(), mixed.lengths.tolist()) == ([1, 2, 1, 2, 3], [1, 1, 1, 1, 1, 2, 1, 0, 0, 0])
    weighted = as_features({"a": [1, 2], "b": (["x", "yz"], [0.5, 2.0]), "c": [["q"], []]})
    half = weighted.rows(1, 2)
    assert half.strings is not None and (half.strings.keys, half.strings.data) == (("b", "c"), b"yz")
    assert (half.values.tolist(), half.lengths.tolist(), half.num_ids) == ([2], [1, 1, 0], 2)
    assert half.weights is not None and half.weights.tolist() == [2.0]


def test_requests_with_strings_share_runs_and_have_contexts(served_archive: Served) -> None:
    from recinfer.inference.together import PredictInputs

    _, predictor = served_archive
    requests, expected = [], []
    for batch in (1, 3, 2):
        dense, strings, rows = both_requests(batch, batch + 10)
        requests.append(PredictInputs(torch.from_numpy(dense), strings))
        expected.append(predictor.predict(dense, rows)["output"])
    for found, wanted in zip(predictor.predict_many(requests), expected):
        assert not isinstance(found, Exception)
        assert torch.allclose(found["output"], wanted, atol=1e-6)
    dense, strings, rows = both_requests(4, 3)
    user = {"f_user": [[3]], "f_cat": [["paris", "nowhere"]]}
    rest = {name: strings[name] for name in ("f_item", "f_hist")}
    wanted = predictor.predict(dense, {name: rows[name] for name in rest}, {"f_user": [[3]], "f_cat": [[0, 296]]})
    assert torch.equal(predictor.predict(dense, rest, user)["output"], wanted["output"])


@pytest.mark.parametrize(
    "features, message",
    [
        (
            {"f_user": ["a"]},
            "features['f_user']: got strings, expected integer ids; features that take strings: f_cat, f_hist",
        ),
        ({"f_item": ["a", 3]}, "features['f_item']: got strings and other values together"),
        ({"f_item": ["a", 1.5]}, "features['f_item']: got strings and other values together"),
        ({"f_item": ["a\ud800"]}, "lone surrogate"),
        ({"f_item": [[["a"]]]}, "expected"),
        ({"none": ["a"]}, "unknown features 'none'"),
        ({"f_item": ["a"], "f_cat": ["a", "b"]}, "got 2 samples, expected 1"),
    ],
)
def test_strings_that_fit_no_feature_are_refused(served_archive: Served, features: Any, message: str) -> None:
    with pytest.raises(InputError) as raised:
        served_archive[1].lookup(features)
    assert message in str(raised.value)


def test_known_and_unknown_strings_are_counted(served_archive: Served) -> None:
    _, predictor = served_archive
    before = predictor.intake.counts["known"]["f_cat"], predictor.intake.counts["unknown"]["f_cat"]
    predictor.lookup({"f_cat": [["paris", "nowhere", ""], []]})
    predictor.lookup({"f_cat": [[5, 6]]})  # rows, not strings
    assert (predictor.intake.counts["known"]["f_cat"], predictor.intake.counts["unknown"]["f_cat"]) == (
        before[0] + 2,
        before[1] + 1,
    )
    assert "f_user" not in predictor.intake.counts["known"]


# ---- messages


def test_messages_that_contradict_themselves_are_refused(served_archive: Served) -> None:
    good = {
        "keys": ["f_user", "f_cat"], "batch_size": 1, "lengths": np.array([1, 2], np.int32).tobytes(), "string_keys": ["f_cat"],
        "values": np.array([3], np.int64).tobytes(), "strings": b"parisx", "string_lengths": np.array([5, 1], np.int32).tobytes(),
    }  # fmt: skip
    found = codec.decode_bags(pb.JaggedFeatures(**good), Limits())
    assert found.values.tolist() == [3, 0, 0]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"string_keys": ["f_item"]}, "string_keys: got 'f_item'"),
        ({"string_keys": ["f_cat", "f_cat"]}, "string_keys: got 'f_cat'"),
        ({"string_lengths": good["string_lengths"][:4]}, "string_lengths: got 4 bytes"),  # type: ignore[index]
        (
            {"string_lengths": np.array([7, -1], np.int32).tobytes()},
            "string_lengths: got lengths of 6 bytes in all, the least -1",
        ),
        ({"strings": b"paris"}, "string_lengths: got lengths of 6 bytes in all"),
        ({"values": np.array([3, 4], np.int64).tobytes()}, "features.values: got 16 bytes"),
        ({"string_keys": []}, "features.values: got 8 bytes"),
    ]
    for change, message in wrong:
        with pytest.raises(InputError) as raised:
            codec.decode_bags(pb.JaggedFeatures(**{**good, **change}), Limits())
        assert message in str(raised.value)


def test_a_server_from_before_strings_refuses_them(served_archive: Served) -> None:
    """Fields 8 to 10 are unknown to it, so that ids are missing."""
    request = pb.LookupRequest.FromString(codec.encode_lookup_request({"f_user": [3], "f_cat": ["paris"]}))
    for field in ("string_keys", "strings", "string_lengths"):
        request.features.ClearField(field)
    with pytest.raises(InputError, match=r"features\.values: got 8 bytes"):
        codec.decode_bags(request.features, Limits())


def test_requests_with_integers_are_answered_from_their_bytes(served_archive: Served) -> None:
    """As without strings; a request with strings has fields that the byte paths leave to the decoded path."""
    service = InferenceService(ModelRegistry({"m": served_archive[1]}))
    paths = BytePath(service, threads=2)
    for batch in (1, 40):
        dense, strings, rows = both_requests(batch, batch)
        message = codec.encode_predict_request(dense, rows, "m")
        assert read_request(message) is not None
        assert paths.predict(message) == [decoded(service, "Predict", message)]
        by_string = codec.encode_predict_request(dense, strings, "m")
        assert read_request(by_string) is None
        assert decoded(service, "Predict", by_string) == decoded(service, "Predict", message)
    paths.close()


def test_json_of_torchserve_takes_strings(served_archive: Served) -> None:
    service = InferenceService(ModelRegistry({"m": served_archive[1]}))
    answers = []
    for cities in ([["paris"], ["nowhere", ""]], [[0], [296, 2]]):
        message = json_codec.lookup_request({"features": {"f_cat": cities, "f_user": [1, 2]}})
        answers.append(next(iter(drained(service, message))))
    assert answers[0] == answers[1]


def drained(service: InferenceService, message: bytes) -> Iterator[bytes]:
    from recinfer.inference.lookups import run_now

    for answer in run_now(service.run([service.decode("Lookup", message)])):
        assert not isinstance(answer, Exception), answer
        yield answer


# ---- protocols


def posted(url: str, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        found = json.loads(error.read())
    return found


def prefixed(bags: list[list[str]]) -> bytes:
    return b"".join(len(one.encode()).to_bytes(4, "little") + one.encode() for bag in bags for one in bag)


def tensors_of(dense: Any, strings: dict[str, Any], form: str) -> tuple[list[dict[str, Any]], bytes]:
    """Tensors of the Open Inference Protocol as JSON, and the binary ones."""
    tensors: list[dict[str, Any]] = [
        {"name": "dense", "datatype": "FP32", "shape": list(dense.shape), "data": dense.reshape(-1).tolist()}
    ]
    rest = b""
    for name, bags in strings.items():
        flat = [one for bag in bags for one in bag]
        datatype = "BYTES" if name in STRINGS else "INT64"
        tensor: dict[str, Any] = {"name": f"{name}.values", "datatype": datatype, "shape": [len(flat)], "data": flat}
        if form == "binary" and datatype == "BYTES":
            raw = prefixed(bags)
            del tensor["data"]
            tensor["parameters"] = {"binary_data_size": len(raw)}
            rest += raw
        lengths = list(map(len, bags))
        tensors += [tensor, {"name": f"{name}.lengths", "datatype": "INT32", "shape": [len(bags)], "data": lengths}]
    return tensors, rest


def over_oip_grpc(channel: Any, dense: Any, strings: dict[str, Any], raw: bool) -> np.ndarray:
    request = oip.ModelInferRequest(model_name="small")
    for tensor in tensors_of(dense, strings, "json")[0]:
        given = request.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        data, kind = tensor["data"], tensor["datatype"]
        if raw and kind == "BYTES":
            request.raw_input_contents.append(prefixed([data]))
        elif raw:
            dtype = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}[kind]
            request.raw_input_contents.append(np.array(data, dtype).tobytes())
        elif kind == "BYTES":
            given.contents.bytes_contents.extend(one.encode() for one in data)
        else:
            field = {"FP32": "fp32_contents", "INT64": "int64_contents", "INT32": "int_contents"}[kind]
            getattr(given.contents, field).extend(data)
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    answer = oip.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=60))
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


def test_every_protocol_takes_strings(served_archive: Served) -> None:
    import grpc

    root, predictor = served_archive
    dense, strings, rows = both_requests(6, 1, plain=True)
    strings["f_cat"][0] = ["東京", "a\0b", "", "nowhere"]
    rows["f_cat"][0] = [3, 4, 2, 296]
    expected = predictor.predict(dense, rows)["output"].numpy()
    with recinfer.serve(root, http_port=0, metrics_port=0) as server, grpc.insecure_channel(server.target) as channel:
        client = server.client(timeout=60)
        assert np.array_equal(np.asarray(client.predict(dense, strings)["output"]), expected)
        assert set(client.get_model().string_features) == set(STRINGS)
        scored = client.predict_many(
            [{"dense": dense[at].tolist(), **{n: b[at] for n, b in strings.items()}} for at in range(6)]
        )
        assert np.allclose([np.asarray(row.outputs["output"]) for row in scored if row.outputs], expected, rtol=1e-5)
        rest = {name: strings[name] for name in ("f_item", "f_hist")}
        context = {"f_user": [[3]], "f_cat": [["paris"]]}
        wanted = predictor.predict(dense, {name: rows[name] for name in rest}, {"f_user": [[3]], "f_cat": [[0]]})[
            "output"
        ]
        assert np.allclose(np.asarray(client.predict(dense, rest, context=context)["output"]), wanted, rtol=1e-5)
        with pytest.raises(InputError, match=r"features\['f_user'\]: got strings, expected integer ids"):
            client.lookup({"f_user": ["a"]})

        v1 = f"{server.url}/v1/models/small:predict"
        instances = [{"dense": dense[at].tolist(), **{n: b[at] for n, b in strings.items()}} for at in range(6)]
        found = posted(v1, {"instances": instances})
        assert np.allclose(np.asarray(found["predictions"], np.float32).reshape(-1), expected, rtol=1e-5)
        found = posted(v1, {"inputs": {"dense": dense.tolist(), **strings}})
        assert np.allclose(np.asarray(found["outputs"], np.float32).reshape(-1), expected, rtol=1e-5)
        found = posted(v1, {"instances": [{"dense": row.tolist(), **{n: rest[n][at] for n in rest}} for at, row in enumerate(dense)],
                            "context": {"f_user": 3, "f_cat": "paris"}})  # fmt: skip
        assert np.allclose(np.asarray(found["predictions"], np.float32).reshape(-1), wanted, rtol=1e-5)
        lookup = f"{server.url}/v1/models/small:lookup"
        for cell, message in (
            ({"f_user": "a"}, "instances[0]['f_user']: got 'a', expected ids, which are whole numbers"),
            (
                {"f_cat": ["paris", 3]},
                "instances[0]['f_cat']: got 'paris', expected ids, which are strings or whole numbers, one kind",
            ),
            ({"f_cat": 1.5}, "instances[0]['f_cat']: got 1.5, expected ids, which are strings or whole numbers"),
            ({"f_cat": "\ud800"}, "lone surrogate"),
        ):
            assert message in posted(lookup, {"instances": [cell]})["error"]
        for other, got in (
            (True, "true"),
            ([2**63], 2**63),
            ([[1]], "a list of 1"),
        ):  # not the string, which may be there
            error = posted(lookup, {"instances": [{"f_cat": "paris"}, {"f_cat": other}]})["error"]
            assert error.startswith(f"instances[1]['f_cat']: got {got}, expected")
        assert posted(lookup, {"instances": [{"f_cat": "paris"}, {"f_cat": ["paris"]}]}) == posted(
            lookup, {"instances": [{"f_cat": 0}, {"f_cat": [0]}]}
        )

        infer = f"{server.url}/v2/models/small/infer"
        for form in ("json", "binary"):
            tensors, raw = tensors_of(dense, strings, form)
            head = json.dumps({"inputs": tensors}).encode()
            given = posted(infer, head + raw, {"Inference-Header-Content-Length": str(len(head))})
            assert np.allclose(np.asarray(given["outputs"][0]["data"], np.float32), expected, rtol=1e-5), form
        for is_raw in (True, False):
            assert np.array_equal(over_oip_grpc(channel, dense, strings, is_raw), expected)
        for tensor, message in (
            ({"name": "f_user", "datatype": "BYTES", "shape": [1], "data": ["a"]}, "features['f_user']: got strings"),
            (
                {"name": "f_cat", "datatype": "BYTES", "shape": [1], "data": [3]},
                "input 'f_cat': got 3 at position 0 of data, expected a string",
            ),
            ({"name": "f_cat", "datatype": "BYTES", "shape": [2], "data": ["a"]}, "input 'f_cat': got 1 elements"),
            ({"name": "f_cat", "datatype": "BYTES", "shape": [1]}, "input 'f_cat': got no data"),
        ):
            body = {"inputs": [tensor], "parameters": {"method": "lookup"}}
            assert message in posted(infer, body)["error"]
        head = json.dumps({"inputs": [{"name": "f_cat", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 9}}],
                           "parameters": {"method": "lookup"}}).encode()  # fmt: skip
        wrong = posted(infer, head + b"\5\0\0\0paris", {"Inference-Header-Content-Length": str(len(head))})
        assert "input 'f_cat': got 9 bytes, expected [2] strings of BYTES" in wrong["error"]

        with urllib.request.urlopen(f"{server.url}/v2/models/small", timeout=60) as answer:
            datatypes = {one["name"]: one["datatype"] for one in json.loads(answer.read())["inputs"]}
        assert (datatypes["f_cat.values"], datatypes["f_user.values"]) == ("BYTES", "INT64")
        with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=60) as answer:
            document = json.loads(answer.read())
        check_examples(server.url, document)
        with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        assert 'recinfer_vocabulary_ids_total{feature="f_cat",model="small",outcome="known",version="7"} ' in metrics
        assert 'feature="f_user",model="small",outcome="known"' not in metrics


def check_examples(url: str, document: dict[str, Any]) -> None:
    """The document's own example requests hold strings, and are answered."""
    texts = 0
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in content.get("examples", {}).values():
            assert "error" not in posted(url + path.replace("{version}", "7"), example["value"]), path
            texts += "paris" in json.dumps(example["value"])
    assert texts >= 3


def test_a_ranker_turns_strings_into_rows(tmp_path: Path) -> None:
    names = StringVocabulary(tuple(f"name {n}" for n in range(300)))
    plain = remote.make_archive(tmp_path / "plain", "row_wise")
    with pytest.MonkeyPatch.context() as patched:
        export = remote.export_archive

        def with_strings(*args: Any, **options: Any) -> Any:
            return export(*args, vocabularies={"b": names}, **options)

        patched.setattr(remote, "export_archive", with_strings)
        root = remote.make_archive.__wrapped__(tmp_path / "strings", "row_wise")  # type: ignore[attr-defined]
    local = load(plain)
    bags = [["name 7", "nobody"], [], ["name 299"]]
    rows = [[names.strings.index(one) if one in names.strings else 300 for one in bag] for bag in bags]
    expected = local.lookup({"b": rows}).pooled
    with remote.served(root, tmp_path) as service:
        answer = remote.ordinary(service, "Lookup", codec.encode_lookup_request({"b": bags}))
        pooled = codec.decode_lookup_response(answer)[0]
        assert pooled is not None and expected is not None
        assert torch.allclose(pooled.values(), expected.values(), rtol=1e-5, atol=1e-4)


# ---- the command line


def test_the_command_line_takes_strings(served_archive: Served, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    root, predictor = served_archive
    rows = [{"f_user": 3, "f_item": "item 1", "f_hist": "", "f_cat": "New York", "dense": [0.5, 1.0, 0.0]},
            {"f_user": 4, "f_item": "none, such", "f_hist": "item 2", "f_cat": "東京", "dense": [0.0, 0.0, 2.0]}]  # fmt: skip
    lists = [{key: [] if value == "" else value for key, value in row.items()} for row in rows]
    wanted = {"f_user": [3, 4], "f_item": [1, 7], "f_hist": [[], [2]], "f_cat": [1, 3]}
    expected = predictor.predict([row["dense"] for row in rows], wanted)["output"].numpy()
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([*(" ".join(map(str, v)) if k == "dense" else v for k, v in row.items())] for row in rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
    columns = {name: [row[name] if isinstance(row[name], list) else [row[name]] for row in lists] for name in rows[0]}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    strings = [option for name in STRINGS for option in ("--strings", name)]
    with recinfer.serve(root) as server:
        for name, options in (("rows.csv", strings), ("rows.jsonl", []), ("rows.parquet", [])):
            out = tmp_path / f"{name}.out.csv"
            said = run_json("predict", "--target", server.target, "--rows", tmp_path / name, "--out", out, *options)
            assert said["failed"] == 0, (name, said)
            found = [float(row["output"]) for row in csv.DictReader(out.open())]
            assert np.allclose(found, expected, rtol=1e-5), name
        said = run_json(
            "lookup", "--target", server.target, "--feature", "f_cat=paris,nowhere;東京", "--strings", "f_cat"
        )
        assert np.allclose(said["pooled"]["f_cat"], predictor.lookup({"f_cat": [[0, 296], [3]]})["f_cat"].numpy())
    said = run_json("inspect", root)["string_vocabularies"]
    assert [(one["features"], one["strings"], one["unknown"]) for one in said] == [
        (["f_item", "f_hist"], 1199, "row 7"),
        (["f_cat"], 296, "row 296"),
    ]
    with pytest.raises(ConfigError, match="give the option for CSV alone"):
        read_rows(tmp_path / "rows.jsonl", strings=["f_cat"])
    with pytest.raises(InputError, match="no column 'city' of --strings"):
        read_rows(tmp_path / "rows.csv", strings=["city"])
    with pytest.raises(ConfigError, match="--strings C2: no --feature has this name"):
        parse_features(["C1=a"], ["C2"])


def test_a_loaded_model_takes_a_dict_of_lists(served_archive: Served) -> None:
    root, predictor = served_archive
    model = recinfer.load(root)
    dense, strings, rows = both_requests(4, 2)
    expected = predictor.predict(dense, rows)["output"]
    assert torch.equal(model(torch.from_numpy(dense), strings), expected)
    assert torch.equal(model(torch.from_numpy(dense), kjt=rows), expected)
    with pytest.raises(InputError, match="got strings, expected integer ids"):
        model(torch.from_numpy(dense[:1]), {**{name: bags[:1] for name, bags in rows.items()}, "f_user": ["a"]})


# ---- exports


def contract_of(tokens: tuple[str, ...]) -> FeatureContract:
    sparse = [SparseFeature(name, Vocabulary(tokens), separator="|") for name in ("f_user", "f_cat")]
    sparse += [SparseFeature(name, Vocabulary(ITEMS.strings, 7)) for name in ("f_item", "f_hist")]
    return FeatureContract(tuple(sparse), tuple(DenseFeature(f"d{at}") for at in range(NUM_DENSE)))


def test_vocabularies_of_a_contract_are_in_the_archive(tmp_path: Path) -> None:
    contract = contract_of(("red", "Ünïcödé", "42"))
    archive = make_archive(tmp_path, contract=contract)[1]
    assert [info.features for info in archive.manifest.string_vocabularies] == [
        ("f_user", "f_cat"),
        ("f_item", "f_hist"),
    ]
    predictor = load(archive.root)
    assert predictor.contract == contract
    assert predictor.contract is not None and predictor.contract.to_dict() == contract.to_dict()
    columns: dict[str, list[Any]] = {
        "f_user": ["red|42", "", "blue"],
        "f_cat": [42, "42.0|Ünïcödé", None],
        "f_item": ["item 1", "none", "item 2"],
        "f_hist": ["", "item 5", "Ünïcödé-6"],
        **{f"d{at}": [0.5, 1, None] for at in range(NUM_DENSE)},
    }
    before = predictor.intake.counts["known"]["f_user"]
    found, expected = predictor.contract.apply_arrays(columns), contract.apply_arrays(columns)
    assert found[1].values.tolist() == expected[1].values.tolist()
    assert predictor.intake.counts["known"]["f_user"] == before + 2
    strings = {"f_user": [["red", "42"], [], ["blue"]], "f_cat": [["42"], ["42.0", "Ünïcödé"], []]}
    rows = {"f_user": [[0, 2], [], [3]], "f_cat": [[2], [3, 1], []]}
    assert torch.equal(predictor.lookup(strings)["f_cat"], predictor.lookup(rows)["f_cat"])
    assert verify(archive.root).ok


def test_exports_refuse_vocabularies_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'a' occurs twice"):
        make_archive(tmp_path, vocabularies={"f_cat": ["a", "b", "a"]})
    with pytest.raises(ConfigError, match="has no feature 'none'"):
        make_archive(tmp_path, vocabularies={"none": ["a"]})
    with pytest.raises(
        ConfigError, match="feature 'f_user' has 53 strings, and unknown ones read row 53; its table has 53 rows"
    ):
        make_archive(tmp_path, vocabularies={"f_user": [str(n) for n in range(53)]})
    with pytest.raises(InputError, match="lone surrogate"):
        make_archive(tmp_path, vocabularies={"f_cat": ["a\udfff"]})
    with pytest.raises(InputError, match="expected a list of strings"):
        StringVocabulary("abc")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown strings read row 3; expected 0 to 1"):
        StringVocabulary(("a",), 3)
    with pytest.raises(ConfigError, match="the feature contract has one of feature 'f_cat'"):
        make_archive(tmp_path, contract=contract_of(("a",)), vocabularies={"f_cat": ["a"]})
    archive = make_archive(
        tmp_path, vocabularies={"f_user": StringVocabulary(tuple(str(n) for n in range(53)), 0), "f_cat": []}
    )[1]
    assert torch.equal(
        load(archive.root).lookup({"f_cat": ["a"]})["f_cat"], load(archive.root).lookup({"f_cat": [0]})["f_cat"]
    )


def test_a_file_of_ids_makes_a_vocabulary_of_its_table(tmp_path: Path) -> None:
    ids = np.array([9_000_000_000_000_000_001, -5, 42], np.int64)
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "names.txt").write_bytes("\ufeffparis\r\nnew york\n\n東京\r\n".encode())
    given = [f"f_cat={tmp_path}/ids.npy", f"f_user={tmp_path}/names.txt"]
    made: dict[str, Any] = dict(read_vocabularies(given))
    assert made["f_user"] == ["paris", "new york", "", "東京"]
    model = Ranker()
    archive = make_archive(tmp_path, model=model, vocabularies=made)[1]
    predictor = load(archive.root)
    plain = load(make_archive(tmp_path / "plain", model=model)[1].root)
    found_vectors = predictor.lookup(
        {"f_cat": [-5, 42, 7, 9_000_000_000_000_000_001], "f_user": ["東京", "x", "paris", ""]}
    )
    wanted = plain.lookup({"f_cat": [1, 2, 3, 0], "f_user": [3, 4, 0, 2]})
    assert all(torch.equal(found_vectors[name], wanted[name]) for name in ("f_cat", "f_user"))
    with pytest.raises(InputError, match=r"features\['f_cat'\]: got strings, expected integer ids"):
        predictor.lookup({"f_cat": ["paris"]})
    for vocabularies, message in (
        ({"none": ids}, "0 tables read it"),
        ({"f_item": ids, "f_hist": ids}, "another feature has one of table 'item'"),
        ({"f_user": np.arange(53)}, "53 ids; its table 'users' has 53 rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            id_vocabularies(model, vocabularies, None)
    with pytest.raises(ConfigError, match="the feature contract makes rows"):
        id_vocabularies(model, {"f_cat": ids}, contract_of(("a",)))
    both = {("ebc", "cats"): TableVocabulary(ids, np.arange(3), 307, even_segments(307, 1)), "f_cat": ["a"]}
    with pytest.raises(ConfigError, match="the table of feature 'f_cat' has a vocabulary of raw ids"):
        make_archive(tmp_path / "both", model=model, vocabularies=both)
    np.save(tmp_path / "floats.npy", np.zeros(3))
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, message in (
        ("none.txt", "No such file"),
        ("none.npy", "No such file"),
        ("floats.npy", r"got float64 \[3\]; expected int64 \[N\]"),
        ("text.npy", "no array of numbers"),
        ("latin.txt", "byte 3 is no UTF-8"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_vocabularies([f"f_cat={tmp_path}/{name}"])
    with pytest.raises(ConfigError, match="'f_cat' twice"):
        read_vocabularies([given[0], given[0]])


# ---- archives that break a rule


def refused(root: Path, rule: str) -> str:
    with pytest.raises(ArchiveError) as raised:
        load(root)
    assert raised.value.rule == rule, raised.value
    return str(raised.value)


def entry_change(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["string_vocabularies"][1].update(values)


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"features": []}, "V7"),
        ({"features": ["f_cat", "f_cat"]}, "V7"),
        ({"features": ["f_item"]}, "V7"),  # in another entry
        ({"features": ["none"]}, "V7"),
        ({"features": ["f_user"]}, "V7"),  # of a table with fewer rows
        ({"rows": 0}, "V7"),
        ({"rows": 308}, "V7"),
        ({"unknown": 297}, "V7"),
        ({"unknown": -1}, "V7"),
        ({"seed": -1}, "V7"),
        ({"seed": 2**64}, "V7"),
        ({"examples": {str(n): n for n in range(17)}}, "V7"),
        ({"hash": "xxh64"}, "J3"),
        ({"examples": {"paris": "0"}}, "J3"),
        ({"more": 1}, "J3"),
        ({"seed": 1}, "V8"),  # other keys than the index's
        ({"examples": {"paris": 1}}, "V8"),
        ({"examples": {"nowhere": 0}}, "V8"),
        ({"rows": 296, "unknown": 0}, "V4"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(
    served_archive: Served, tmp_path: Path, change: Any, rule: str
) -> None:
    root = tmp_path / "broken.rqa"
    shutil.copytree(served_archive[0], root)
    edit_manifest(root, entry_change(**change))
    refused(root, rule)


@pytest.mark.parametrize(
    "what, rule", [("cut", "V3"), ("other", "V4"), ("bucket", "V5"), ("row", "V6"), ("gone", "F3")]
)
def test_an_index_that_breaks_a_rule_is_refused(served_archive: Served, tmp_path: Path, what: str, rule: str) -> None:
    root = tmp_path / "broken.rqa"
    shutil.copytree(served_archive[0], root)
    path = StringInfo.path(1)
    data = bytearray((root / path).read_bytes())
    bucket = next(at for at in range(HEADER_BYTES, len(data), 64) if data[at + 60])
    if what == "cut":
        data = data[:-64]
    elif what == "other":
        data = bytearray((root / StringInfo.path(0)).read_bytes())
    elif what == "bucket":
        data[bucket + 60] = 6
    elif what == "row":
        data[bucket + 40 : bucket + 44] = (297).to_bytes(4, "little")
    rewrite(root, path, bytes(data))
    if what == "gone":
        (root / path).unlink()
    refused(root, rule)


def test_golden_requests_hold_strings(served_archive: Served, tmp_path: Path) -> None:
    root, predictor = served_archive
    pairs = read_requests(open_archive(root))
    assert [None if request.strings is None else request.strings.keys for request, _ in pairs] == [
        None,
        *[("f_item", "f_hist", "f_cat")] * 4,
    ]
    request = pairs[2][0]
    assert request.strings is not None
    rows = [(name, row) for name in STRINGS for row in request.features[name].values().tolist()]
    ends = np.cumsum(request.strings.lengths)
    texts = [bytes(one) for one in np.split(np.frombuffer(request.strings.data, np.uint8), ends[:-1])]
    assert [row for _, row in rows] == [row_of(STRINGS[name], text) for (name, _), text in zip(rows, texts)]
    assert {row == STRINGS[name].unknown_row for name, row in rows} == {True, False}
    before = predictor.intake.counts["known"]["f_cat"]
    predictor.check_request(2)
    assert predictor.intake.counts["known"]["f_cat"] > before


def with_requests(root: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(root, copy)
    tensors = {
        name: tensor.clone() for name, tensor in unpack_tensors((copy / REQUESTS).read_bytes(), "", "C1").items()
    }
    change(tensors)
    rewrite(copy, REQUESTS, pack_tensors(tensors))
    return copy


@pytest.mark.parametrize(
    "change, rule",
    [
        (lambda t: t.pop("2/string_lengths"), "C1"),
        (lambda t: t.update({"2/strings": t["2/strings"][1:]}), "C1"),
        (lambda t: t.update({"2/strings": t["2/strings"].int()}), "C1"),
        (lambda t: t.update({"2/string_lengths": t["2/string_lengths"][1:]}), "C1"),
        (
            lambda t: t["2/string_lengths"].sub_(torch.eye(len(t["2/string_lengths"]), dtype=torch.int32)[0] * 10**6),
            "C1",
        ),
        (lambda t: t["2/strings"].add_(1), "C2"),
    ],
)
def test_strings_of_golden_requests_that_break_a_rule_are_refused(
    served_archive: Served, tmp_path: Path, change: Any, rule: str
) -> None:
    root = with_requests(served_archive[0], tmp_path / "broken.rqa", change)
    if rule == "C1":
        refused(root, rule)
    with pytest.raises(ArchiveError) as raised:
        load(root).check_request(2)
    assert raised.value.rule == rule


def test_golden_requests_of_earlier_archives_hold_the_rows(served_archive: Served, tmp_path: Path) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        for at in range(1, 5):
            del tensors[f"{at}/strings"], tensors[f"{at}/string_lengths"]

    assert verify(with_requests(served_archive[0], tmp_path / "earlier.rqa", without)).ok


def test_a_contract_that_differs_from_the_index_is_refused(tmp_path: Path) -> None:
    root = make_archive(tmp_path, contract=contract_of(("red", "green")))[1].root
    for number, tokens in enumerate((["green", "red"], ["red", "blue"], ["red"])):
        copy = tmp_path / f"{number}.rqa"
        shutil.copytree(root, copy)
        edit_manifest(copy, lambda m, tokens=tokens: m["contract"]["sparse"][0]["transform"].update(tokens=tokens))  # type: ignore[misc]
        refused(copy, "V9")


def test_rows_of_both_kinds_are_within_their_tables() -> None:
    assert {name: RANKER_ROWS[name] for name in STRINGS} == {"f_item": 1201, "f_hist": 1201, "f_cat": 307}
    assert (ITEMS.rows, CITIES.rows, CITIES.unknown_row) == (1199, 297, 296)
