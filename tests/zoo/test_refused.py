"""Forwards and example batches that cannot be exported: one sentence names the place and says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.cut import cut_model
from recinfer.archive.leaves import find_leaves
from recinfer.capture import CaptureError, capture
from recinfer.errors import ConfigError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.zoo.drawing import Draw
from tests.zoo.rankers import DIM, bags
from tests.zoo.sequences import rows


class Small(nn.Module):
    """A pooled and an unpooled collection; a case is the rest of its forward."""

    def __init__(self, forward: Callable[[Small, Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.ebc, self.ec = bags("user"), rows(("hist",))
        self.top, self.gru, self.drop = nn.Linear(DIM, 1), nn.GRU(DIM, DIM, batch_first=True), nn.Dropout(0.5)
        self.rest = forward

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Any:
        hist = self.ec(ids)["hist"].to_padded_dense(3)
        return self.rest(self, ids, dense, self.ebc(ids).values() + hist.sum(1))


def draw(batch: int = 6) -> tuple[KeyedJaggedTensor, Tensor]:
    d = Draw(batch, 1)
    return d.kjt(d.bag("user", 40), d.bag("hist", 40)), d.floats(2)


def export(forward: Callable[..., Any], *batches: Any) -> str:
    """The message of the refusal."""
    model = Small(forward)
    with pytest.raises(ConfigError) as caught:
        cut_model(model, find_leaves(model), lambda body: None, batches)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


def branch(self, ids, dense, x):
    if x.sum() > 0:
        x = x * 2
    return x


def size_branch(self, ids, dense, x):
    return x * 2 if dense.shape[0] > 10 else x


def values_branch(self, ids, dense, x):
    return x * 2 if ids["hist"].values().shape[0] > 2 * dense.shape[0] + 3 else x


def odd_branch(self, ids, dense, x):
    return x * 2 if dense.shape[0] % 2 else x


def equal_branch(self, ids, dense, x):
    return x * 2 if ids["hist"].values().shape[0] != dense.shape[0] else x


def random(self, ids, dense, x):
    return self.top(x) + torch.rand(x.shape[0], 1)


def dropout(self, ids, dense, x):
    return self.top(nn.functional.dropout(x, 0.5))


def packed(self, ids, dense, x):
    lengths = ids["hist"].lengths().clamp(1, 3)
    padded = self.ec(ids)["hist"].to_padded_dense(3)
    return self.gru(nn.utils.rnn.pack_padded_sequence(padded, lengths, True, enforce_sorted=False))[1][0]


def two_stages(self, ids, dense, x):
    best = (x.abs().sum(1) * 10).long() % 40
    kjt = KeyedJaggedTensor(["user"], best, lengths=torch.ones(best.shape[0], dtype=torch.int32))
    return self.ebc(kjt).values()


def length(self, ids, dense, x):
    return self.top(torch.stack([x[i] for i in range(len(dense))]))


def number(self, ids, dense, x):
    return self.top(x) + torch.zeros(int(dense.shape[0]), 1)


def numpy(self, ids, dense, x):
    return x + torch.from_numpy(dense.numpy())[:, :1]


def view(self, ids, dense, x):
    return x.view(6, DIM)


def columns(self, ids, dense, x):
    return x + self.ec(ids)["hist"].values().view(-1, 3 * DIM)[:, :DIM]


def sample_rows(self, ids, dense, x):
    return x + self.ec(ids)["hist"].values().view(dense.shape[0], -1, DIM).sum(1)


def nothing(self, ids, dense, x):
    return {}


def complex_numbers(self, ids, dense, x):
    return {"waves": torch.exp(1j * x)}


def ids_again(self, ids, dense, x):
    return x, ids


def bags_again(self, ids, dense, x):
    return self.ec(ids)


def plain(self, ids, dense, x):
    return self.drop(x)


# fmt: off
FORWARDS = [
    (branch, r"at test_refused\.py:\d+, in branch: `if x\.sum\(\) > 0:`.*depends on the numbers in a tensor; write torch\.where"),
    (size_branch, r"another way at .*in size_branch: .* unless the number of samples is at most 10; .*torch\.where"),
    (values_branch, r"another way at .*in values_branch: .* unless size 0 of the values of ids\['hist'\] (<=|>) 2\*size 0 of .* \+ 3; .*torch\.where"),
    (odd_branch, r"another way at .*in odd_branch: .* unless Mod\(size 0 of the lengths of .*, 2\) != 0; .*torch\.where"),
    (equal_branch, r"another way at .*in equal_branch: .* unless size 0 of the values of .* != size 0 of the lengths of"),
    (random, "draws random numbers by aten.rand.default at .*self.training"),
    (dropout, "draws random numbers by aten.dropout.default at .*self.training"),
    (packed, "packs a padded sequence at test_refused.py.*on the padded sequence"),
    (two_stages, "the ids of 'ebc' are computed from the vectors of 'e.*split the model in two"),
    (length, r"works only where the number of samples of .* is 5 at test_refused\.py:.*in length.*x\.shape\[0\]"),
    (number, r"works only where the number of samples of .* is 5; .*int\(\)"),
    (numpy, r"in numpy.*leaves torch by \.numpy\(\)"),
    (view, r"in view: `return x\.view\(6, DIM\)`"),
    (columns, r"in columns: `return x .* is invalid for input of size .*; a view of several values as one row needs as many values"),
    (sample_rows, r"in sample_rows: .* needs as many values in each sample of the example batch; pad them .*to_padded_dense\(N\)"),
    (nothing, "forward returns no tensor"),
    (complex_numbers, "returns complex numbers as 'waves'; return torch.view_as_real"),
    (bags_again, r"returns a JaggedTensor as 'hist'; expected a tensor, .*\.to_padded_dense\(most\)"),
    (ids_again, "returns a KeyedJaggedTensor as 'output_1'; expected a tensor"),
]
# fmt: on


@pytest.mark.parametrize(("forward", "message"), FORWARDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_forward_that_cannot_be_exported(forward: Callable[..., Any], message: str) -> None:
    text = export(forward, draw())
    assert re.search(message, text), text


def even(each: int, batch: int = 6) -> tuple[KeyedJaggedTensor, Tensor]:
    d = Draw(batch, 1)
    return d.kjt(d.bag("user", 40), d.bag("hist", 40, each=each)), d.floats(2)


def test_batches_whose_samples_have_other_numbers_of_values() -> None:
    text = export(sample_rows, even(3), even(2, 7))
    assert re.search(r"splits the values of ids\['hist'\] at test_refused.py:.* .*to_padded_dense\(N\)", text), text


def with_nan() -> tuple[Any, ...]:
    ids, dense = draw()
    dense[2, 1] = float("nan")
    return ids, dense


def rows_a_value() -> tuple[Any, ...]:
    ids, _ = draw(7)
    return ids, torch.ones(ids["hist"].values().shape[0], 2)


def row_of_each_value(batch: int = 6) -> tuple[Any, ...]:
    ids, _ = draw(batch)
    return ids, torch.ones(ids.values().shape[0], 2)


# fmt: off
BATCHES = [
    ("one sample", (draw(1),), "has 1 sample; give at least 2"),
    ("no samples", (draw(0),), "has 0 samples; give at least 2"),
    ("NaN", (with_nan(),), "has NaN or infinity in dense"),
    ("complex", ((draw()[0], torch.ones(6, 2, dtype=torch.complex64)),), "dense has complex numbers; give torch.view_as_real"),
    ("other dtypes", (draw(), (draw(7)[0], draw(7)[1].double())), "differ in more than sizes: dense .*float32.*float64"),
    ("other features", (draw(), (draw(7)[0].split([1, 1])[0], draw(7)[1])), "differ in more than sizes: ids"),
    ("three batches", (draw(), draw(), draw()), "got 3 example batches"),
    ("too few arguments", ((draw()[0],),), r"does not fit forward\(ids.*missing.*'dense'"),
    ("a text", ("x",), r"does not fit forward"),
    ("no tensors", ((None, None),), "no tensor with a batch axis"),
    ("no ids", ((torch.ones(6, 2), torch.ones(4, 2)),), "has 6 rows in ids, 4 rows in dense, and no ids to tell .*two example"),
    ("rows a sample", ((draw()[0], torch.ones(12, 2)),), "dense has 12 rows, 2 for each of 6 samples, .*give two example"),
    ("rows a value", (rows_a_value(),), r"dense has \d+ rows, as many as ids\['hist'\] has values, .*give two example"),
    ("rows of all values", (row_of_each_value(),), r"dense has \d+ rows, as many as ids has values, .*give two .* or as the weights of ids"),
    ("rows of all values, twice", (row_of_each_value(), row_of_each_value(9)), "dense has as many rows as ids has values; give .* as a JaggedTensor, or as the weights of ids"),
    ("a feature is missing", ((draw()[0].split([1, 1])[0], draw()[1]),), "'ec' reads feature 'hist'; .* has 'user'"),
    ("an outer list", ([draw()[0], draw()[1]],), "give a tuple of its arguments"),
]
# fmt: on


@pytest.mark.parametrize(("batches", "message"), [b[1:] for b in BATCHES], ids=[b[0] for b in BATCHES])
def test_an_example_batch_that_cannot_be_used(batches: tuple[Any, ...], message: str) -> None:
    text = export(plain, *batches)
    assert re.search(message, text), text


def test_keys_of_different_batch_sizes() -> None:
    ids = KeyedJaggedTensor(
        ["user", "hist"], torch.arange(5), lengths=torch.ones(5, dtype=torch.int32), stride_per_key_per_rank=[[2], [3]]
    )
    assert "batch sizes that differ between its keys" in export(plain, (ids, torch.ones(3, 2)))


def test_a_capture_of_a_model_without_weights() -> None:
    model = Small(plain)
    model.rest = lambda self, ids, dense, x: self.top(x)  # type: ignore[assignment]
    model.top.to("meta")
    with pytest.raises(CaptureError, match=r"at test_refused.*on the meta device; load its weights before the capture"):
        capture(model, draw())


def test_dropout_of_a_model_in_train_mode_is_off() -> None:
    model = Small(plain).train()
    found = cut_model(model, find_leaves(model), lambda body: None, (draw(),))
    assert found is not None
    assert model.training
    tensors = found.dense.example(4, 0)
    assert torch.equal(found.dense.module(*tensors)["output"], found.dense.module(*tensors)["output"])
