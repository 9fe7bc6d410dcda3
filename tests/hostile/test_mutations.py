"""Random damage to manifest, plan, shard header and programs: always an ArchiveError or a sound archive, never a crash.

A few hundred examples run with the suite; ``--mutations N`` runs N of each.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from recinfer.archive.program import check_program
from recinfer.archive.reader import Archive, open_archive
from recinfer.errors import ArchiveError
from recinfer.inference.predictor import Predictor
from tests.hostile.damage import read_header, relist, write_header

STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, 0.5, "", "a", "\x00", "\ud7ff", "../x", "/", "é" * 300,
    [], {}, [[]], {"a": 1}, "int8", "U8", [0, 0], [1 << 62, 1 << 62],
]  # fmt: skip
CHEAP = settings(
    deadline=None,
    max_examples=150,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture
def scratch(small: tuple[nn.Module, Archive], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mutations") / "small.rqa"
    shutil.copytree(small[1].root, root)
    return root


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*at, key))
    return found


def mutate(value: Any, chance: random.Random) -> Any:
    """A copy with one to three places changed, dropped, doubled or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.randint(1, 3)):
        known = places(value)
        if not known:
            break
        *path, last = chance.choice(known)
        holder = value
        for key in path:
            holder = holder[key]
        action = chance.randrange(5)
        if action == 0:
            del holder[last]
        elif action == 1 and isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), holder[last])
        elif action == 2 and isinstance(holder, dict):
            holder[chance.choice(["extra", "", str(last) + "x"])] = holder.pop(last)
        elif action == 3 and isinstance(holder[last], int) and not isinstance(holder[last], bool):
            holder[last] += chance.choice([-1, 1, 4096, -4096, 1 << 40])
        else:
            holder[last] = copy.deepcopy(chance.choice(STRANGE))
    return value


def attempt(root: Path) -> None:
    """Open and answer: a refusal by rule, or an archive whose every row can be read."""
    try:
        archive = open_archive(root)
        mapped = archive.map_shards()
        zlib.crc32(mapped.buffer.numpy())  # touches every mapped byte: a hole would end the process
        Predictor(archive).check_request(0)
    except ArchiveError as error:
        assert error.rule


def choices(request: pytest.FixtureRequest) -> settings:
    wanted = request.config.getoption("--mutations", default=None)
    return settings(CHEAP, max_examples=int(wanted)) if wanted else CHEAP


def run(request: pytest.FixtureRequest, body: Any) -> None:
    choices(request)(given(st.integers(0, 2**32))(body))()


def test_mutated_manifests(scratch: Path, request: pytest.FixtureRequest) -> None:
    original = (scratch / "manifest.json").read_text()
    data = json.loads(original)

    def body(seed: int) -> None:
        (scratch / "manifest.json").write_text(json.dumps(mutate(data, random.Random(seed))))
        attempt(scratch)

    run(request, body)


def test_mutated_plans(scratch: Path, request: pytest.FixtureRequest) -> None:
    data = json.loads((scratch / "plan.json").read_text())
    data.pop("hash")

    def body(seed: int) -> None:
        (scratch / "plan.json").write_text(json.dumps(mutate(data, random.Random(seed))))
        relist(scratch)
        attempt(scratch)

    run(request, body)


def test_mutated_shard_headers(scratch: Path, request: pytest.FixtureRequest) -> None:
    header, rest = read_header(scratch, 2)

    def body(seed: int) -> None:
        write_header(scratch, 2, mutate(header, random.Random(seed)), rest)
        attempt(scratch)

    run(request, body)


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "shards/rank-00001.safetensors"])
def test_flipped_and_cut_bytes(scratch: Path, request: pytest.FixtureRequest, name: str) -> None:
    original = (scratch / name).read_bytes()

    def body(seed: int) -> None:
        chance = random.Random(seed)
        content = bytearray(original)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(min(len(content), 6000))] = chance.randrange(256)
        if chance.random() < 0.3:
            del content[chance.randrange(len(content)) :]
        (scratch / name).write_bytes(content)
        if name != "manifest.json" and chance.random() < 0.8:
            relist(scratch)
        attempt(scratch)

    run(request, body)


def test_flipped_program_bytes_are_refused_or_known(
    small: tuple[nn.Module, Archive], request: pytest.FixtureRequest
) -> None:
    original = (small[1].root / "dense/model.pt2").read_bytes()

    def body(seed: int) -> None:
        chance = random.Random(seed)
        content = bytearray(original)
        for _ in range(chance.randint(1, 8)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            check_program(bytes(content))
        except ArchiveError as error:
            assert error.rule in ("D1", "D2")

    run(request, body)
