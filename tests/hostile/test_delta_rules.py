"""Every rule of DELTA.md broken in turn, and mutated deltas: refused by rule, or applied with rows of a real delta."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import recinfer
from recinfer.archive.check import ANSWERS
from recinfer.archive.delta import read_delta, with_delta
from recinfer.archive.reader import Archive
from recinfer.checkpoint import CheckpointReader
from recinfer.errors import ArchiveError
from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import Predictor, load
from tests.hostile.test_mutations import mutate
from tests.hostile.test_rules import rules_of_vocabularies

Tensors = dict[str, bytes]
CASES: list[Any] = []


@pytest.fixture(scope="module")
def delta(small: tuple[nn.Module, Archive], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A delta of the small archive: some rows of every table, and the dense part."""
    folder = tmp_path_factory.mktemp("delta")
    model = copy.deepcopy(small[0])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter[::5] += torch.randn_like(parameter[::5])
    torch.save(model.state_dict(), folder / "new.pt")
    make_delta(small[1].root, model, CheckpointReader(folder / "new.pt"), folder / "d.rqd", progress=False)
    return (folder / "d.rqd").read_bytes()


def take_apart(content: bytes) -> tuple[dict[str, Any], Tensors]:
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    tensors = {key: data[slice(*entry["data_offsets"])] for key, entry in header.items() if key != "__metadata__"}
    return header, tensors


def put_together(header: dict[str, Any], tensors: Tensors, *, lay_out: bool = True) -> bytes:
    """The file again; with ``lay_out``, offsets and the hash of delta.json are made true."""
    at = 0
    if lay_out:
        header["__metadata__"]["sha256"] = hashlib.sha256(tensors["delta.json"]).hexdigest()
        for key, data in tensors.items():
            entry = header.setdefault(key, {"dtype": "U8", "shape": [len(data)]})
            entry["data_offsets"] = [at, at + len(data)]
            at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


Change = Callable[[dict[str, Any], dict[str, Any], Tensors], object]


def breaks(rule: str, what: str, *, lay_out: bool = True) -> Callable[[Change], Change]:
    """A change of (header, delta.json, tensors); delta.json is written back when it is laid out."""

    def add(change: Change) -> Change:
        def damage(content: bytes) -> bytes:
            header, tensors = take_apart(content)
            info = json.loads(tensors["delta.json"])
            before = json.dumps(info)
            change(header, info, tensors)
            if json.dumps(info) != before:
                tensors["delta.json"] = json.dumps(info).encode()
                header["delta.json"]["shape"] = [len(tensors["delta.json"])]
            return put_together(header, tensors, lay_out=lay_out)

        CASES.append(pytest.param(rule, damage, id=f"{rule}-{what.replace(' ', '-')}"))
        return change

    return add


def raw(rule: str, what: str, damage: Callable[[bytes], bytes]) -> None:
    CASES.append(pytest.param(rule, damage, id=f"{rule}-{what.replace(' ', '-')}"))


def set_rows(info: dict[str, Any], tensors: Tensors, change: Callable[[np.ndarray], object]) -> None:
    """Change the row numbers of the first table, hashes made true."""
    rows = np.frombuffer(tensors["rows/0"], dtype="<i8").copy()
    change(rows)
    tensors["rows/0"] = rows.tobytes()
    info["tables"][0]["rows_sha256"] = hashlib.sha256(tensors["rows/0"]).hexdigest()


raw("X1", "empty", lambda c: b"")
raw("X1", "header beyond the file", lambda c: struct.pack("<Q", 1 << 40) + c[8:])
raw("X1", "cut in the header", lambda c: c[:100])
raw("X2", "cut in the data", lambda c: c[:-10])
raw("X2", "bytes behind the last tensor", lambda c: c + b"\0")
raw("J2", "header is not JSON", lambda c: struct.pack("<Q", 5) + b"hello")
breaks("X2", "other format")(lambda h, i, t: h["__metadata__"].update(format="recinfer.shard/1"))
breaks("X2", "more metadata")(lambda h, i, t: h["__metadata__"].update(more="1"))
breaks("X2", "no metadata", lay_out=False)(lambda h, i, t: h.pop("__metadata__"))
breaks("X2", "other dtype", lay_out=False)(lambda h, i, t: h["rows/0"].update(dtype="I64"))
breaks("X2", "overlap", lay_out=False)(lambda h, i, t: h["rows/0"].update(data_offsets=[0, 8], shape=[8]))
breaks("X2", "delta.json changed", lay_out=False)(
    lambda h, i, t: t.update({"delta.json": t["delta.json"].replace(b"small", b"smalk")})
)
breaks("X3", "unknown key")(lambda h, i, t: i.update(more=1))
breaks("X3", "missing key")(lambda h, i, t: i.pop("check"))
breaks("X3", "text for a number")(lambda h, i, t: i.update(sequence="1"))
breaks("X3", "version 2")(lambda h, i, t: i.update(format_version=2))
breaks("X3", "sequence zero")(lambda h, i, t: i.update(sequence=0))
breaks("X3", "no rows")(lambda h, i, t: i["tables"][0].update(rows=0))
breaks("J2", "delta.json is a list")(
    lambda h, i, t: t.update({"delta.json": b"[]"}) or h["delta.json"].update(shape=[2])
)


@breaks("X4", "tensor more")
def _(header: dict[str, Any], info: dict[str, Any], tensors: Tensors) -> None:
    tensors["more"] = b"abc"


@breaks("X4", "tensor less")
def _(header: dict[str, Any], info: dict[str, Any], tensors: Tensors) -> None:
    del tensors["rows/0"], header["rows/0"]


@breaks("X4", "no delta.json", lay_out=False)
def _(header: dict[str, Any], info: dict[str, Any], tensors: Tensors) -> None:
    header["other"] = header.pop("delta.json")


@breaks("X4", "row changed")
def _(header: dict[str, Any], info: dict[str, Any], tensors: Tensors) -> None:
    tensors["packed/0"] = bytes([tensors["packed/0"][0] ^ 1]) + tensors["packed/0"][1:]


breaks("X4", "other number of rows")(lambda h, i, t: i["tables"][0].update(rows=i["tables"][0]["rows"] + 1))
breaks("X4", "file of another size")(lambda h, i, t: i["files"][0].update(bytes=1))
breaks("X5", "other base")(lambda h, i, t: i.update(base="0" * 64))
breaks("X5", "other model")(lambda h, i, t: i.update(model="other"))
breaks("X5", "other version")(lambda h, i, t: i.update(version="8"))
breaks("X5", "unknown table")(lambda h, i, t: i["tables"][0].update(table="other"))
breaks("X6", "second")(lambda h, i, t: i.update(sequence=2))
breaks("X6", "after another")(lambda h, i, t: i.update(previous="0" * 64))
breaks("X7", "rows twice")(lambda h, i, t: set_rows(i, t, lambda rows: rows.__setitem__(1, rows[0])))
breaks("X7", "rows descend")(
    lambda h, i, t: set_rows(i, t, lambda rows: rows.__setitem__(slice(None), rows[::-1].copy()))
)
breaks("X7", "row below zero")(lambda h, i, t: set_rows(i, t, lambda rows: rows.__setitem__(0, -1)))
breaks("X7", "row beyond the table")(lambda h, i, t: set_rows(i, t, lambda rows: rows.__setitem__(-1, 1 << 40)))
breaks("X7", "row just beyond")(lambda h, i, t: set_rows(i, t, lambda rows: rows.__setitem__(-1, 53)))
breaks("X8", "quantization of a table less")(lambda h, i, t: i["quantization"].pop())
breaks("X8", "negative error")(lambda h, i, t: i["quantization"][0].update(rms_error=-1.0))
breaks("X8", "onnx without a block")(lambda h, i, t: i["dense"].update(onnx=None))
breaks("X8", "other inputs")(lambda h, i, t: i["dense"]["inputs"][0].update(dim=4))


def put_file(header: dict[str, Any], info: dict[str, Any], tensors: Tensors, path: str, data: bytes) -> None:
    """Add or replace a file of the delta, hashes made true."""
    entry = {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    info["files"] = [file for file in info["files"] if file["path"] != path] + [entry]
    tensors[f"files/{path}"] = data
    header[f"files/{path}"] = {"dtype": "U8", "shape": [len(data)]}


for bad in ("plan.json", "shards/rank-00000.safetensors", "../evil", "/etc/passwd", "check/requests.safetensors"):
    breaks("X8", f"file {bad}")(lambda h, i, t, bad=bad: put_file(h, i, t, bad, b"x"))

breaks("D3", "broken onnx")(lambda h, i, t: put_file(h, i, t, "dense/model.onnx", b"hello"))
breaks("C1", "broken answers")(lambda h, i, t: put_file(h, i, t, ANSWERS, b"hello"))


@breaks("C2", "rows under the wrong numbers")
def _(header: dict[str, Any], info: dict[str, Any], tensors: Tensors) -> None:
    for i, table in enumerate(info["tables"]):
        tensors[f"packed/{i}"] = tensors[f"packed/{i}"][::-1]
        table["packed_sha256"] = hashlib.sha256(tensors[f"packed/{i}"]).hexdigest()


@pytest.mark.parametrize("rule, damage", CASES)
def test_each_rule(
    rule: str, damage: Callable[[bytes], bytes], delta: bytes, small: tuple[nn.Module, Archive], tmp_path: Path
) -> None:
    (tmp_path / "d.rqd").write_bytes(damage(delta))
    predictor = load(small[1].root)
    before = zlib.crc32(predictor._mapped.buffer.numpy())
    with pytest.raises(ArchiveError) as caught:
        predictor.apply_delta(tmp_path / "d.rqd")
    assert caught.value.rule == rule, caught.value
    assert predictor.num_deltas == 0
    predictor.check_request(0)
    assert zlib.crc32(predictor._mapped.buffer.numpy()) == before


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_no_file(kind: str, small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    path = tmp_path if kind == "folder" else tmp_path / "none.rqd"
    with pytest.raises(ArchiveError) as caught:
        read_delta(path)
    assert caught.value.rule == "X1"


def test_each_rule_of_the_page_is_broken_here() -> None:
    page = (Path(recinfer.__file__).parent / "archive/DELTA.md").read_text()
    rules = {line[4:6] for line in page.splitlines() if line.startswith("- **X")}
    assert rules <= {case.values[0] for case in CASES} | rules_of_vocabularies()


def run(request: pytest.FixtureRequest, body: Callable[[int], None]) -> None:
    """A hundred seeds, or as many as ``--mutations`` says."""
    wanted = request.config.getoption("--mutations", default=None)
    checks = list(HealthCheck)
    limits = settings(max_examples=int(wanted or 100), deadline=None, suppress_health_check=checks, database=None)
    limits(given(st.integers(0, 2**32))(body))()


def attempt(path: Path, archive: Archive, predictor: Predictor) -> None:
    """Read and fit; what passes both is applied, and gives its golden answers or is refused."""
    try:
        with_delta(archive, read_delta(path))
        predictor.with_delta_applied(read_delta(path))
    except ArchiveError as error:
        assert error.rule


def test_mutated_contents(
    delta: bytes, small: tuple[nn.Module, Archive], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """delta.json mutated, all hashes made true: what a hostile writer can do."""
    header, tensors = take_apart(delta)
    info = json.loads(tensors["delta.json"])
    predictor, archive = load(small[1].root), small[1]

    def body(seed: int) -> None:
        text = json.dumps(mutate(info, random.Random(seed))).encode()
        mine = {**copy.deepcopy(header), "delta.json": {"dtype": "U8", "shape": [len(text)]}}
        (tmp_path / "d.rqd").write_bytes(put_together(mine, {**tensors, "delta.json": text}))
        attempt(tmp_path / "d.rqd", archive, predictor)

    run(request, body)


def test_mutated_headers(
    delta: bytes, small: tuple[nn.Module, Archive], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    header, tensors = take_apart(delta)
    predictor, archive = load(small[1].root), small[1]

    def body(seed: int) -> None:
        mutated = mutate(header, random.Random(seed))
        (tmp_path / "d.rqd").write_bytes(put_together(mutated, tensors, lay_out=False))
        attempt(tmp_path / "d.rqd", archive, predictor)

    run(request, body)


def test_flipped_and_cut_bytes(
    delta: bytes, small: tuple[nn.Module, Archive], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    predictor, archive = load(small[1].root), small[1]

    def body(seed: int) -> None:
        chance = random.Random(seed)
        content = bytearray(delta)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        if chance.random() < 0.3:
            del content[chance.randrange(len(content)) :]
        (tmp_path / "d.rqd").write_bytes(content)
        attempt(tmp_path / "d.rqd", archive, predictor)

    run(request, body)
