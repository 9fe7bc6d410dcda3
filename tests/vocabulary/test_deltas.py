"""Deltas change an id and its row in one switch: no request reads the row of an id of another state."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recinfer.archive.delta import read_delta
from recinfer.archive.reader import Archive
from recinfer.checkpoint import CheckpointReader
from recinfer.errors import ArchiveError, ConfigError
from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import Predictor, load
from recinfer.modules.embedding_configs import DataType
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.vocabulary.index import build_index
from recinfer.vocabulary.table import TableVocabulary
from tests.archive.models import Ranker, make_archive
from tests.serving.paths import BytePath, decoded
from tests.vocabulary.made import vocabulary

ITEM = ("ebc", "item")
NEXT = 10**9
"""Ids of state s begin at s * NEXT."""


def marked(model: nn.Module, rows: np.ndarray, ids: np.ndarray) -> nn.Module:
    """``model`` with the last digits of an id in the vector of its row, which INT8 keeps exactly."""
    new = copy.deepcopy(model)
    with torch.no_grad():
        weight = new.get_submodule("ebc.embedding_bags.item").weight
        for row, id in zip(rows.tolist(), ids.tolist()):
            weight[row] = mark(id)
    return new


def mark(id: int) -> torch.Tensor:
    """A vector of 0 and 255 for the state and the number of an id: the scale is 1, so that no digit is rounded."""
    digits = [0.0, 255.0, *(float(d) for d in f"{id:014d}")]
    return torch.tensor(digits)


def states(model: nn.Module, count: int) -> list[tuple[nn.Module, TableVocabulary]]:
    """Models and vocabularies of successive checkpoints: a third of the ids is replaced each time, in the same rows."""
    rng = np.random.default_rng(0)
    rows, ids = rng.permutation(1200)[:1000], np.arange(1000)
    found = []
    for state in range(count):
        if state:
            out = rng.choice(1000, 333, replace=False)
            ids = ids.copy()
            ids[out] = state * NEXT + out
        model = marked(model, rows, ids)
        made = TableVocabulary(ids.astype(np.int64), rows.astype(np.int64), 1201, vocabulary(1201).segments)
        found.append((model, made))
    return found


def save(model: nn.Module, path: Path) -> CheckpointReader:
    torch.save(model.state_dict(), path)
    return CheckpointReader(path)


Chain = tuple[Archive, list[Path], list[tuple[nn.Module, TableVocabulary]]]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """An archive and three deltas."""
    folder = tmp_path_factory.mktemp("chain")
    torch.manual_seed(7)
    made = states(Ranker(), 4)
    options = {"missing": {"*": "empty"}, "precision": DataType.INT8, "kinds": ("row_wise",)}
    archive = make_archive(folder, model=made[0][0], vocabularies={ITEM: made[0][1]}, **options)[1]  # type: ignore[arg-type]
    deltas: list[Path] = []
    for number, (model, now) in enumerate(made[1:], 1):
        path = folder / f"{number}.rqd"
        reader = save(model, folder / f"{number}.pt")
        make_delta(archive.root, model, reader, path, after=deltas, vocabularies={ITEM: now}, progress=False)
        deltas.append(path)
    return archive, deltas, made


def request_of(ids: np.ndarray) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f_item"], torch.from_numpy(ids), lengths=torch.ones(len(ids), dtype=torch.int32))


def test_a_delta_takes_ids_out_and_puts_ids_in(chain: Chain) -> None:
    archive, deltas, made = chain
    predictor = load(archive.root)
    every = np.unique(np.concatenate([v.ids for _, v in made]))
    for state, (model, now) in enumerate(made):
        if state:
            delta = read_delta(deltas[state - 1])
            assert delta.info.vocabularies[0].ids == 2 * 333 or state > 1
            predictor.apply_delta(deltas[state - 1])
        found = predictor.lookup(request_of(every)).pooled.values()  # type: ignore[union-attr]
        weight = model.get_submodule("ebc.embedding_bags.item").weight
        known = np.isin(every, now.ids)
        expected = torch.stack([mark(int(id)) for id in every[known]])
        assert torch.equal(found[torch.from_numpy(known)], expected)
        missed = found[torch.from_numpy(~known)]
        assert not len(missed) or torch.allclose(missed, weight[1200].expand_as(missed).detach(), atol=0.05)
        entries = predictor.state.intake.steps._steps[0]._indexes[0].entries()  # type: ignore[attr-defined]
        order = np.argsort(now.ids)
        assert np.array_equal(entries[0], now.ids[order]) and np.array_equal(entries[1], now.rows[order])
    for state in (2, 1, 0):
        predictor.undo_delta()
        found = predictor.lookup(request_of(made[state][1].ids)).pooled.values()  # type: ignore[union-attr]
        assert torch.equal(found, torch.stack([mark(int(id)) for id in made[state][1].ids]))


def paths_of(predictor: Predictor) -> dict[str, Callable[[np.ndarray], torch.Tensor]]:
    service = InferenceService(ModelRegistry({"m": predictor}))
    bytes_path = BytePath(service)

    def by_bytes(ids: np.ndarray) -> torch.Tensor:
        data = bytes_path.lookup(codec.encode_lookup_request(request_of(ids)))
        assert data is not None
        return vectors(data)

    def by_decoded(ids: np.ndarray) -> torch.Tensor:
        return vectors(decoded(service, "Lookup", codec.encode_lookup_request(request_of(ids))))

    def vectors(data: bytes) -> torch.Tensor:
        pooled = codec.decode_lookup_response(data)[0]
        assert pooled is not None
        return pooled.values()

    def by_python(ids: np.ndarray) -> torch.Tensor:
        return predictor.lookup(request_of(ids)).pooled.values()  # type: ignore[union-attr]

    return {"bytes": by_bytes, "decoded": by_decoded, "python": by_python}


@pytest.mark.parametrize("path", ["bytes", "decoded", "python"])
def test_no_interleaving_gives_the_vector_of_another_id(chain: Chain, path: str) -> None:
    """Each vector names its id; a request sees one state: an id that it lacks reads the row of unknown ids, never another's."""
    archive, deltas, made = chain
    predictor = load(archive.root)
    lookup = paths_of(predictor)[path]
    ids = np.random.default_rng(1).permutation(np.unique(np.concatenate([v.ids for _, v in made])))[:400]
    unknown = lookup(np.array([-5]))[0]
    expected = torch.stack([mark(int(id)) for id in ids])
    possible = [torch.from_numpy(np.isin(ids, v.ids)) for _, v in made]
    stop, wrong, seen = threading.Event(), [], set()

    def ask() -> None:
        while not stop.is_set():
            found = lookup(ids)
            known = (found == expected).all(1)
            others = found[~known]
            state = [n for n, each in enumerate(possible) if torch.equal(each, known)]
            if not state or not torch.equal(others, unknown.expand_as(others)):
                wrong.append(found)
                return
            seen.add(state[0])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        for delta in deltas:
            predictor.apply_delta(delta)
        for _ in deltas:
            predictor.undo_delta()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and seen


def test_segments_do_not_change_in_a_delta(chain: Chain, tmp_path: Path) -> None:
    archive, _, made = chain
    model, now = made[1]
    other = replace(now, input_hash_size=5)
    reader = save(model, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"'ebc.item' has another input_hash_size"):
        make_delta(archive.root, model, reader, tmp_path / "d.rqd", vocabularies={ITEM: other}, progress=False)
    with pytest.raises(ConfigError, match=r"tables with a vocabulary differ .*: ebc.item"):
        make_delta(archive.root, model, reader, tmp_path / "d.rqd", vocabularies={}, progress=False)


def test_a_list_of_ids_by_feature_has_deltas_too(tmp_path: Path) -> None:
    model, ids = Ranker(), np.arange(300) * 7 + NEXT
    archive = make_archive(tmp_path / "base", model=model, vocabularies={"f_cat": ids, "f_user": ["a", "b"]})[1]
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_submodule("ebc.embedding_bags.cats").weight[299] += 1
    reader, now = save(changed, tmp_path / "w.pt"), np.where(ids == ids[0], -3, ids)

    def delta(given: dict[str, object]) -> Path:
        make_delta(archive.root, changed, reader, tmp_path / "d.rqd", vocabularies=given, progress=False)  # type: ignore[arg-type]
        return tmp_path / "d.rqd"

    with pytest.raises(ConfigError, match=r"differ .*: ebc.cats; give the vocabularies that the export was given"):
        delta({})
    with pytest.raises(ConfigError, match=r"'ebc.cats' has another input_hash_size.*a list needs as many ids"):
        delta({"f_cat": ids[:-1]})
    predictor = load(archive.root)
    before = predictor.lookup({"f_cat": [[ids[0]], [ids[299]], [-3]], "f_user": [["b"], ["b"], ["b"]]})
    predictor.apply_delta(delta({"f_cat": now}))
    after = predictor.lookup({"f_cat": [[-3], [ids[299]], [ids[0]]], "f_user": [["b"], ["b"], ["b"]]})
    same = [torch.equal(before["f_cat"][at], after["f_cat"][at]) for at in range(3)]
    assert same == [True, False, True] and torch.equal(before["f_user"], after["f_user"])


def test_strings_of_a_delta_are_those_of_the_archive(tmp_path: Path) -> None:
    model = Ranker()
    archive = make_archive(tmp_path / "base", model=model, vocabularies={"f_user": ["a", "b"]})[1]
    reader = save(model, tmp_path / "w.pt")

    def delta(given: dict[str, object]) -> None:
        out = tmp_path / "d.rqd"
        make_delta(archive.root, model, reader, out, vocabularies=given, overwrite=True, progress=False)  # type: ignore[arg-type]

    delta({})
    delta({"f_user": ["a", "b"]})
    version = "a delta leaves strings as they are; export this checkpoint as a new version"
    for strings, what in (
        (["a", "b", "c"], "has 3 strings, and unknown ones read row 3; the index has 2 strings and row 2"),
        (["a", "c"], "the string 'c' reads row 2; expected row 1"),
        (["b", "a"], "the string 'b' reads row 1; expected row 0"),
    ):
        with pytest.raises(ConfigError, match=f"^the vocabulary of feature 'f_user'.* {what}: {version}"):
            delta({"f_user": strings})
    with pytest.raises(
        ConfigError, match=r"feature 'f_item': the archive has no strings of it; export .* a new version"
    ):
        delta({"f_item": ["a"]})
    with pytest.raises(ConfigError, match=r"the model has no feature 'f_none'"):
        delta({"f_none": ["a"]})


def changed_delta(path: Path, out: Path, change: Callable[[dict, dict], None]) -> Path:
    """A delta with other tensors of ids; hashes and header are made again."""
    import hashlib

    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    header.pop("__metadata__")
    tensors = {k: bytearray(body[v["data_offsets"][0] : v["data_offsets"][1]]) for k, v in header.items()}
    info = json.loads(tensors.pop("delta.json"))
    change(tensors, info)
    for number, entry in enumerate(info.get("vocabularies", [])):
        entry["ids_sha256"] = hashlib.sha256(tensors[f"ids/{number}"]).hexdigest()
        entry["rows_sha256"] = hashlib.sha256(tensors[f"id_rows/{number}"]).hexdigest()
    text = json.dumps(info).encode()
    entries, at = {}, 0
    tensors["delta.json"] = bytearray(text)
    shapes = {k: header[k]["shape"] for k in tensors}
    shapes["delta.json"] = [len(text)]
    for key, value in tensors.items():
        entries[key] = {"dtype": "U8", "shape": shapes[key], "data_offsets": [at, at + len(value)]}
        at += len(value)
    entries["__metadata__"] = {"format": "recinfer.delta/1", "sha256": hashlib.sha256(text).hexdigest()}
    head = json.dumps(entries).encode()
    out.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(tensors.values()))
    return out


def _numbers(tensors: dict, key: str) -> np.ndarray:
    return np.frombuffer(tensors[key], np.int64)


@pytest.mark.parametrize(
    "what", ["same", "order", "a row twice", "a row beyond", "no vocabulary", "two ids of one row"]
)
def test_deltas_that_are_refused(chain: Chain, what: str, tmp_path: Path) -> None:
    archive, deltas, _ = chain

    def change(tensors: dict, info: dict) -> None:
        ids, rows = _numbers(tensors, "ids/0"), _numbers(tensors, "id_rows/0")
        given = np.flatnonzero(rows >= 0)
        if what == "order":
            ids[:2] = ids[[1, 0]]
        elif what == "a row twice":
            rows[given[0]] = rows[given[1]]
        elif what == "a row beyond":
            rows[given[0]] = 1201
        elif what == "no vocabulary":
            info["vocabularies"][0]["table"] = "cats"
        elif what == "two ids of one row":  # an id that stays has the row already
            gone = np.flatnonzero(rows < 0)
            ids[gone[0]] += 10**6

    path = changed_delta(deltas[0], tmp_path / "d.rqd", change)
    predictor = load(archive.root)
    if what == "same":
        predictor.apply_delta(path)
        return
    with pytest.raises(ArchiveError) as caught:
        predictor.apply_delta(path)
    assert caught.value.rule == "X9" and predictor.num_deltas == 0


def test_a_delta_without_room_is_refused(chain: Chain) -> None:
    index = build_index(chain[2][0][1])
    many = np.arange(index.shape.buckets * 5 + 1) - 10**6
    assert index.changed(many, np.zeros(len(many), np.int64)) is None
