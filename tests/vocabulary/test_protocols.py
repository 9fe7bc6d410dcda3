"""Raw ids through a server: gRPC, V1 and Open Inference over HTTP, and a ranker, which maps them before it splits them by rank."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recinfer
from recinfer.inference.predictor import load
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.vocabulary.table import TableVocabulary
from tests.archive.models import NUM_DENSE, make_archive
from tests.serving.remote import test_direct as remote
from tests.vocabulary.made import expected_rows, vocabulary

ITEM, CATS = ("ebc", "item"), ("ebc", "cats")


def posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_every_protocol_takes_raw_ids(tmp_path: Path) -> None:
    """Ids beyond 2^53, which a float would round, the smallest int64 and -1."""
    made = {ITEM: vocabulary(1201, segments=2, input_hash_size=2**63 - 1), CATS: vocabulary(307, hashed=True)}
    archive = make_archive(tmp_path, vocabularies=made)[1]
    item = [int(made[ITEM].ids[0]), 2**62 + 1, -(2**63), -1]
    cats = [int(made[CATS].ids[7]), 2**63 - 1, -1, -(2**63)]
    ids = {"f_user": [[1], [2]], "f_item": [item[:2], item[2:]], "f_hist": [[], item], "f_cat": [cats, []]}
    dense = np.random.default_rng(0).normal(size=(2, NUM_DENSE)).astype(np.float32)
    expected = load(archive.root).predict(torch.from_numpy(dense), ids)["output"].numpy()
    with recinfer.serve(archive.root, http_port=0, metrics_port=0) as server:
        client = server.client(timeout=60)
        assert np.array_equal(np.asarray(client.predict(dense, ids)["output"]), expected)
        body = {"instances": [{"dense": dense[at].tolist(), **{k: v[at] for k, v in ids.items()}} for at in range(2)]}
        found = posted(f"{server.url}/v1/models/small:predict", body)["predictions"]
        assert np.allclose(np.asarray(found, np.float32).reshape(-1), expected, rtol=1e-6)
        tensors = [{"name": "dense", "datatype": "FP32", "shape": [2, NUM_DENSE], "data": dense.reshape(-1).tolist()}]
        for name, bags in ids.items():
            flat = [id for bag in bags for id in bag]
            tensors.append({"name": f"{name}.values", "datatype": "INT64", "shape": [len(flat)], "data": flat})
            lengths = [len(bag) for bag in bags]
            tensors.append({"name": f"{name}.lengths", "datatype": "INT32", "shape": [2], "data": lengths})
        with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        known = 'recinfer_vocabulary_ids_total{feature="f_item",model="small",outcome="known",version="7"} '
        assert known in metrics and known.replace("f_item", "f_user") not in metrics
        outputs = posted(f"{server.url}/v2/models/small/infer", {"inputs": tensors})["outputs"]
        assert np.allclose(np.asarray(outputs[0]["data"], np.float32), expected, rtol=1e-6)


def test_a_ranker_maps_ids_before_it_splits_them(tmp_path: Path) -> None:
    """Row-wise tables on three shard servers, which have no index: byte path and decoded path give the rows of raw ids."""
    made = {
        ("bags", "t_b"): vocabulary(301, segments=3, input_hash_size=2**40),
        ("bags", "t_d"): vocabulary(97, hashed=True),
    }
    tables = {"b": made["bags", "t_b"], "c": made["bags", "t_b"], "d": made["bags", "t_d"]}
    plain = remote.make_archive(tmp_path / "plain", "row_wise")
    with pytest.MonkeyPatch.context() as patched:
        export = remote.export_archive

        def with_vocabularies(*args: Any, **options: Any) -> Any:
            return export(*args, vocabularies=made, **options)

        patched.setattr(remote, "export_archive", with_vocabularies)
        root = remote.make_archive.__wrapped__(tmp_path / "raw", "row_wise")  # type: ignore[attr-defined]
    local = load(plain)
    with remote.served(root, tmp_path) as service:
        for rows in remote.requests():
            ids, read = raw_of(rows, tables)
            expected = local.lookup(read).pooled.values()  # type: ignore[union-attr]
            data = codec.encode_lookup_request(ids)
            answer = remote.ordinary(service, "Lookup", data)
            assert remote.straight(service, "Lookup", data) == answer
            pooled = codec.decode_lookup_response(answer)[0]
            assert pooled is not None  # sums by rank round otherwise than sums of whole bags
            assert torch.allclose(pooled.values(), expected, rtol=1e-5, atol=1e-4)


def raw_of(rows: KeyedJaggedTensor, tables: dict[str, TableVocabulary]) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Raw ids in place of rows, and the rows that they read."""
    raw, read = [], []
    for name in rows.keys():  # noqa: SIM118 - not a dict
        values = rows[name].values().long().numpy()
        if name in tables:
            ids = np.where(values % 3 > 0, tables[name].ids[values % len(tables[name].ids)], values - 10**15)
            raw.append(torch.from_numpy(ids))
            read.append(torch.from_numpy(expected_rows(tables[name], ids)))
        else:
            raw.append(torch.from_numpy(values))
            read.append(torch.from_numpy(values))
    keys, lengths = rows.keys(), rows.lengths().int()
    return (
        KeyedJaggedTensor(keys, torch.cat(raw), lengths=lengths),
        KeyedJaggedTensor(keys, torch.cat(read), lengths=lengths),
    )
