"""The text form of ids that ``recinfer lookup`` takes."""

from __future__ import annotations

import pytest

from recinfer.cli.lookup import parse_features
from recinfer.cli.options import parse_pair
from recinfer.errors import ConfigError


def test_one_sample_of_two_features() -> None:
    found = parse_features(["C1=3,7", "C2=5"])
    assert found.keys == ("C1", "C2")
    assert found.batch == 1
    assert found.values.tolist() == [3, 7, 5]
    assert found.lengths.tolist() == [2, 1]
    assert found.weights is None


def test_samples_are_separated_by_semicolons_and_may_be_empty() -> None:
    found = parse_features(["C1=3,7;;9", "C2=;5;"])
    assert found.batch == 3
    assert found.values.tolist() == [3, 7, 9, 5]
    assert found.lengths.tolist() == [2, 0, 1, 0, 1, 0]


def test_weights_follow_a_colon() -> None:
    found = parse_features(["C1=3:0.5,7:2"])
    assert found.values.tolist() == [3, 7]
    assert found.weights is not None and found.weights.tolist() == [0.5, 2.0]


def test_names_may_have_an_equals_sign() -> None:
    assert parse_features(["utm=source=3", "a=="]).keys == ("utm=source", "a=")
    assert parse_pair("stable=date=2026-11-25", "--label", "LABEL=VERSION", at_first=True) == (
        "stable",
        "date=2026-11-25",
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["C1"], "expected NAME=IDS"),
        (["=3"], "expected NAME=IDS"),
        (["C1=3,x"], "'x' is not an id"),
        (["C1=3.5"], "'3.5' is not an id"),
        (["C1=3:half"], "'3:half' is not an id"),
        (["C1=3", "C1=4"], "occurs twice"),
        (["C1=3;4", "C2=5"], "got different numbers of samples"),
        (["C1=3:0.5,4"], "1 of 2 ids have weights"),
    ],
)
def test_other_text_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("'", "'")):
        parse_features(texts)
