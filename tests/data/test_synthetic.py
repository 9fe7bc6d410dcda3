"""Synthetic rows: in Criteo's format, the same for a seed, skewed, partly empty, and with a signal to learn."""

from __future__ import annotations

import numpy as np
import pytest

from recinfer.data.synthetic import CARDINALITIES, generate_criteo
from recinfer.errors import InputError


@pytest.fixture(scope="module")
def rows():
    return generate_criteo(20_000, seed=1)


def test_columns_are_criteos(rows) -> None:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    assert list(rows.columns) == names
    assert all(len(column) == 20_000 for column in rows.columns.values())
    assert set(np.unique(rows.columns["label"])) == {0, 1}
    for name in names[14:]:
        words = set(rows.columns[name].tolist()) - {""}
        assert all(len(word) == 8 and set(word) <= set("0123456789abcdef") for word in words)


def test_values_of_a_column_do_not_collide() -> None:
    from recinfer.data.synthetic import _hex_tokens

    for at, cardinality in enumerate(CARDINALITIES):
        assert len(set(_hex_tokens(at, cardinality).tolist())) == cardinality


def test_some_fields_are_empty(rows) -> None:
    assert 0.4 < np.isnan(rows.columns["I1"]).mean() < 0.5
    assert not np.isnan(rows.columns["I2"]).any()
    assert 0 < (rows.columns["C3"] == "").mean() < 0.1


def test_ids_are_zipf(rows) -> None:
    tokens = rows.columns["C3"]
    counts = np.sort(np.unique(tokens[tokens != ""], return_counts=True)[1])[::-1]
    # p(rank) ~ (rank + 2)^-1.3: the first comes (32/2)^1.3 = 36.8 times as often as the 31st.
    assert 25 < counts[0] / counts[30] < 50
    assert counts.size > 2000
    assert counts[:100].sum() > counts.sum() / 2


def test_the_signal_is_there_and_is_not_all(rows) -> None:
    assert 0.82 < rows.best_auc() < 0.9
    assert 0.24 < rows.columns["label"].mean() < 0.3
    assert rows.probability.mean() == pytest.approx(rows.columns["label"].mean(), abs=0.02)


def test_click_rate_of_a_token_does_not_depend_on_the_number_of_rows(rows) -> None:
    """The rate of clicks of a frequent token is that of the same token among other rows, not of any token."""
    more = generate_criteo(30_000, seed=1)

    def rates(part) -> dict[tuple[str, str], float]:
        label, found = part.columns["label"], {}
        for name in ("C6", "C9", "C14", "C17", "C20", "C22", "C23", "C25"):
            tokens, counts = np.unique(part.columns[name], return_counts=True)
            for token in tokens[counts > 1500]:
                found[name, token] = label[part.columns[name] == token].mean()
        return found

    one, two, other = rates(rows), rates(more), rates(generate_criteo(20_000, seed=2))
    assert len(one) > 20
    assert np.corrcoef([one[k] for k in one], [two[k] for k in one])[0, 1] > 0.9
    shared = sorted(set(one) & set(other))  # the tokens are the same for every seed, their effects are not
    assert np.corrcoef([one[k] for k in shared], [other[k] for k in shared])[0, 1] < 0.7


def test_a_seed_gives_the_same_rows_again() -> None:
    one, two, other = (generate_criteo(50, seed) for seed in (3, 3, 4))
    for name in one.columns:
        np.testing.assert_array_equal(one.columns[name], two.columns[name])
    assert any(not np.array_equal(one.columns[n], other.columns[n], equal_nan=n[0] == "I") for n in one.columns)


def test_no_rows_are_refused() -> None:
    with pytest.raises(InputError, match="got 0 rows"):
        generate_criteo(0)
