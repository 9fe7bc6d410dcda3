"""A feature contract in a file, as `recinfer export --contract` takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recinfer.data.contract import FeatureContract, Hash, SparseFeature, Vocabulary
from recinfer.errors import ConfigError


def test_a_contract_is_read_from_its_json(tmp_path: Path) -> None:
    contract = FeatureContract(
        (SparseFeature("c", Hash(10)), SparseFeature("g", Vocabulary(("a", "b")), separator=" "))
    )
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(contract.to_dict()))
    assert FeatureContract.read(path) == contract


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"format": "recinfer.contract/9"}'])
def test_files_that_are_no_contract(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="feature contract"):
        FeatureContract.read(path)
