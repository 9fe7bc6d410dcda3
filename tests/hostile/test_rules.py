"""Every rule of FORMAT.md broken in turn: loading (or verify) fails with an error that names the rule."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

import recinfer
from recinfer.archive.program import program_bytes
from recinfer.archive.reader import Archive
from recinfer.errors import ArchiveError
from recinfer.inference.predictor import load
from recinfer.inference.verify import verify
from tests.hostile.damage import edit_header, edit_manifest, edit_plan, read_header, relist, rewrite, write_header

Damage = Callable[[Path], object]
CASES: list[Any] = []


def breaks(rule: str, what: str, *, base: str = "small") -> Callable[[Damage], Damage]:
    def add(damage: Damage) -> Damage:
        CASES.append(pytest.param(rule, base, damage, id=f"{rule}-{what.replace(' ', '-')}"))
        return damage

    return add


def manifest_case(rule: str, what: str, change: Callable[[dict[str, Any]], object], *, base: str = "small") -> None:
    breaks(rule, what, base=base)(lambda root: edit_manifest(root, change))


# ---- F


@breaks("F1", "no manifest")
def _(root: Path) -> None:
    (root / "manifest.json").unlink()


@breaks("F1", "manifest is a folder")
def _(root: Path) -> None:
    (root / "manifest.json").unlink()
    (root / "manifest.json").mkdir()


@breaks("F1", "not a folder")
def _(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("")


@breaks("F1", "nothing there")
def _(root: Path) -> None:
    shutil.rmtree(root)


for bad in (
    "/etc/passwd",
    "../small.rqa/plan.json",
    "check/../plan.json",
    "./plan.json",
    "a//b",
    "a\\b",
    "C:plan",
    "",
    "a\n",
    "x" * 2000,
):
    manifest_case("F2", f"path {bad[:12]!r}", lambda m, bad=bad: m["files"][-1].update(path=bad))


@breaks("F2", "link out of the folder")
def _(root: Path) -> None:
    outside = root.parent / "outside.json"
    shutil.move(root / "plan.json", outside)
    (root / "plan.json").symlink_to(outside)


@breaks("F2", "linked folder out of the folder")
def _(root: Path) -> None:
    shutil.move(root / "check", root.parent / "check")
    (root / "check").symlink_to(root.parent / "check")


@breaks("F3", "a file is missing")
def _(root: Path) -> None:
    (root / "shards/rank-00001.safetensors").unlink()


@breaks("F3", "a file is a folder")
def _(root: Path) -> None:
    (root / "plan.json").unlink()
    (root / "plan.json").mkdir()


@breaks("F3", "a file is a pipe")
def _(root: Path) -> None:
    (root / "plan.json").unlink()
    os.mkfifo(root / "plan.json")


@breaks("F3", "a link in a circle")
def _(root: Path) -> None:
    (root / "plan.json").unlink()
    (root / "plan.json").symlink_to("plan.json")


for listed in ("plan.json", "shards/rank-00000.safetensors", "dense/model.onnx", "check/answers.safetensors"):
    for cut in (0, 1, 100):

        @breaks("F4", f"{listed} cut to {cut}")
        def _(root: Path, listed: str = listed, cut: int = cut) -> None:
            content = (root / listed).read_bytes()
            (root / listed).write_bytes(content[:cut] if cut else content[:-1])


for listed in ("plan.json", "dense/model.onnx", "check/requests.safetensors"):

    @breaks("F5", f"{listed} changed")
    def _(root: Path, listed: str = listed) -> None:
        content = bytearray((root / listed).read_bytes())
        content[len(content) // 2] ^= 1
        (root / listed).write_bytes(content)


manifest_case("F5", "no hash", lambda m: m["files"][0].update(sha256="ABC"))
manifest_case("F7", "file listed twice", lambda m: m["files"].append(m["files"][0]))
manifest_case("F7", "file not listed", lambda m: m["files"].pop())
manifest_case("F7", "unknown file", lambda m: m["files"].append({"path": "extra", "bytes": 0, "sha256": "0" * 64}))


# ---- J


@breaks("J1", "manifest not UTF-8")
def _(root: Path) -> None:
    (root / "manifest.json").write_bytes(b'{"model": "\xff"}')


@breaks("J1", "byte order mark")
def _(root: Path) -> None:
    (root / "manifest.json").write_bytes(b"\xef\xbb\xbf" + (root / "manifest.json").read_bytes())


@breaks("J1", "manifest too long")
def _(root: Path) -> None:
    with (root / "manifest.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)


for text in (
    "", "{", "[]", "1", '{"a": 1, "a": 1}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}',
    "[" * 100_000, '{"a":' * 50 + "1" + "}" * 50, '{"a": 1} x', '{"a": ' + "9" * 10_000 + "}",
):  # fmt: skip
    breaks("J2", f"manifest {text[:20]}")(lambda root, text=text: (root / "manifest.json").write_text(text))

manifest_case("J3", "unknown key", lambda m: m.update(extra=1))
manifest_case("J3", "missing key", lambda m: m.pop("tables"))
manifest_case("J3", "unknown inner key", lambda m: m["tables"][0].update(extra=1))
manifest_case("J3", "text for a number", lambda m: m.update(world_size="3"))
manifest_case("J3", "true for a number", lambda m: m.update(world_size=True))
manifest_case("J3", "number for a number of another kind", lambda m: m["tables"][0].update(rows=1.0))
manifest_case("J3", "null", lambda m: m.update(model=None))
manifest_case("J3", "list for an object", lambda m: m.update(check=[]))
manifest_case("J3", "unknown precision", lambda m: m["tables"][0].update(precision="int7"))
manifest_case("J3", "unknown word for missing shards", lambda m: m.update(missing_shards="zeros"))
manifest_case("J3", "null for missing shards", lambda m: m.update(missing_shards=None))

# ---- M

manifest_case("M1", "other format", lambda m: m.update(format="other"))
manifest_case("M1", "later version", lambda m: m.update(format_version=2))
manifest_case("M1", "no version", lambda m: m.pop("format_version"))
manifest_case("M2", "empty model name", lambda m: m.update(model=""))
manifest_case("M2", "long version", lambda m: m.update(version="1" * 257))
manifest_case("M2", "control character", lambda m: m.update(model="a\x1b[2J"))
manifest_case("M2", "slash in a module path", lambda m: m["modules"][0].update(path="a/b"))
manifest_case("M3", "no ranks", lambda m: m.update(world_size=0))
manifest_case("M3", "too many ranks", lambda m: m.update(world_size=1 << 40))
manifest_case("M3", "no rows", lambda m: m["tables"][0].update(rows=0))
manifest_case("M3", "too many rows", lambda m: m["tables"][0].update(rows=1 << 41))
manifest_case("M3", "too wide", lambda m: m["tables"][0].update(dim=1 << 17))
manifest_case("M3", "negative bytes", lambda m: m["files"][0].update(bytes=-1))
manifest_case("M3", "negative error", lambda m: m["tables"][0]["quantization"].update(rms_error=-1))
manifest_case("M3", "no requests", lambda m: m["check"].update(num_requests=0))
manifest_case("M4", "no modules", lambda m: m.update(modules=[]))
manifest_case("M4", "module twice", lambda m: m["modules"].append(m["modules"][0]))
manifest_case("M4", "table of no module", lambda m: m["tables"][0].update(module="other"))
manifest_case("M4", "tables in another order", lambda m: m["modules"][0]["tables"].reverse())
manifest_case("M4", "table twice", lambda m: m["tables"][1].update(name=m["tables"][0]["name"]))
manifest_case("M4", "pooled table without pooling", lambda m: m["tables"][0].update(pooling="none"))
manifest_case("M4", "sequence of pooled tables", lambda m: m["modules"][0].update(kind="sequence"))
manifest_case("M5", "feature not listed", lambda m: m["features"].pop())
manifest_case("M5", "feature twice", lambda m: m["features"].append(m["features"][0]))
manifest_case("M5", "unknown policy", lambda m: m["features"][0].update(missing="maybe"))
manifest_case("M5", "default beyond the table", lambda m: m["features"][0].update(missing=53))
manifest_case("M5", "default row beyond the table", lambda m: m["features"][0].update(default_row=-1))
manifest_case("M5", "outputs in another order", lambda m: m["modules"][0]["outputs"].reverse())
manifest_case(
    "M5", "position weights without weights", lambda m: m["modules"][0].update(position_weights={"f_user": 3})
)
manifest_case("M6", "other precision", lambda m: m.update(precision="int4"))
manifest_case("M6", "mixed", lambda m: m.update(precision="mixed"))
manifest_case("M7", "input missing", lambda m: m["dense"]["inputs"].pop())
manifest_case("M7", "other width", lambda m: m["dense"].update(num_dense=4))
manifest_case("M7", "no outputs", lambda m: m["dense"].update(outputs=[]))
manifest_case("M7", "ONNX too far off", lambda m: m["dense"]["onnx"].update(max_abs_error=1e-4))
manifest_case("M7", "engine without program", lambda m: m["dense"].update(onnx=None))
manifest_case("M8", "no contract", lambda m: m.update(contract={"a": 1}))
manifest_case("M9", "other total", lambda m: m.update(bytes_total=m["bytes_total"] + 1))


def signature_case(what: str, change: Callable[[dict[str, Any]], object], rule: str = "M10") -> None:
    """A broken signature of the archive ``named``."""
    manifest_case(rule, f"signature {what}", lambda m: change(m["signature"]), base="named")


def set_input(name: str, **values: Any) -> Callable[[dict[str, Any]], object]:
    """Change one input of a signature."""
    return lambda s: next(i for i in s["inputs"] if i["name"] == name).update(values)


signature_case("has another key", lambda s: s.update(extra=1), "J3")
signature_case("input of another type", set_input("hour", kind="image"), "J3")
signature_case("names an input twice", lambda s: s["inputs"].append(s["inputs"][0]))
signature_case("input of a dtype that torch lacks", set_input("hour", dtype="text"))
signature_case("input of negative size", set_input("hour", shape=["batch", -1]))
signature_case("input with a control character", set_input("hour", path="hour\n"), "M2")
signature_case("values of a fixed number", set_input("prices", shape=[5]))
signature_case("ids that are floats", set_input("f_hist", dtype="float32"))
signature_case("lacks an input of the dense program", lambda s: s["inputs"].pop())
signature_case("lacks the ids of a table", set_input("f_hist", kind="jagged"))
signature_case("fact about no input", lambda s: s["per_sample"].update(other=1))
signature_case("fact of a tensor", lambda s: s["per_sample"].update(hour=1))
signature_case("fact of no values", lambda s: s["per_sample"].update(f_hist=0))
signature_case("fact of itself", lambda s: s.update(as_long_as={"f_hist": "f_hist"}))
signature_case("fact of a circle", lambda s: s.update(as_long_as={"f_hist": "prices", "prices": "f_hist"}))
signature_case("counts of no input", lambda s: s.update(counts={"other": "f_hist"}))
signature_case("counts by numbers that are no ids", lambda s: s.update(counts={"prices": "f_hist"}))
signature_case("counts of a tensor", lambda s: s.update(counts={"f_hist": "hour"}))
signature_case("counts of itself", lambda s: s.update(counts={"f_hist": "f_hist"}))
signature_case("limit of no axis", lambda s: s["at_most"].update(other=3))
signature_case("limit of the batch", lambda s: s["at_most"].update(batch=3))
signature_case("returns no such output", lambda s: s.update(returns={"output": "other"}))
signature_case("returns no structure", lambda s: s.update(returns={"dict": [1]}))
signature_case("returns too deep", lambda s: s.update(returns=deep({"output": "scores_0"})))
signature_case("without the ids program", lambda s: s.update(ids=None), "F7")
signature_case("ids of no feature", lambda s: s["ids"].update(features=[]))
signature_case("ids of an unknown feature", lambda s: s["ids"]["features"].append("other"))
signature_case("ids weighted of another feature", lambda s: s["ids"].update(weighted=["f_hist"]))
signature_case("ids from an unknown input", lambda s: s["ids"]["inputs"][0].update(feature="other"))
signature_case("ids from an input twice", lambda s: s["ids"]["inputs"].append(s["ids"]["inputs"][0]))
signature_case("ids engine without program", lambda s: s["ids"].update(engine="onnx", onnx=None))
manifest_case("M10", "signature without a dense part", lambda m: m.update(dense=None), base="named")


def deep(returns: dict[str, Any]) -> dict[str, Any]:
    for _ in range(12):
        returns = {"list": [returns]}
    return returns


@breaks("M8", "contract of other features")
def _(root: Path) -> None:
    from recinfer.data.contract import DenseFeature, FeatureContract, Identity, SparseFeature

    contract = FeatureContract(
        sparse=(SparseFeature("other", Identity(5)),), dense=tuple(DenseFeature(f"d{i}") for i in range(3))
    )
    edit_manifest(root, lambda m: m.update(contract=contract.to_dict()))


# ---- P


@breaks("P1", "not a plan")
def _(root: Path) -> None:
    rewrite(root, "plan.json", b"{}")


@breaks("P1", "strange types")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p.update(world_size=[1]), rehash=False)


@breaks("P4", "gap between rows")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][1]["shards"][1].__setitem__(1, 402), rehash=False)


@breaks("P4", "overlap of columns")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][2]["shards"][1].__setitem__(3, 4), rehash=False)


@breaks("P4", "shard twice")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][1]["shards"].append(p["tables"][1]["shards"][0]), rehash=False)


@breaks("P4", "rank outside")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][0]["shards"][0].__setitem__(0, 3), rehash=False)


@breaks("P4", "rows beyond the table")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][0]["shards"][0].__setitem__(2, 54), rehash=False)


@breaks("P4", "no shards")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][0].update(shards=[]), rehash=False)


@breaks("P4", "each cell once, but no strips")
def _(root: Path) -> None:
    cut = [[0, 0, 600, 0, 8], [0, 0, 600, 8, 16], [0, 600, 1201, 0, 4], [0, 600, 1201, 4, 16]]
    edit_plan(root, lambda p: p["tables"][1].update(shards=cut), rehash=False)


@breaks("P4", "replicas that are parts")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][1].update(sharding_type="data_parallel"), rehash=False)


@breaks("P4", "columns cut inside a byte")
def _(root: Path) -> None:
    cut = [[0, 0, 1201, 0, 6], [0, 0, 1201, 6, 16]]
    edit_plan(root, lambda p: p["tables"][1].update(shards=cut, precision="INT4"), rehash=False)


@breaks("P1", "shard of four numbers")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][0]["shards"][0].pop(), rehash=False)


@breaks("P2", "another plan")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][0].update(compute_kernel="quant_uvm"), rehash=False)


@breaks("P3", "other precision")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"][0].update(precision="FP16"))


@breaks("P3", "a table less")
def _(root: Path) -> None:
    edit_plan(root, lambda p: p["tables"].pop())


manifest_case("P3", "other rows", lambda m: m["tables"][0].update(rows=52))
manifest_case("P3", "other ranks", lambda m: m["tables"][0].update(ranks=[0]))
manifest_case("P3", "other sharding", lambda m: m["tables"][0].update(sharding="row_wise"))

# ---- S

KEY = "ebc/item/r401-c0"  # on rank 2


@breaks("S1", "header beyond the file")
def _(root: Path) -> None:
    header, rest = read_header(root, 2)
    write_header(root, 2, header, rest, length=1 << 40)


@breaks("S1", "header over the limit")
def _(root: Path) -> None:
    path = root / "shards/rank-00002.safetensors"
    with path.open("r+b") as file:
        file.truncate(80 << 20)
        file.write((65 << 20).to_bytes(8, "little"))
    relist(root)


@breaks("S1", "empty file")
def _(root: Path) -> None:
    rewrite(root, "shards/rank-00002.safetensors", b"")


@breaks("J2", "header is not JSON")
def _(root: Path) -> None:
    write_header(root, 2, b"hello", b"")


@breaks("J2", "tensor twice")
def _(root: Path) -> None:
    header, rest = read_header(root, 2)
    text = json.dumps(header)
    write_header(root, 2, (text[:-1] + f', "{KEY}": {json.dumps(header[KEY])}}}').encode(), rest)


for what, change in {
    "no metadata": lambda h: h.pop("__metadata__"),
    "other rank": lambda h: h["__metadata__"].update(rank="0"),
    "other plan": lambda h: h["__metadata__"].update(plan_hash="0" * 64),
    "other dtype": lambda h: h[KEY].update(dtype="I8"),
    "unknown key": lambda h: h[KEY].update(extra=1),
    "no shape": lambda h: h[KEY].pop("shape"),
    "negative size": lambda h: h[KEY].update(shape=[-1, -20]),
    "huge size": lambda h: h[KEY].update(shape=[1 << 63, 2]),
    "not a number": lambda h: h[KEY].update(data_offsets=["0", 1]),
    "true": lambda h: h[KEY].update(data_offsets=[True, 1]),
    "backwards": lambda h: h[KEY]["data_offsets"].reverse(),
    "entry is null": lambda h: h.update({KEY: None}),
}.items():
    breaks("S2", what)(lambda root, change=change: edit_header(root, 2, change))


@breaks("S3", "overlap")
def _(root: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        for key, entry in header.items():
            if key not in ("__metadata__", KEY) and entry["data_offsets"][0] > 0:
                entry["data_offsets"] = [n - 1 for n in entry["data_offsets"]]

    edit_header(root, 2, change)


@breaks("S3", "bytes behind the last tensor")
def _(root: Path) -> None:
    header, rest = read_header(root, 2)
    write_header(root, 2, header, rest + b"\0")


@breaks("S3", "data cut")
def _(root: Path) -> None:
    header, rest = read_header(root, 2)
    write_header(root, 2, header, rest[:-1])


@breaks("S4", "shard under another name")
def _(root: Path) -> None:
    edit_header(root, 2, lambda h: h.update({"ebc/item/r400-c0": h.pop(KEY)}))


@breaks("S4", "one tensor more")
def _(root: Path) -> None:
    header, rest = read_header(root, 2)
    header["more"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(rest), len(rest) + 4]}
    write_header(root, 2, header, rest + b"\0\0\0\0")


@breaks("S5", "other shape")
def _(root: Path) -> None:
    edit_header(root, 2, lambda h: h[KEY].update(shape=h[KEY]["shape"][::-1]))


@breaks("S6", "moved by one byte")
def _(root: Path) -> None:
    header, rest = read_header(root, 2)
    for key, entry in header.items():
        if key != "__metadata__":
            entry["data_offsets"] = [n + 1 for n in entry["data_offsets"]]
    header["__pad__/99"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    write_header(root, 2, header, b"\0" + rest)


# ---- D


def edit_program(root: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Rewrite entries of model.pt2 whose names end in ``name``, and make torch the engine."""
    source = zipfile.ZipFile(root / "dense/model.pt2")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            target.writestr(info.filename, change(content) if info.filename.endswith(name) else content)
    rewrite(root, "dense/model.pt2", buffer.getvalue())
    edit_manifest(root, lambda m: m["dense"].update(engine="torch"))


GRAPH = "models/model.json"
WEIGHTS = "model_weights_config.json"
for what, name, old, new in (
    ("operator that reads files", GRAPH, b"torch.ops.aten.relu.default", b"torch.ops.aten.from_file.default"),
    ("operator outside torch.ops", GRAPH, b"torch.ops.aten.relu.default", b"torch.load"),
    ("operator of another library", GRAPH, b"torch.ops.aten.relu.default", b"torch.ops.evil.run.default"),
    ("expression that calls", GRAPH, b"Symbol('s", b"exit('s"),
    ("expression with attributes", GRAPH, b"Symbol('s", b"Symbol.__class__('s"),
    ("a large power", GRAPH, b"Symbol('s", b"Pow(Integer(9), Integer(9)), Symbol('s"),
    ("a power of sizes", GRAPH, b"Symbol('s", b"Pow(Integer(2), Symbol('s77', integer=True)), Symbol('s"),
    ("powers of powers", GRAPH, b"Symbol('s", b"Pow(" * 5 + b"Integer(9)" + b", Integer(4))" * 5 + b", Symbol('s"),
    ("guards", GRAPH, b'"guards_code": []', b'"guards_code": ["exit()"]'),
    ("pickled weights", WEIGHTS, b'"use_pickle": false', b'"use_pickle": true'),
    ("weights elsewhere", WEIGHTS, b'"weight_0"', b'"../../models/model.json"'),
    ("sample inputs", "sample_inputs/model.pt", b"", b"pickle"),
):

    @breaks("D1", what)
    def _(root: Path, name: str = name, old: bytes = old, new: bytes = new) -> None:
        def change(content: bytes) -> bytes:
            assert old in content
            return content.replace(old, new) if old else new

        edit_program(root, name, change)


@breaks("D1", "an entry more")
def _(root: Path) -> None:
    path = root / "dense/model.pt2"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/constants/opaque_obj_0", b"pickle")
    relist(root)
    edit_manifest(root, lambda m: m["dense"].update(engine="torch"))


@breaks("D1", "zip bomb")
def _(root: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/weights/weight_0", bytes(50 << 20))
    rewrite(root, "dense/model.pt2", buffer.getvalue())
    edit_manifest(root, lambda m: m["dense"].update(engine="torch"))


@breaks("D1", "no zip")
def _(root: Path) -> None:
    rewrite(root, "dense/model.pt2", b"hello")
    edit_manifest(root, lambda m: m["dense"].update(engine="torch"))


@breaks("D2", "graph that does not hang together")
def _(root: Path) -> None:
    edit_program(root, GRAPH, lambda content: content.replace(b'"name": "relu"', b'"name": "other"', 1))


for what in ("weights/weight_2", GRAPH):

    @breaks("D2", f"damaged {what} of the program that ONNX runs in place of")
    def _(root: Path, what: str = what) -> None:
        content = bytearray((root / "dense/model.pt2").read_bytes())
        entry = next(e for e in zipfile.ZipFile(root / "dense/model.pt2").infolist() if e.filename.endswith(what))
        content[entry.header_offset + entry.file_size // 2] ^= 1
        rewrite(root, "dense/model.pt2", bytes(content))


def replace_program(root: Path, num_inputs: int, output: str) -> None:
    class Other(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            return {output: sum(tensor.sum(1) for tensor in tensors)}

    shapes = (tuple({0: torch.export.Dim("batch")} for _ in range(num_inputs)),)
    example = tuple(torch.zeros(5, 3) for _ in range(num_inputs))
    rewrite(root, "dense/model.pt2", program_bytes(torch.export.export(Other(), example, dynamic_shapes=shapes)))
    edit_manifest(root, lambda m: m["dense"].update(engine="torch"))


breaks("D2", "program of other inputs")(lambda root: replace_program(root, 1, "output"))
breaks("D2", "program of other outputs")(lambda root: replace_program(root, 2, "other"))


Bags = dict[str, torch.Tensor]


def replace_ids_program(root: Path, answer: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    """Put a program of values [ids] and lengths [B] in place of the ids program of the archive ``named``."""

    class Other(nn.Module):
        def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> Bags:
            return dict(zip(("computed/f_item/values", "computed/f_item/lengths", "more"), answer(values, lengths)))

    example = torch.arange(9), torch.tensor([2, 3, 1, 3])
    free = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    program = torch.export.export(Other(), example, dynamic_shapes=free, strict=False)
    rewrite(root, "dense/ids.pt2", program_bytes(program))
    edit_manifest(root, lambda m: m["signature"]["ids"].update(engine="torch"))


WRONG_IDS: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]]] = {
    "returns too many outputs": ("D2", lambda values, lengths: (values % 40, lengths + 0, lengths + 1)),
    "gives ids of another shape": ("C2", lambda values, lengths: ((values % 40).unsqueeze(1), lengths + 0)),
    "gives floats": ("C2", lambda values, lengths: ((values % 40).float(), lengths + 0)),
    "gives lengths of another batch": ("C2", lambda values, lengths: (values % 40, torch.cat([lengths, lengths]))),
    "gives negative lengths": ("C2", lambda values, lengths: (values % 40, -lengths)),
    "gives lengths of another sum": ("C2", lambda values, lengths: (values % 40, lengths + 1)),
    "gives ids beyond the table": ("C2", lambda values, lengths: (values % 40 + 40, lengths + 0)),
    "gives negative ids": ("C2", lambda values, lengths: (values % 40 - 1000, lengths + 0)),
    "gives other ids": ("C2", lambda values, lengths: ((values + 1) % 40, lengths + 0)),
}
for what, (rule, answer) in WRONG_IDS.items():
    breaks(rule, f"ids program {what}", base="named")(lambda root, answer=answer: replace_ids_program(root, answer))
breaks("D1", "ids program is text", base="named")(lambda root: rewrite(root, "dense/ids.pt2", b"hello"))
breaks("D3", "ids program is no ONNX", base="named")(lambda root: rewrite(root, "dense/ids.onnx", b"hello"))


@breaks("D3", "no ONNX file")
def _(root: Path) -> None:
    rewrite(root, "dense/model.onnx", b"hello")


@breaks("D3", "other outputs")
def _(root: Path) -> None:
    import onnx

    model = onnx.load(root / "dense/model.onnx")
    model.graph.output[0].name = model.graph.node[0].output[0]
    rewrite(root, "dense/model.onnx", model.SerializeToString())


@breaks("D3", "weights outside the file")
def _(root: Path) -> None:
    import onnx

    model = onnx.load(root / "dense/model.onnx")
    weight = max(model.graph.initializer, key=lambda w: len(w.raw_data))
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=str(root / "manifest.json"))
    weight.external_data.add(key="length", value=str(len(weight.raw_data)))
    weight.ClearField("raw_data")
    rewrite(root, "dense/model.onnx", model.SerializeToString())


POSITIONS = "dense/position_weights.safetensors"


def edit_tensors(root: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_tensors((root / name).read_bytes())
    change(tensors)
    rewrite(root, name, save_tensors(tensors))


for what, change in {
    "weights missing": lambda t: t.popitem(),
    "weights not finite": lambda t: next(iter(t.values())).fill_(float("nan")),
    "other length": lambda t: t.update({k: torch.ones(7) for k in t}),
    "other dtype": lambda t: t.update({k: v.double() for k, v in t.items()}),
}.items():
    breaks("D4", what, base="everything")(lambda root, change=change: edit_tensors(root, POSITIONS, change))
breaks("D4", "no safetensors", base="everything")(lambda root: rewrite(root, POSITIONS, b"hello"))

# ---- C

REQUESTS, ANSWERS = "check/requests.safetensors", "check/answers.safetensors"
for what, change in {
    "request missing": lambda t: t.pop("1/values"),
    "lengths beyond the values": lambda t: t["0/lengths"].add_(1),
    "negative lengths": lambda t: t["0/lengths"].neg_(),
    "other dtype": lambda t: t.update({"0/values": t["0/values"].int()}),
    "dense of another batch": lambda t: t.update({"0/dense": t["0/dense"][:1].clone()}),
}.items():
    breaks("C1", what)(lambda root, change=change: edit_tensors(root, REQUESTS, change))
for what, change in {
    "input missing": lambda t: t.pop("1/input/hour"),
    "input of another dtype": lambda t: t.update({"0/input/hour": t["0/input/hour"].float()}),
    "input of another batch": lambda t: t.update({"0/input/hour": t["0/input/hour"][:1].clone()}),
    "jagged input without lengths": lambda t: t.pop("0/input/prices/lengths"),
    "lengths of a jagged input beyond its values": lambda t: t["0/input/prices/lengths"].add_(1),
}.items():
    breaks("C1", what, base="named")(lambda root, change=change: edit_tensors(root, REQUESTS, change))
for what, change in {
    "answer missing": lambda t: t.pop("1/output/0"),
    "answer of another shape": lambda t: t.update({"0/output/0": torch.zeros(5)}),
    "answer too many": lambda t: t.update({"9/output/0": torch.zeros(5)}),
}.items():
    breaks("C1", what)(lambda root, change=change: edit_tensors(root, ANSWERS, change))
breaks("C1", "no safetensors")(lambda root: rewrite(root, REQUESTS, b"\xff" * 100))
breaks("C2", "answer changed")(lambda root: edit_tensors(root, ANSWERS, lambda t: t["0/output/0"].add_(1e-3)))
breaks("C2", "ids beyond the tables")(lambda root: edit_tensors(root, REQUESTS, lambda t: t["0/values"].add_(10**9)))


@breaks("C2", "rows changed and hashed anew")
def _(root: Path) -> None:
    header, rest = read_header(root, 2)
    write_header(root, 2, header, bytes(len(rest)))


@pytest.mark.parametrize(("rule", "base", "damage"), CASES)
def test_a_broken_rule_is_named(
    rule: str, base: str, damage: Damage, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source: Archive = request.getfixturevalue(base)[1]
    root = tmp_path / "small.rqa"
    shutil.copytree(source.root, root)
    damage(root)
    with pytest.raises(ArchiveError) as caught:
        load(root)
    assert caught.value.rule == rule, str(caught.value)
    assert str(caught.value).startswith(f"[{rule}] ")
    assert len(str(caught.value)) < 2000


def test_the_undamaged_copy_loads(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    root = tmp_path / "small.rqa"
    shutil.copytree(small[1].root, root)
    relist(root)
    load(root, check_hashes=True)
    assert verify(root).ok


def test_shard_hashes_are_checked_when_asked(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    root = tmp_path / "small.rqa"
    shutil.copytree(small[1].root, root)
    path = root / "shards/rank-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArchiveError) as caught:
        load(root, check_hashes=True)
    assert caught.value.rule == "F5"
    with pytest.raises(ArchiveError) as caught:
        verify(root)
    assert caught.value.rule == "F5"


def test_links_inside_the_folder_are_fine(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    root = tmp_path / "small.rqa"
    shutil.copytree(small[1].root, root)
    shutil.move(root / "plan.json", root / "plan-1.json")
    (root / "plan.json").symlink_to("plan-1.json")
    load(root)


def rules_of_vocabularies() -> set[str]:
    """The rules of vocabularies that tests/vocabulary names, whose hostile files are indexes."""
    sources = (path.read_text() for path in (Path(__file__).parent.parent / "vocabulary").glob("test_*.py"))
    return {rule for source in sources for rule in re.findall(r"\b(V\d|X9)\b", source)}


def test_every_rule_has_a_case() -> None:
    """FORMAT.md and these tests name the same rules; F6 and the (v) parts are verify's (tests/inference)."""
    text = (Path(recinfer.__file__).parent / "archive/FORMAT.md").read_text()
    rules = set(re.findall(r"^- \*\*([A-Z]\d+)\*\*", text, flags=re.M))
    assert rules - {"F6"} == {case.values[0] for case in CASES} | (rules_of_vocabularies() - {"X9"})
