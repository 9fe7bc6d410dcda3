"""``recinfer reshard``: writes an archive with different shards from an archive, without the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.archives import ArchiveArgument, local_archive
from recinfer.cli.console import JsonOption, Output, styled
from recinfer.cli.options import Device, MissingShards
from recinfer.errors import ConfigError
from recinfer.sizes import size_text

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "reshard"
EXAMPLE = "Example: recinfer reshard movielens.rqa --world-size 4 --out movielens-4.rqa"


def run(
    archive: ArchiveArgument,
    out: Annotated[Path, typer.Option("--out", help="Archive folder to write.")],
    world_size: Annotated[
        int | None,
        typer.Option(min=1, max=65536, help="Make a plan for this many ranks.", show_default="the plan's"),
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Shard by this plan instead.", show_default=False)] = None,
    device: Annotated[
        Device | None, typer.Option(help="Device that the ranks compute on.", show_default="as in the archive's plan")
    ] = None,
    missing_shards: Annotated[
        MissingShards | None,
        typer.Option(
            help="What a ranker may do when a rank is unavailable: error, or default-rows (flagged in the response).",
            show_default="as in the archive",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing archive.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Shard an archive again for another number of ranks or another plan, with bit-identical rows.

    The command checks the old archive's hashes and that the new archive gives the same golden outputs.
    """
    from recinfer.archive.reader import open_archive
    from recinfer.distributed.planner.plan import Plan
    from recinfer.inference.reshard import plan_archive, reshard_archive

    output = Output(as_json)
    started = time.perf_counter()
    if plan is not None:
        chosen = Plan.load(plan)
        if world_size not in (None, chosen.world_size):
            raise ConfigError(
                f"--world-size {world_size}, but {plan} is a plan for {chosen.world_size} ranks; give only one of "
                f"the two"
            )
        if device is not None and device.value != chosen.compute_device:
            raise ConfigError(
                f"--device {device.value}, but {plan} is a plan for {chosen.compute_device}; give only one of the two"
            )
    elif world_size is None and device is None and missing_shards is None:
        raise ConfigError("nothing to change: give --world-size N, --plan FILE, --device or --missing-shards")
    folder = local_archive(archive, output)
    if plan is None:
        opened = open_archive(folder)
        chosen = opened.plan
        if world_size is not None or device is not None:
            world_size = world_size or opened.manifest.world_size
            where = device.value if device else opened.plan.compute_device
            chosen = plan_archive(opened.manifest, world_size=world_size, compute_device=where)
    manifest = reshard_archive(
        folder,
        chosen,
        out,
        missing_shards=None if missing_shards is None else missing_shards.in_manifest,
        overwrite=overwrite,
    ).manifest
    seconds = time.perf_counter() - started
    size = f"{manifest.world_size} ranks, {size_text(manifest.bytes_total)}"
    checked = f"{manifest.check.num_requests} golden requests replayed"
    output.show(styled("green", "wrote", f" {out}  {size}, {checked}  {seconds:.1f} s"))
    output.finish(
        {
            "archive": str(out),
            "world_size": manifest.world_size,
            "plan_hash": manifest.plan_hash,
            "bytes_total": manifest.bytes_total,
            "num_requests": manifest.check.num_requests,
            "seconds": seconds,
        }
    )
