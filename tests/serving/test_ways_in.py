"""One table: every way to call a served model, with the same 200 requests. A cell is the largest difference from the predictor in
this process; where that refuses a request, every way has to refuse it with an error of the same kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.inference.predictor import Predictor, load
from recinfer.serving.server.server import Server
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import NUM_DENSE, ROWS, make_request
from tests.serving.requests import BAD, kjt_of
from tests.serving.requests import nth_request as nth
from tests.serving.tasks import COLUMNS, TASK_ROWS, tasks_archive, tasks_predictor

pytest.importorskip("ts", reason="torchserve is not installed (the torchserve extra)")

from tests.serving.ways_in import Asked, Way, answer_of, ways_of

__all__ = ["tasks_archive", "tasks_predictor"]

_WRONG = ("id out of range", "negative id", "unknown feature", "features left out", "nan in dense", "dense too wide")


def requests() -> list[Asked]:
    """200, by kind: rows that the table gets when weights become optional are "two tasks, without weights"."""
    found = [Asked("predict", "tiny", *reversed(make_request(n, 1 + n % 33))) for n in range(50)]
    for number in range(6 * 30):
        one = nth(number)
        kind = {2: "lookup", 4: "lookup, weighted", 5: "lookup, unpooled"}.get(number % 6)
        if kind is not None:
            found.append(Asked(kind, one.model, one.features))
    for number in range(50):
        found.append(_tasks(number, has_weights=number < 38))
    for number in range(10):
        ids, how = BAD[_WRONG[number % len(_WRONG)]][1]["ids"], BAD[_WRONG[number % len(_WRONG)]][1]
        dense = torch.tensor(how["dense"]) if "dense" in how else None
        found.append(Asked("wrong", "tiny", kjt_of(ids), dense))
    return found


def _tasks(number: int, *, has_weights: bool) -> Asked:
    random, batch = torch.Generator().manual_seed(number), 1 + number % 17
    lengths = torch.randint(0, 4, (len(TASK_ROWS), batch), generator=random, dtype=torch.int32)
    lengths[:, 0] = 1
    ids = [torch.randint(0, rows, (int(n.sum()),), generator=random) for rows, n in zip(TASK_ROWS.values(), lengths)]
    weights = torch.randn(int(lengths.sum()), generator=random) if has_weights else None
    features = KeyedJaggedTensor(list(TASK_ROWS), torch.cat(ids), weights=weights, lengths=lengths.reshape(-1))
    kind = "two tasks, weighted" if has_weights else "two tasks, without weights"
    return Asked(kind, "tasks", features, torch.randn(batch, len(COLUMNS), generator=random))


@pytest.fixture(scope="module")
def ways(
    archive: Path, others: dict[str, Path], tasks_archive: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Way]]:
    """All of them, to one server."""
    archives = {"tiny": archive, "tasks": tasks_archive, **others}
    models: dict[str, Predictor] = {name: load(path) for name, path in archives.items()}
    with ExitStack() as stack:
        server = stack.enter_context(Server(models, http_port=0))
        yield ways_of(models, archives, server, stack, tmp_path_factory.mktemp("commands"))


def test_every_way_in_gives_the_same(ways: dict[str, Way], capsys: pytest.CaptureFixture[str]):
    asked = requests()
    assert len(asked) == 200 and NUM_DENSE + len(ROWS) > 0
    assert_the_same(ways, asked, capsys)


def assert_the_same(ways: dict[str, Way], asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table of ``ways``, the first of which is what the others are compared with; every difference is 0."""
    first, *others = ways
    expected = [answer_of(ways[first], one) for one in asked]
    kinds = list(dict.fromkeys(one.kind for one in asked))
    differences: dict[tuple[str, str], float] = {}
    errors: dict[tuple[str, str], int] = {}
    for name in others:
        for one, right in zip(asked, expected):
            found, cell = answer_of(ways[name], one), (name, one.kind)
            if isinstance(right, str):
                assert found == right, (name, one, found)
                errors[cell] = errors.get(cell, 0) + 1
                continue
            assert not isinstance(found, str), (name, one, found)
            assert found.keys() == right.keys(), (name, one.kind, found.keys())
            for key, values in right.items():
                # An unpooled feature without ids has no vectors, and JSON no width for them.
                got = found[key].reshape(values.shape) if values.size == 0 else found[key]
                assert got.shape == values.shape, (name, one.kind, key, got.shape)
                most = float(np.abs(got - values).max()) if values.size else 0.0
                differences[cell] = max(differences.get(cell, 0.0), most)
    with capsys.disabled():
        print("\n" + _table(first, others, kinds, differences, errors))
    assert set(differences.values()) == {0.0}


def _table(
    first: str,
    ways: list[str],
    kinds: list[str],
    differences: dict[tuple[str, str], float],
    errors: dict[tuple[str, str], int],
) -> str:
    def cell(way: str, kind: str) -> str:
        number, refused = differences.get((way, kind)), errors.get((way, kind), 0)
        shown = [] if number is None else [f"{number:g}"]
        return ", ".join([*shown, *([f"{refused} equal errors"] if refused else [])])

    lines = [[f"largest difference from {first}", *kinds], *([way, *(cell(way, k) for k in kinds)] for way in ways)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)) for line in lines)
