"""Archives that the archive, inference and hostile tests share."""

from __future__ import annotations

import pytest
from torch import nn

from recinfer.archive.reader import Archive
from recinfer.modules.embedding_configs import DataType
from tests.archive.models import Everything, Named, make_archive


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Archive]:
    """A float model and its INT8 archive: three ranks, table-, row- and column-wise. Never change its files."""
    return make_archive(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Archive]:
    """A model with every kind of embedding module, FP32, two ranks. Never change its files."""
    return make_archive(
        tmp_path_factory.mktemp("everything"),
        model=Everything(),
        ranks=2,
        precision=DataType.FP32,
        kinds=("row_wise", "column_wise"),
    )


@pytest.fixture(scope="session")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Archive]:
    """A model with an ids program, named inputs and facts, two ranks. Never change its files."""
    folder = tmp_path_factory.mktemp("named")
    return make_archive(folder, model=Named(), ranks=2, kinds=("row_wise",), inputs=[Named.batch()])
