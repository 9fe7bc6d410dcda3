"""The functions of ``import recinfer``: from a trained module in memory to a served archive."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recinfer.inference.archived import ArchivedModel, load

if TYPE_CHECKING:
    from torch import nn

    from recinfer.distributed.planner.plan import Plan
    from recinfer.inference.verify import VerifyReport

__all__ = ["export", "load", "plan", "verify"]


def plan(
    model: nn.Module,
    *,
    world_size: int = 1,
    precision: str = "int8",
    per_table_precision: Mapping[str, str] | None = None,
    compute_device: str = "cpu",
    **options: Any,
) -> Plan:
    """Plan a model for quantized inference.

    Args:
        model: its tables may be on meta.
        world_size: number of ranks.
        precision, per_table_precision: element type of the stored rows, of all tables and by table name.
        compute_device: ``"cpu"`` or ``"cuda"``.
        options: further arguments of :func:`recinfer.distributed.planner.plan_inference`.

    Raises:
        ConfigError: arguments that contradict each other.
        PlannerError: no plan fits; the message names the limiting memory.

    Example::

        plan = recinfer.plan(model, world_size=2, precision="int4")
        print(plan)
    """
    from recinfer.distributed.planner import plan_inference
    from recinfer.modules.embedding_configs import DataType

    return plan_inference(
        _bare(model),
        world_size=world_size,
        compute_device=compute_device,
        precision=DataType.parse(precision),
        per_table_precision={name: DataType.parse(p) for name, p in (per_table_precision or {}).items()},
        **options,
    )


def export(
    model: nn.Module,
    inputs: Any,
    out: str | os.PathLike[str],
    *,
    plan: Plan | None = None,
    precision: str = "int8",
    world_size: int = 1,
    user: Sequence[str] = (),
    name: str | None = None,
    version: str = "1",
    **options: Any,
) -> ArchivedModel:
    """Export a trained module in memory to an archive, as ``model.eval()`` would run it. The module is left as it is.

    Args:
        model: with its weights; may be wrapped by torch.compile, or by DistributedModelParallel on one rank.
        inputs: an example batch: a tuple of forward's arguments, ``(args, kwargs)``, or the only argument; a list of two
            batches of different sizes tells which axes are free. None: a made batch, for a forward that takes one float
            matrix and passes its sparse inputs on.
        out: the archive's folder, by custom ``*.rqa``.
        plan: default: :func:`plan` of ``precision`` and ``world_size``.
        user: names of the user's inputs, which requests may give once for many candidates.
        name: name that the model is served under; default the folder's name.
        version: version that the model is served under.
        options: further arguments of :func:`recinfer.inference.export.export_archive`.

    Returns:
        the archive, loaded, with the export's report: size and error of each table.

    Raises:
        ConfigError: forward cannot be traced, or model, inputs and plan do not fit together.
        ArchiveError: the target exists (``overwrite=True`` replaces it).

    Example::

        served = recinfer.export(model, (batch,), "ranker.rqa")
        print(served, served.report)
        scores = served(batch)
    """
    from recinfer.checkpoint.live import LiveWeights
    from recinfer.inference.export import export_archive
    from recinfer.inference.report import ExportReport

    reports: list[ExportReport] = []
    on_report = options.pop("on_report", None)

    def keep(report: ExportReport) -> None:
        reports.append(report)
        if on_report is not None:
            on_report(report)

    bare = _bare(model)
    batches: Sequence[Any] = () if inputs is None else list(inputs) if isinstance(inputs, list) else [inputs]
    chosen = plan if plan is not None else _plan(bare, world_size=world_size, precision=precision)
    export_archive(
        bare,
        LiveWeights(model),
        chosen,
        out,
        name=name or Path(out).stem,
        version=version,
        inputs=batches,
        user=user,
        on_report=keep,
        **options,
    )
    served = load(out)
    served.report = reports[0]
    return served


_plan = plan  # ``export`` has an argument of this name


def _bare(model: nn.Module) -> nn.Module:
    from torch import nn

    from recinfer.capture import unwrapped
    from recinfer.distributed.model_parallel import get_unwrapped_module
    from recinfer.errors import ConfigError

    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: got a {type(model).__name__}, expected the nn.Module with its weights; for a state dict, build the module "
            "and call load_state_dict first"
        )
    while (inner := get_unwrapped_module(unwrapped(model))) is not model:
        model = inner
    return model


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Check an archive, at a folder or a URL, completely: every rule of its format, all hashes, and all golden requests.

    Raises:
        ArchiveError: the archive is damaged or answers wrongly; the message names the rules.
    """
    from recinfer.errors import ArchiveError
    from recinfer.inference.verify import verify as check
    from recinfer.remote.cache import in_cache

    with in_cache(path) as (folder, release):
        report = check(folder)
    release()
    if not report.ok:
        raise ArchiveError("; ".join(report.problems))
    return report
