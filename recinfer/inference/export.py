"""Exports a checkpoint and a plan to an archive: quantizes tables into shards and exports the dense part.

The archive is built in a temporary folder, runs its own golden requests, is compared with the float model and opened by
the reader, and is then renamed to its target.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recinfer.archive.captured import collections_of
from recinfer.archive.check import ANSWERS, REQUESTS, Answer, Request, odd_rows, pack_answers, pack_requests
from recinfer.archive.leaves import find_leaves
from recinfer.archive.manifest import (
    CheckInfo,
    Manifest,
    MissingShards,
    QuantizationInfo,
)
from recinfer.archive.manifest_rules import check_before_writing
from recinfer.archive.positions import PATH as POSITIONS
from recinfer.archive.positions import pack_position_weights
from recinfer.archive.rank_files import rank_file, rects_by_rank
from recinfer.archive.reader import Archive, open_archive
from recinfer.archive.writer import ArchiveFolder, ShardWriter, archive_folder
from recinfer.capture import Captured, torch_defaults
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import Plan, TablePlan
from recinfer.distributed.planner.plan.plan import of_tables
from recinfer.errors import ArchiveError, ConfigError, InputError, MismatchError
from recinfer.inference.comparison import compare_export
from recinfer.inference.evaluation import EvalData, Evaluation, evaluate
from recinfer.inference.float_model import FloatModel, FloatRows, PositionWeights
from recinfer.inference.intake import FeatureIntake
from recinfer.inference.lookups import output_names
from recinfer.inference.predictor import Predictor
from recinfer.inference.prepare import (
    check_precisions,
    cut_and_export,
    first_manifest,
    make_requests,
    read_positions,
    table_keys,
    with_policies,
)
from recinfer.inference.progress import byte_bar, spinner
from recinfer.inference.quantize import one_thread_an_operator, quantize_tables
from recinfer.inference.recorded import RecordedReference
from recinfer.inference.report import ExportReport, make_report
from recinfer.vocabulary.written import Vocabularies, written_parts

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["export_archive"]


def export_archive(
    model: nn.Module | Captured,
    checkpoint: CheckpointReader,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    name: str,
    version: str,
    contract: FeatureContract | None = None,
    inputs: Sequence[Any] = (),
    user: Sequence[str] = (),
    missing: Mapping[str, str | int] | None = None,
    out_of_range: Mapping[str, str] | None = None,
    missing_shards: MissingShards = "reject",
    vocabularies: Vocabularies | None = None,
    max_chunk_bytes: int = 16 << 20,
    progress: bool = True,
    overwrite: bool = False,
    eval_data: EvalData | None = None,
    eval_output: str | None = None,
    max_auc_drop: float | None = None,
    reference: RecordedReference | None = None,
    on_report: Callable[[ExportReport], None] | None = None,
) -> Archive:
    """Quantize and shard ``model`` with the weights of ``checkpoint`` into an archive.

    Args:
        model: a model with its tables (and the rest, if wanted) on meta, which is not changed; or a captured program
            (:func:`recinfer.archive.captured.read_program`), which gets the checkpoint's weights.
        checkpoint: float weights under the model's keys.
        plan: covers exactly the model's tables; brings their precisions.
        out: the archive's folder, by custom ``*.rqa``.
        name, version: name and version that the model is served under.
        contract: the feature contract, by which raw rows become features.
        inputs: one or two example batches, see :func:`recinfer.capture.capture`; none: a made one, for a forward that takes
            one float matrix and passes its sparse inputs on.
        user: names of the user's inputs, as the signature names them: what depends on these alone runs once for a request
            that gives them as its context, not once per candidate.
        missing: feature -> what predict does without it: ``"reject"`` (the default of each), ``"empty"`` (no ids), or the id
            that every sample gets; ``"*"``: all features that are not named. It decides about features left out of a
            request; a raw row without a value follows the contract.
        out_of_range: feature -> what an id beyond its table does: ``"reject"`` (the default of each, or what the contract
            says), or ``"default_row"`` (it becomes the contract's default row, or 0); ``"*"``: all that are not named.
        missing_shards: ``"default_rows"``: rankers may answer while no host has some ranks, with zeros for their rows and a
            flag; ``"reject"``: they may not.
        vocabularies: feature -> what has the rows 0, 1 and so on of its table: strings, which requests may then hold in place of
            rows, or int64 ids, which they then hold; or (module path, table) -> its vocabulary. Those of managed collisions and of
            the contract need no entry. See :data:`recinfer.vocabulary.written.Vocabularies`.
        max_chunk_bytes: float bytes of a chunk of a table; a few chunks are in memory at a time.
        progress: show a bar on stderr.
        overwrite: replace an archive that is there.
        eval_data: held-out rows; float and quantized model are measured on them.
        eval_output: the output that holds the logits, where the model has several.
        max_auc_drop: refuse to write an archive that loses more than this of the AUC on ``eval_data``.
        reference: the user's recorded inputs and float outputs; refuse to write an archive of a model that gives others.
        on_report: given the error and bytes of each table, the evaluation and the comparison, before the archive gets its
            name.

    Returns:
        the archive, opened.

    Raises:
        ConfigError: plan, contract or model do not fit together, the dense part cannot be cut out, an output is NaN, or a
            policy is for no feature of the model or none that there is.
        CheckpointError: a key is missing or has another shape.
        InputError: weights that are not finite, with table and row; a vocabulary that breaks the rules of
            :class:`recinfer.vocabulary.table.TableVocabulary`; a string that occurs twice.
        ArchiveError: the target exists, or more than ``max_auc_drop`` would be lost; names the worst tables.
        MismatchError: the model does not give the outputs of ``reference``.
        UnavailableError: the disk is full.
    """
    if max_auc_drop is not None and (eval_data is None or not max_auc_drop >= 0):
        raise ConfigError(
            f"max_auc_drop: got {max_auc_drop}; expected a number of at least 0, and eval_data to measure on"
        )
    captured = model if isinstance(model, Captured) else None
    model = collections_of(model) if isinstance(model, Captured) else model
    leaves = find_leaves(model)
    plan.check_model(model)
    check_precisions(plan)
    checkpoint.align(model)
    keys = table_keys(leaves, checkpoint)
    with torch_defaults(), one_thread_an_operator(), archive_folder(Path(out), overwrite=overwrite) as folder:
        with spinner("exporting the dense part", progress):
            parts = cut_and_export(model, leaves, checkpoint, contract, inputs, user, captured)
        plan = plan if parts.cut is None else of_tables(plan, parts.cut.tables)
        manifest = first_manifest(name, version, plan, leaves, contract, parts, missing_shards)
        manifest = with_policies(manifest, missing, out_of_range)
        id_parts = written_parts(manifest, model, checkpoint, contract, vocabularies)
        manifest = manifest.with_parts(id_parts.entries)
        try:
            check_before_writing(manifest)
        except ArchiveError as error:  # a name too long, a contract with more ids than rows: the caller's to mend
            raise ConfigError(f"this model cannot be stored in an archive: {error}") from None
        _check_input_names(manifest)
        _check_output_names(manifest)
        requests = id_parts.requests(manifest, make_requests(leaves, parts.cut))
        for path, data in id_parts.files():
            folder.add(path, data)
        recorded = reference.batches(manifest) if reference else []
        wanted = [*requests, *(eval_data.requests if eval_data else ()), *(batch.request for batch in recorded)]
        ids = parts.ids_program(manifest)
        given = wanted if ids is None else [ids.looked_up(request) for request in wanted]
        steps = FeatureIntake(manifest).at(Archive(folder.root, manifest, plan, ()), ()).steps
        rows = FloatRows(manifest, [steps.looked_up(request) for request in given])
        stats = _write_shards(folder, plan, keys, checkpoint, rows, max_chunk_bytes, progress)
        folder.add("plan.json", plan.to_json().encode())
        for path, data in parts.files().items():
            folder.add(path, data)
        if positions := read_positions(leaves, parts.cut, checkpoint):
            folder.add(POSITIONS, pack_position_weights(positions))
        folder.add(REQUESTS, pack_requests(requests))
        tables = tuple(replace(t, quantization=stats[t.module, t.name]) for t in manifest.tables)
        manifest = replace(manifest, tables=tables, files=tuple(folder.files))
        program = None if parts.cut is None else parts.cut.dense.module
        manifest, floats = _answer(folder, manifest, plan, requests, rows, positions, program)
        found = None if eval_data is None else _evaluate(floats, eval_data, eval_output, max_auc_drop)
        compared = compare_export(floats, reference, recorded) if reference else None
        if on_report is not None:
            sizes = {k: checkpoint.dtype(key).itemsize for k, key in keys.items()}
            on_report(make_report(manifest, sizes, found, compared))
        if compared is not None and not compared.ok:
            raise MismatchError(f"{compared.message()}. No archive was written", compared)
        if max_auc_drop is not None and found is not None:
            _refuse_drop(found, max_auc_drop)
        folder.write_manifest(manifest.to_json())
        written = Predictor(open_archive(folder.root))
        written.check_request(0)
        written.check_user()
    return open_archive(out)


def _check_input_names(manifest: Manifest) -> None:
    """Raises ConfigError if an input has the name under which requests and files hold a part of another input."""
    features = {feature.name for feature in manifest.features} - manifest.computed_features
    names = [*sorted(features), *(info.name for info in manifest.named_inputs)]
    for name in names:
        stem, _, part = name.rpartition(".")
        if part in ("values", "lengths", "weights") and stem in names:
            raise ConfigError(
                f"{'feature' if name in features else 'input'} {name!r} has the name that requests give the {part} of "
                f"{stem!r}; rename one of them"
            )


def _check_output_names(manifest: Manifest) -> None:
    """Raises ConfigError if two outputs of a lookup have one name, of which a lookup would return the last alone."""
    count = Counter(name for names in output_names(manifest).values() for name in names)
    name, number = count.most_common(1)[0]
    if number > 1:
        raise ConfigError(
            f"feature {name!r} has the name of another output of lookups: a feature of several modules has the outputs "
            f"FEATURE@MODULE; rename {name!r}"
        )


def _write_shards(
    folder: ArchiveFolder,
    plan: Plan,
    keys: Mapping[tuple[str, str], str],
    checkpoint: CheckpointReader,
    rows: FloatRows,
    max_chunk_bytes: int,
    progress: bool,
) -> dict[tuple[str, str], QuantizationInfo]:
    tables = [(table, keys[table.module, table.table]) for table in plan.tables]
    total = sum(4 * table.num_embeddings * table.embedding_dim for table in plan.tables)

    def collect(table: TablePlan, first_row: int, chunk: Tensor) -> None:
        rows.collect(table.module, table.table, first_row, chunk)

    with ShardWriter(folder, plan) as writer, byte_bar("quantizing tables", total, progress) as advance:
        return quantize_tables(tables, checkpoint, writer.write_rows, collect, advance, max_chunk_bytes)


def _answer(
    folder: ArchiveFolder,
    manifest: Manifest,
    plan: Plan,
    requests: list[Request],
    rows: FloatRows,
    position_weights: PositionWeights,
    program: nn.Module | None,
) -> tuple[Manifest, FloatModel]:
    """Answer the golden requests, compare with the float model, store the answers: the final manifest, both models."""
    rank_files = tuple(rank_file(rects, rank, plan.hash) for rank, rects in enumerate(rects_by_rank(plan)))
    predictor = Predictor(Archive(folder.root, manifest, plan, rank_files))
    answers = [_replayed(predictor, index, request) for index, request in enumerate(requests)]
    _refuse_odd_outputs(manifest, answers, program)
    model = FloatModel(predictor, rows, position_weights)
    errors = model.largest_errors(requests, answers)
    folder.add(ANSWERS, pack_answers(answers))
    files = tuple(sorted(folder.files, key=lambda file: file.path))
    manifest = replace(
        manifest,
        check=CheckInfo(len(requests), *errors),
        files=files,
        bytes_total=sum(file.bytes for file in files),
    )
    return manifest, model


def _replayed(predictor: Predictor, index: int, request: Request) -> Answer:
    try:
        return predictor.replay(request)
    except ConfigError as error:
        raise ConfigError(f"golden request {index}, which export made of random inputs, fails: {error}") from error


def _refuse_odd_outputs(manifest: Manifest, answers: Sequence[Answer], program: nn.Module | None) -> None:
    """Raise ConfigError for outputs that are not finite, because no server could be compared with them."""
    if manifest.dense is None or program is None:
        return
    for index, answer in enumerate(answers):
        for output, values in zip(manifest.dense.outputs, answer.outputs):
            odd = odd_rows(values)
            if not odd:
                continue
            tensors = [*program.named_parameters(), *program.named_buffers()]
            broken = [n.removeprefix("model.") for n, t in tensors if not bool(torch.isfinite(t).all())]
            cause = (
                f"{', '.join(broken[:5])} in the checkpoint hold NaN or infinity: training diverged, or the "
                f"checkpoint is damaged"
                if broken
                else (
                    "the weights are finite, so forward computes it from the golden request's inputs (random ids, bags "
                    "of 0 to 3 where the example batch has empty bags; dense values of the example batch, or normal without one): "
                    "find the logarithm, root, division or overflow in forward and clamp its input (mask an output with a finite "
                    "number, not with infinity); an output of integers "
                    "beyond 16,777,216, as of raw ids, is NaN, since outputs are float32: return positions"
                )
            )
            raise ConfigError(f"the model's output {output.name!r} is {odd} of golden request {index}; {cause}")


def _evaluate(model: FloatModel, data: EvalData, output: str | None, max_auc_drop: float | None) -> Evaluation:
    """Evaluate both models on the held-out rows, and table by table if the AUC drop is too large."""
    found = evaluate(model, data, output=output)
    if max_auc_drop is None:
        return found
    if math.isnan(found.auc_drop):
        raise InputError("max_auc_drop: the held-out rows have only one class, so the AUC is undefined; give more rows")
    if found.auc_drop <= max_auc_drop:
        return found
    return evaluate(model, data, output=output, blame=True)


def _refuse_drop(found: Evaluation, max_auc_drop: float) -> None:
    if found.auc_drop <= max_auc_drop:
        return
    worst = ", ".join(f"{drop.table} ({drop.auc_drop:+.5f})" for drop in found.worst[:5])
    raise ArchiveError(
        f"quantization lowers the AUC by {found.auc_drop:.5f} ({found.float_model.auc:.5f} to "
        f"{found.quantized_model.auc:.5f} on "
        f"{found.rows} rows), more than {max_auc_drop:g}; no archive was written. AUC drop per table quantized "
        f"alone: {worst}; give the worst a wider precision"
    )
