"""A trial part of an id step: a class and a field are all that manifest and delta need of it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from recinfer.archive.manifest import Manifest, required_files
from recinfer.archive.manifest_rules import check_before_writing, read_manifest
from recinfer.archive.part import DeltaPart, Model, Part, Tensors, by_key, digest, parts_of
from recinfer.errors import ArchiveError

GOLDEN = Path(__file__).parent.parent / "golden" / "archives" / "int8-1ranks.zip"


@dataclass(frozen=True)
class Trial(Part):
    key: ClassVar[str] = "trials"

    feature: str

    @classmethod
    def path(cls, number: int) -> str:
        return f"trial/{number}"

    @classmethod
    def check(cls, entries: Sequence[Trial], model: Model) -> None:
        if len({entry.feature for entry in entries}) != len(entries):
            raise ArchiveError("a feature twice", rule="T1")

    def raw_features(self, model: Model) -> Collection[str]:
        return [self.feature]

    def string_features(self) -> Mapping[str, Collection[str]]:
        return {"text": ["a", "b"], "other": []}


@dataclass(frozen=True)
class WithTrials(Manifest):
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class TrialChange(DeltaPart):
    key: ClassVar[str] = "trials"

    count: int
    sha256: str

    def tensors(self) -> dict[str, tuple[int, str]]:
        return {"trials": (self.count, self.sha256)}

    @classmethod
    def check(cls, changes: Sequence[tuple[TrialChange, Tensors]]) -> None:
        raise NotImplementedError

    def check_fit(self, tensors: Tensors, model: Model) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def plain() -> WithTrials:
    with zipfile.ZipFile(GOLDEN) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("manifest.json"))
        read = read_manifest(archive.read(name))
    return WithTrials(**{field.name: getattr(read, field.name) for field in fields(read)})


def test_a_part_without_entries_leaves_no_trace(plain: WithTrials) -> None:
    assert plain.parts == () and "trials" not in json.loads(plain.to_json())
    assert plain.with_parts([]) == plain and not plain.raw_features and not plain.string_features


def test_the_manifest_asks_the_entries(plain: WithTrials) -> None:
    made = plain.with_parts([Trial("f"), Trial("g")])
    assert isinstance(made, WithTrials) and made.parts == ((Trial("f"), Trial("g")),)
    assert json.loads(made.to_json())["trials"] == [{"feature": "f"}, {"feature": "g"}]
    assert set(required_files(made)) - set(required_files(plain)) == {"trial/0", "trial/1"}
    assert made.raw_features == {"f", "g"} and made.string_features == {"text", "other"}
    assert made.string_examples == {"text": ["a", "b"]}
    check_before_writing(made)
    with pytest.raises(ArchiveError) as caught:
        check_before_writing(plain.with_parts([Trial("f"), Trial("f")]))
    assert caught.value.rule == "T1"


def test_entries_of_a_delta_are_found_by_their_field() -> None:
    @dataclass(frozen=True)
    class Info:
        name: str
        trials: tuple[TrialChange, ...] = ()

    numbers = np.arange(3)
    change = TrialChange(3, digest(numbers))
    assert digest(numbers) == digest(numbers.astype(">i8"))  # of the little-endian bytes
    assert by_key([change, change]) == {"trials": (change, change)}
    assert parts_of(Info("a", **by_key([change])), DeltaPart) == [(change,)] and parts_of(Info("a"), DeltaPart) == []
