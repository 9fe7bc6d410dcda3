"""Modules in memory in the states that notebooks leave them in: wrapped, compiled, pruned, without weights, torch's defaults changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

import recinfer
from recinfer import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recinfer.capture import capture
from recinfer.errors import ConfigError


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="item", num_embeddings=20, embedding_dim=4, feature_names=["item"])
        self.bags = EmbeddingBagCollection(tables=[table])
        self.over = nn.Linear(2 + 4, 1)
        self.seen: dict[str, list[Tensor]] = {}

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat([dense, self.bags(ids).values()], dim=1)).squeeze(1)


def batch(samples: int = 3) -> tuple[Tensor, KeyedJaggedTensor]:
    lengths = torch.ones(samples, dtype=torch.int32)
    return torch.rand(samples, 2), KeyedJaggedTensor(["item"], torch.arange(samples), lengths=lengths)


def check(model: nn.Module, expected: nn.Module, folder: Path) -> None:
    """Export ``model`` and compare the archive with ``expected``."""
    served = recinfer.export(model, batch(), folder / "clicks.rqa", precision="fp32")
    given = batch(5)
    with torch.no_grad():
        torch.testing.assert_close(served(*given), expected(*given))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        DataParallel,
        lambda model: torch.compile(DataParallel(model), backend="eager"),
    ],
    ids=["compiled", "data parallel", "both"],
)
def test_wrappers_are_taken_off(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = Clicks()
    check(wrap(model), model, tmp_path)


def test_a_capture_takes_wrappers_off() -> None:
    found = capture(torch.compile(Clicks(), backend="eager"), batch())
    assert [slot.path for slot in found.slots][:1] == [slot.path for slot in capture(Clicks(), batch()).slots][:1]


def test_a_module_that_keeps_tensors_of_a_training_step(tmp_path: Path) -> None:
    model = Clicks()
    model.last = model(*batch())  # type: ignore[assignment]  # has a gradient function: deepcopy refuses it
    model.seen["losses"] = [model.last.sum()]
    check(model, model, tmp_path)
    assert model.last.requires_grad


def test_a_pruned_module(tmp_path: Path) -> None:
    model = Clicks()
    torch.nn.utils.prune.l1_unstructured(model.over, "weight", 0.5)
    check(model, model, tmp_path)


def _without_weights() -> nn.Module:
    return Clicks().to("meta")


def _tables_without_weights() -> nn.Module:
    model = Clicks()
    model.bags.to("meta")
    return model


def _lazy() -> nn.Module:
    model = Clicks()
    model.over = nn.LazyLinear(1)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("build", [_without_weights, _tables_without_weights, _lazy])
def test_a_module_without_weights_is_refused(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no weights: .* on the meta device|has no weights: .* is not initialized"
    ):
        recinfer.export(build(), batch(), tmp_path / "clicks.rqa")


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [
        torch.inference_mode,
        _default_dtype,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference mode", "default dtype", "default device", "autocast"],
)
def test_torchs_defaults_do_not_change_an_export(
    around: Callable[[], AbstractContextManager[object]], tmp_path: Path
) -> None:
    model, given = Clicks(), batch()
    with around():
        recinfer.export(model, given, tmp_path / "clicks.rqa", precision="fp32")
    served = recinfer.load(tmp_path / "clicks.rqa")
    with torch.no_grad():
        torch.testing.assert_close(served(*given), model(*given))
