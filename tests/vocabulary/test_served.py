"""Archives with vocabularies: written, opened, looked up by raw ids on every path, resharded and verified."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.archive.reader import Archive, open_archive
from recinfer.errors import ArchiveError, ConfigError
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.reshard import plan_archive, reshard_archive
from recinfer.inference.verify import verify
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.vocabulary.index import HEADER_BYTES
from recinfer.vocabulary.info import VocabularyInfo
from recinfer.vocabulary.table import Segment, TableVocabulary
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_archive, make_request
from tests.serving.paths import BytePath, decoded
from tests.vocabulary.made import UNUSUAL, expected_rows, vocabulary

ITEM, CATS = ("ebc", "item"), ("ebc", "cats")
FEATURES = {"f_item": ITEM, "f_hist": ITEM, "f_cat": CATS}


def made_vocabularies() -> dict[tuple[str, str], TableVocabulary]:
    """Three segments by range, and hashed rows of unknown ids."""
    return {
        ITEM: vocabulary(1201, segments=3, input_hash_size=2**50, seed=1),
        CATS: vocabulary(307, segments=1, hashed=True, seed=2),
    }


def made_archive(folder: Path, **options: object) -> tuple[dict[tuple[str, str], TableVocabulary], Archive]:
    made = made_vocabularies()
    return made, make_archive(folder, vocabularies=made, **options)[1]


def raw_request(
    made: dict[tuple[str, str], TableVocabulary], batch: int, seed: int, narrow: bool = False
) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Raw ids, known and unknown, and the rows that they read."""
    rng = np.random.default_rng(seed)
    rows = make_request(RANKER_ROWS, batch, seed)
    raw, read = [], []
    for name in list(RANKER_ROWS):
        values = rows[name].values().numpy()
        if name in FEATURES:
            vocabulary = made[FEATURES[name]]
            known = rng.choice(vocabulary.ids, len(values))
            unknown = rng.choice([*UNUSUAL, 3, 2**49 + 1, 2**52, -7], len(values))
            ids = np.where(rng.random(len(values)) < 0.7, known, unknown)
            if narrow:
                ids = ids.astype(np.int32).astype(np.int64)
            raw.append(torch.from_numpy(ids))
            read.append(torch.from_numpy(expected_rows(vocabulary, ids)))
        else:
            raw.append(torch.from_numpy(values))
            read.append(torch.from_numpy(values))
    lengths = rows.lengths().int()
    ids = torch.cat(raw)
    keys = rows.keys()
    return (
        KeyedJaggedTensor(keys, ids.int() if narrow else ids, lengths=lengths),
        KeyedJaggedTensor(keys, torch.cat(read), lengths=lengths),
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[str, str], TableVocabulary], Path, Path]:
    """Vocabularies, an archive with them, and one of the same rows without."""
    folder = tmp_path_factory.mktemp("archives")
    made, archive = made_archive(folder / "with", missing={"*": "empty"})
    plain = make_archive(folder / "without", missing={"*": "empty"})[1]
    return made, archive.root, plain.root


Both = tuple[dict[tuple[str, str], TableVocabulary], Path, Path]


@pytest.mark.parametrize("narrow", [False, True])
def test_every_path_reads_the_rows_of_raw_ids(both: Both, narrow: bool) -> None:
    made, root, plain_root = both
    predictor, plain = load(root), load(plain_root)
    service, without = (InferenceService(ModelRegistry({"m": p})) for p in (predictor, plain))
    paths, plain_paths = BytePath(service, threads=2), BytePath(without, threads=2)
    for seed, batch in enumerate((1, 4, 300)):
        ids, rows = raw_request(made, batch, seed, narrow)
        dense = torch.randn(batch, NUM_DENSE)
        expected = plain.predict(dense, rows)["output"]
        assert torch.equal(predictor.predict(dense, ids)["output"], expected)
        found, wanted_found = predictor.lookup(ids), plain.lookup(rows)
        for name in wanted_found.keys():  # noqa: SIM118 - not a dict
            assert torch.equal(found[name], wanted_found[name])
        wanted, asked = codec.encode_lookup_request(rows), codec.encode_lookup_request(ids)
        assert paths.lookup(asked) == decoded(service, "Lookup", asked) == plain_paths.lookup(wanted)
        asked = codec.encode_predict_request(dense, ids, "m")
        wanted = codec.encode_predict_request(dense, rows, "m")
        assert paths.predict(asked) == plain_paths.predict(wanted)
        assert decoded(service, "Predict", asked) == decoded(without, "Predict", wanted)
    paths.close()
    plain_paths.close()


def test_hits_and_misses_are_counted_by_feature(both: Both) -> None:
    made, root, _ = both
    predictor = load(root)
    before = predictor.intake.counts["known"], predictor.intake.counts["unknown"]
    ids = KeyedJaggedTensor(
        ["f_item", "f_user", "f_cat"],
        torch.tensor([*made[ITEM].ids[:3].tolist(), 5, 3, *made[CATS].ids[:1].tolist(), 2**33]),
        lengths=torch.tensor([4, 1, 2]),
    )
    predictor.lookup(ids)
    known, unknown = (
        {name: now[name] - was[name] for name in now}
        for now, was in zip((predictor.intake.counts["known"], predictor.intake.counts["unknown"]), before)
    )
    assert known == {"f_item": 3, "f_hist": 0, "f_cat": 1} and unknown == {"f_item": 1, "f_hist": 0, "f_cat": 1}


def test_inspect_shows_vocabularies(both: Both, capsys: pytest.CaptureFixture[str]) -> None:
    from recinfer.cli.inspect import run

    made, root, plain = both
    run(root, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["vocabularies"]
    assert [(v["table"], v["ids"], v["rows"], v["segments"]) for v in found] == [
        (name, len(made["ebc", name].ids), made["ebc", name].num_rows, len(made["ebc", name].segments))
        for name in ("item", "cats")
    ]
    assert [v["unknown"] for v in found] == ["a fixed row of the id's segment", "a hashed row"]
    assert all(0 < v["load"] <= 0.86 and v["bytes"] > 64 for v in found)
    run(plain, as_json=True)
    assert "vocabularies" not in json.loads(capsys.readouterr().out.splitlines()[-1])


def test_golden_requests_hold_raw_ids(both: Both) -> None:
    made, root, _ = both
    from recinfer.archive.check import read_requests

    known = unknown = 0
    for request, _ in read_requests(open_archive(root)):
        ids = request.features["f_item"].values().numpy()
        known += int(np.isin(ids, made[ITEM].ids).sum())
        unknown += int((~np.isin(ids, made[ITEM].ids)).sum())
    assert known and unknown
    assert verify(root).ok


@pytest.mark.parametrize("ranks", [1, 2])
def test_reshard_keeps_the_index(both: Both, ranks: int, tmp_path: Path) -> None:
    made, root, _ = both
    archive = open_archive(root)
    plan = plan_archive(archive.manifest, world_size=ranks)
    counted = {table.table for table in plan.tables if "index_bytes" in table.estimates}
    assert counted == {table for _, table in made}
    again = reshard_archive(root, plan, tmp_path / "again.rqa", progress=False)
    assert again.manifest.vocabularies == archive.manifest.vocabularies
    assert (again.root / VocabularyInfo.path(0)).read_bytes() == (root / VocabularyInfo.path(0)).read_bytes()
    ids, _ = raw_request(made, 7, 3)
    dense = torch.randn(7, NUM_DENSE)
    assert torch.equal(load(again.root).predict(dense, ids)["output"], load(root).predict(dense, ids)["output"])


def test_unknown_ids_without_a_row_are_left_out(tmp_path: Path) -> None:
    made = {ITEM: vocabulary(1201, segments=(Segment(0, 700, 0, 0), Segment(700, 501, 1200)), input_hash_size=2**40)}
    made[CATS] = vocabulary(307, segments=(Segment(0, 307, 0, 0),))  # a table of means
    archive = make_archive(tmp_path / "with", vocabularies=made)[1]
    plain = load(make_archive(tmp_path / "without")[1].root)
    predictor = load(archive.root)
    service = InferenceService(ModelRegistry({"m": predictor}))
    paths = BytePath(service)
    for seed, batch in enumerate((30, 90)):
        ids, rows = raw_request(made, batch, seed)
        keep = rows.values() >= 0
        assert not keep.all()
        kept = torch.zeros(len(keep) + 1, dtype=torch.int64)
        kept[1:] = keep.cumsum(0)
        offsets = kept[rows.offsets().long()]
        rows = KeyedJaggedTensor(rows.keys(), rows.values()[keep], lengths=offsets.diff().int())
        dense = torch.randn(batch, NUM_DENSE)
        assert torch.equal(predictor.predict(dense, ids)["output"], plain.predict(dense, rows)["output"])
        asked = codec.encode_lookup_request(ids)
        assert paths.lookup(asked) is None  # the decoded path answers
        assert decoded(service, "Lookup", asked) == decoded(
            InferenceService(ModelRegistry({"m": plain})), "Lookup", codec.encode_lookup_request(rows)
        )
    paths.close()


# ---------------------------------------------------------------- refused


def rewritten(root: Path, out: Path, **changes: object) -> Path:
    """A copy of an archive with other values in its manifest's first vocabulary."""
    import shutil

    shutil.copytree(root, out)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["vocabularies"][0] |= changes
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"table": "none"}, "V1"),
        ({"table": "cats"}, "V1"),
        ({"input_hash_size": -1}, "V1"),
        ({"input_hash_size": 2**41}, "V6"),
        ({"segments": []}, "V1"),
        ({"segments": [{"first_row": 0, "num_rows": 1200, "miss_row": 0, "miss_rows": 1}]}, "V1"),
        ({"segments": [{"first_row": 0, "num_rows": 1201, "miss_row": 1201, "miss_rows": 1}]}, "V1"),
        ({"segments": [{"first_row": 0, "num_rows": 1201}]}, "J3"),
    ],
)
def test_manifests_that_are_refused(both: Both, changes: dict[str, object], rule: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError) as caught:
        load(rewritten(both[1], tmp_path / "bad.rqa", **changes))
    assert caught.value.rule == rule


@pytest.mark.parametrize("change, rule", [("cut", "F4"), ("gone", "F3"), ("bucket", "V5"), ("swapped", "F5")])
def test_index_files_that_are_refused(both: Both, change: str, rule: str, tmp_path: Path) -> None:
    out = rewritten(both[1], tmp_path / "bad.rqa")
    path = out / VocabularyInfo.path(0)
    data = bytearray(path.read_bytes())
    if change == "cut":
        path.write_bytes(data[:-64])
    elif change == "gone":
        path.unlink()
    else:
        at = HEADER_BYTES + 64 * next(n for n in range(len(data) // 64 - 1) if data[HEADER_BYTES + 64 * n + 60] >= 2)
        if change == "bucket":
            data[at + 60] = 200
        else:  # two ids change their rows: only the hash shows it
            data[at + 40 : at + 44], data[at + 44 : at + 48] = data[at + 44 : at + 48], data[at + 40 : at + 44]
        path.write_bytes(data)
    with pytest.raises(ArchiveError) as caught:
        if change == "swapped":
            verify(out)
        else:
            load(out)
    assert caught.value.rule == rule


def test_a_feature_of_two_tables_has_no_vocabulary(tmp_path: Path) -> None:
    from recinfer.modules.embedding_configs import EmbeddingBagConfig
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    model = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(20, 4, name, feature_names=["f"]) for name in ("one", "two")],
    )
    with pytest.raises(ConfigError, match=r"\[V2\] feature 'f' reads 2 tables.*the name of another feature"):
        make_archive(tmp_path, model=model, vocabularies={("", "one"): vocabulary(20)})


def test_a_missing_feature_gets_no_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[V2\] feature 'f_cat': missing is 3"):
        make_archive(tmp_path, vocabularies=made_vocabularies(), missing={"f_cat": 3})


def test_other_rows_than_the_tables(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"\[V1\] vocabulary of table 'ebc.cats': segments have 300 rows; the table has 307"
    ):
        make_archive(tmp_path, vocabularies={CATS: vocabulary(300)})


def test_workers_share_the_pages(both: Both) -> None:
    predictor = load(both[1])
    step = predictor.intake.steps._steps[0]
    for index in step._indexes:  # type: ignore[attr-defined]
        assert not index.buckets.flags.writeable
    assert isinstance(predictor, Predictor)
