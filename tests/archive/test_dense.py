"""The dense program: two engines that agree, at every batch size, from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from recinfer.archive.cut import cut_model
from recinfer.archive.dense import OnnxEngine, TorchEngine, export_part, open_dense
from recinfer.archive.leaves import find_leaves
from recinfer.archive.program import check_program
from recinfer.archive.reader import Archive
from recinfer.errors import ArchiveError, ConfigError
from tests.archive.models import Everything, Ranker


@pytest.mark.parametrize("batch", [0, 1, 2, 7, 300])
def test_engines_agree_with_the_model(small: tuple[nn.Module, Archive], batch: int) -> None:
    model, archive = small
    assert archive.manifest.dense is not None
    assert archive.manifest.dense.engine == "onnx"
    engines = [open_dense(archive, archive.manifest.dense, engine=engine) for engine in ("onnx", "torch")]
    dense, pooled = torch.randn(batch, 3), torch.randn(batch, 64)
    with torch.no_grad():
        expected = model.top(torch.cat([model.bottom(dense).relu(), pooled], dim=1)).squeeze(1)
    for engine in engines:
        (output,) = engine([dense, pooled])
        assert output.shape == (batch,)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_engines_run_from_many_threads(small: tuple[nn.Module, Archive]) -> None:
    _, archive = small
    assert archive.manifest.dense is not None
    for name in ("onnx", "torch"):
        engine = open_dense(archive, archive.manifest.dense, engine=name)  # type: ignore[arg-type]
        inputs = [[torch.randn(n, 3), torch.randn(n, 64)] for n in range(1, 40)]
        expected = [engine(tensors)[0] for tensors in inputs]
        with ThreadPoolExecutor(8) as pool:
            for given, known in zip(pool.map(lambda t: engine(t)[0], inputs * 3), expected * 3):  # noqa: B023
                assert torch.equal(given, known)


def test_operators_without_onnx_form_run_on_torch(everything: tuple[nn.Module, Archive]) -> None:
    info = everything[1].manifest.dense
    assert info is not None
    assert (info.engine, info.onnx) == ("torch", None)
    assert "the ONNX export failed" in str(info.onnx_refused)
    assert "\x1b" not in str(info.onnx_refused)
    with pytest.raises(ConfigError, match="no ONNX program"):
        open_dense(everything[1], info, engine="onnx")


def test_a_program_that_differs_is_not_served_by_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    from recinfer.archive import dense

    monkeypatch.setattr(dense, "MAX_ONNX_ERROR", -1.0)
    model = Ranker()
    cut = cut_model(model, find_leaves(model), lambda body: None)
    assert cut is not None
    exported = export_part(cut.dense)
    assert exported.onnx is None
    assert "differ from torch" in str(exported.onnx_refused)


def test_python_that_depends_on_values_is_refused() -> None:
    class Branches(Ranker):
        def forward(self, dense, kjt):  # type: ignore[no-untyped-def]
            scores = super().forward(dense, kjt)
            return scores if scores.sum() > 0 else -scores

    model = Branches()
    with pytest.raises(ConfigError, match=r"in forward: `return scores if.*depends on the numbers in a tensor"):
        cut_model(model, find_leaves(model), lambda body: None)


def test_a_fixed_batch_is_refused() -> None:
    class Fixed(Ranker):
        def forward(self, dense, kjt):  # type: ignore[no-untyped-def]
            return (
                super().forward(dense, kjt).view(-1, 1).expand(dense.shape[0], 1)
                + torch.zeros(dense.shape[0] * 5, 1)[:5]
            )

    model = Fixed()
    with pytest.raises(ConfigError):
        cut = cut_model(model, find_leaves(model), lambda body: None)
        assert cut is not None
        export_part(cut.dense)


def test_programs_hold_no_paths_and_no_pickles() -> None:
    for model in (Ranker(), Everything()):
        cut = cut_model(model, find_leaves(model), lambda body: None)
        assert cut is not None
        exported = export_part(cut.dense)
        check_program(exported.program)
        assert b"/site-packages/" not in exported.program
        assert b".py" not in exported.program + (exported.onnx or b"")


def test_inputs_that_onnx_drops_are_left_out() -> None:
    class Unused(Ranker):
        def forward(self, dense, kjt):  # type: ignore[no-untyped-def]
            self.ebc(kjt)
            return self.bottom(dense)

    model = Unused()
    cut = cut_model(model, find_leaves(model), lambda body: None)
    assert cut is not None
    exported = export_part(cut.dense)
    assert exported.onnx is not None
    dense, pooled = torch.randn(4, 3), torch.randn(4, 64)
    onnx = OnnxEngine(exported.onnx, cut.dense.inputs, list(cut.outputs), 1)([dense, pooled])[0]
    torch.testing.assert_close(
        onnx, TorchEngine(exported.program, cut.dense.inputs, list(cut.outputs))([dense, pooled])[0]
    )


def test_a_damaged_program_leaves_stdout_alone(
    small: tuple[nn.Module, Archive], capfd: pytest.CaptureFixture[str]
) -> None:
    """Commands write JSON there; onnxruntime's error is no UTF-8 here, on which its Python wrapper printed to stdout."""
    model = (small[1].root / "dense/model.onnx").read_bytes()
    damaged = model.replace(b"Relu", b"Re\xff\x80")
    assert damaged != model
    with pytest.raises(ArchiveError, match=r"\[D3\] model.onnx does not load"):
        OnnxEngine(damaged, ["dense", "pooled"], ["output"], 1)
    assert capfd.readouterr().out == ""


def test_running_products_run_on_onnx() -> None:
    class Products(Ranker):
        def forward(self, dense, kjt):  # type: ignore[no-untyped-def]
            whole = (dense > 0).cumprod(1).sum(1)
            return super().forward(dense, kjt) + dense.cumprod(-1)[:, 1] + whole

    model = Products()
    cut = cut_model(model, find_leaves(model), lambda body: None)
    assert cut is not None
    exported = export_part(cut.dense)
    assert exported.onnx is not None, exported.onnx_refused
    dense, pooled = torch.randn(7, 3), torch.randn(7, 64)
    with torch.no_grad():
        scores = model.top(torch.cat([model.bottom(dense).relu(), pooled], dim=1)).squeeze(1)
    expected = scores + dense.cumprod(1)[:, 1] + (dense > 0).cumprod(1).sum(1)
    names = cut.dense.inputs, list(cut.outputs)
    for engine in (OnnxEngine(exported.onnx, *names, 1), TorchEngine(exported.program, *names)):
        torch.testing.assert_close(engine([dense, pooled])[0], expected, atol=1e-5, rtol=1e-5)
