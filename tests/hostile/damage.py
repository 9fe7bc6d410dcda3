"""Ways to damage a copy of an archive, and to make the damage consistent with hashes again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def edit_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's data."""
    path = root / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def relist(root: Path) -> None:
    """Bring sizes, hashes and bytes_total in line with the files."""

    def change(data: dict[str, Any]) -> None:
        for entry in data["files"]:
            content = (root / entry["path"]).read_bytes()
            entry["bytes"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
        data["bytes_total"] = sum(entry["bytes"] for entry in data["files"])

    edit_manifest(root, change)


def rewrite(root: Path, name: str, content: bytes) -> None:
    """Replace a file and put its size and hash into the manifest."""
    (root / name).write_bytes(content)
    relist(root)


def edit_plan(root: Path, change: Callable[[dict[str, Any]], object], *, rehash: bool = True) -> None:
    """Change the plan's data (its own hash field dropped); ``rehash`` puts its hash into the manifest."""
    path = root / "plan.json"
    data = json.loads(path.read_text())
    data.pop("hash")
    change(data)
    rewrite(root, "plan.json", json.dumps(data).encode())
    if rehash:
        from recinfer.distributed.planner.plan import Plan

        plan_hash = Plan.from_json(json.dumps(data)).hash
        edit_manifest(root, lambda manifest: manifest.update(plan_hash=plan_hash))


def read_header(root: Path, rank: int) -> tuple[dict[str, Any], bytes]:
    """The header of a shard file as data, and the bytes behind it."""
    content = (root / f"shards/rank-{rank:05d}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(
    root: Path, rank: int, header: dict[str, Any] | bytes, rest: bytes, *, length: int | None = None
) -> None:
    """Write a shard file with any header, and put its size and hash into the manifest."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -(8 + len(text)) % 4096)
    prefix = (len(text) if length is None else length).to_bytes(8, "little")
    rewrite(root, f"shards/rank-{rank:05d}.safetensors", prefix + text + rest)


def edit_header(root: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the data of a shard header."""
    header, rest = read_header(root, rank)
    change(header)
    write_header(root, rank, header, rest)


def fail_in_onnx(root: Path) -> None:
    """Make ``model.onnx`` load and then fail in every run: it reads a row that no batch has. Listed rightly."""
    import onnx
    from onnx import helper, numpy_helper

    path = root / "dense/model.onnx"
    model = onnx.load(path)
    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if output == name else output for output in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.array([1 << 40]), "row"))
    model.graph.node.append(helper.make_node("Gather", ["before", "row"], [name], axis=0))
    rewrite(root, "dense/model.onnx", model.SerializeToString())
