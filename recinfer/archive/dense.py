"""Exports the dense part to torch and ONNX, compares the two, and opens a stored one as an engine."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_unflatten

from recinfer import env
from recinfer.archive.manifest import MAX_ONNX_ERROR, DenseInfo, IdsInfo, OnnxInfo, ProgramInfo
from recinfer.archive.onnx_export import OPSET, to_onnx
from recinfer.archive.onnx_rewrites import compute_in_float32, gather_rows
from recinfer.archive.program import check_program, load_program, program_bytes
from recinfer.archive.reader import Archive
from recinfer.archive.subgraph import Program, exported
from recinfer.capture import brief
from recinfer.errors import ArchiveError, ConfigError, UnavailableError

__all__ = [
    "NEEDS_IDS",
    "DenseEngine",
    "ExportedDense",
    "OnnxEngine",
    "Part",
    "TorchEngine",
    "export_part",
    "open_dense",
    "open_program",
]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TRIAL_BATCHES = (1, 3, 64)

NEEDS_IDS = (
    ". A request may have no ids at all, and forward has to answer it: to_padded_dense(N) gives N places, "
    "to_padded_dense() none"
)
"""Advice, for messages, on a dense part that fails when unpooled features have no ids."""


@dataclass(frozen=True)
class Part:
    """A part of a traced forward to export.

    Attributes:
        title: the part's name, for messages.
        program: the part.
        example: makes inputs of a batch size from a seed.
        without_ids: makes inputs of a request without ids.
    """

    title: str
    program: Program
    example: Callable[[int, int], list[Tensor]]
    without_ids: Callable[[], list[Tensor]]

    @property
    def module(self) -> nn.Module:
        """``forward(*tensors) -> dict[str, Tensor]``."""
        return self.program.module

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, in order."""
        return [about.name for about in self.program.inputs]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs, in order."""
        return list(self.program.outputs)


@dataclass(frozen=True)
class ExportedDense:
    """The dense part as torch and ONNX programs; ``onnx`` and ``onnx_info`` are None for the reason ``onnx_refused``."""

    program: bytes
    onnx: bytes | None
    onnx_info: OnnxInfo | None
    onnx_refused: str | None


class DenseEngine(Protocol):
    """Runs the dense program: tensors in the manifest's input order to outputs in its order. Safe from any thread."""

    name: str

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def arrays(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]: ...


def export_part(part: Part) -> ExportedDense:
    """Export a part to torch and ONNX and compare the two on random inputs.

    Raises:
        ConfigError: it cannot be stored, or what it gives cannot run without ids.
    """
    try:
        with _quiet(), torch.no_grad():
            program = exported(part.program)
            data = program_bytes(program)
            onnx, refused = _to_onnx(program, part)
    except ArchiveError as error:
        raise ConfigError(f"{part.title} uses operations that an archive may not contain: {error}") from error
    except Exception as error:
        raise ConfigError(f"torch cannot store {part.title}: {type(error).__name__}: {brief(error)}") from error
    if onnx is None:
        return ExportedDense(data, None, None, _printable(refused))
    names = part.inputs, part.outputs
    try:
        error_found = _compare(OnnxEngine(onnx, *names, 1), TorchEngine(data, *names), part)
    except (ArchiveError, UnavailableError) as error:
        return ExportedDense(data, None, None, _printable(f"onnxruntime cannot run it: {error}"))
    if not error_found <= MAX_ONNX_ERROR:
        return ExportedDense(
            data, None, None, f"its outputs differ from torch by {error_found:.2g}, over {MAX_ONNX_ERROR}"
        )
    return ExportedDense(data, onnx, OnnxInfo(OPSET, error_found), None)


def _to_onnx(program: ExportedProgram, part: Part) -> tuple[bytes | None, str | None]:
    """The ONNX bytes, or the reason why the export failed; the program cannot be used afterwards."""
    try:
        model = to_onnx(program, part.inputs, part.outputs)
        gather_rows(model)
        compute_in_float32(model)
        return model.SerializeToString(), None
    except ImportError as error:
        return None, f"the ONNX exporter is not installed: {error}"
    except Exception as error:  # for any exporter error, the torch program is used
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the outer exceptions only describe how to report a bug
        return None, f"the ONNX export failed: {type(error).__name__}: {error}"


def _printable(reason: str | None) -> str:
    """``text`` as one line of printable characters, short enough for a manifest."""
    text = " ".join(_COLOUR.sub("", str(reason)).split())
    return "".join(c if c.isprintable() else "?" for c in text)[:250]


def _compare(onnx: DenseEngine, torch_engine: DenseEngine, part: Part) -> float:
    """The largest difference on random inputs, relative to outputs that are larger than 1.

    Raises:
        ConfigError: the torch program fails on inputs that a request may have.
        ArchiveError: onnxruntime fails, or gives other shapes.
    """
    worst = 0.0
    examples = [part.example(batch, 100 + batch) for batch in _TRIAL_BATCHES]
    for tensors in (*examples, part.without_ids()):
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in zip(part.inputs, tensors))
        try:
            expected = torch_engine(tensors)
        except Exception as error:
            todo = "" if all(len(tensor) for tensor in tensors) else NEEDS_IDS
            if "is invalid for input of size" in str(error):
                todo = "; a view of several values as one row takes their number as a number of forward, not one of a tensor"
            raise ConfigError(f"{part.title} cannot run on {sizes}: {_raised(error)}{todo}") from error
        try:
            found = onnx(tensors)
        except Exception as error:  # onnxruntime's exception types are not public
            raise ArchiveError(f"{_raised(error)}, for {sizes}") from error
        for a, b in zip(found, expected, strict=True):
            if a.shape != b.shape:
                raise ArchiveError(f"an output has shape {tuple(a.shape)}, torch gives {tuple(b.shape)}")
            finite = torch.isfinite(b)  # a logarithm of random inputs may be NaN, in both
            if not torch.equal(finite, torch.isfinite(a)):
                return math.inf
            a, b = a[finite].double(), b[finite].double()  # a mask between two programs is a bool
            if b.numel():
                worst = max(worst, float((a - b).abs().max()) / max(1.0, float(b.abs().max())))
    return worst


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides log lines and warnings of the exporters about their own internals (a missing torchvision, deprecations)."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


class OnnxEngine:
    """Runs the ONNX program with onnxruntime on the CPU. Input and output tensors are passed without a copy, except inputs in
    bfloat16, which the program takes in float32.
    """

    name = "onnx"

    def __init__(self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], num_threads: int) -> None:
        env.keep_onnxruntime_quiet()
        try:
            import onnxruntime
        except ImportError:
            raise UnavailableError(
                "onnxruntime is not installed; pip install onnxruntime, or load with dense_engine='torch'"
            ) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # A serving thread that waits must not burn the core that another one needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exception types are not public
            raise ArchiveError(f"model.onnx does not load: {str(error)[:300]}", rule="D3") from None
        have = [i.name for i in self._session.get_inputs()], [o.name for o in self._session.get_outputs()]
        # The exporter drops inputs that the program does not read.
        if not set(have[0]) <= set(inputs) or have[1] != list(outputs):
            raise ArchiveError(
                f"model.onnx takes {have[0]} and gives {have[1]}; the manifest has {list(inputs)} and {list(outputs)}",
                rule="D3",
            )
        self._feeds = [(name, inputs.index(name)) for name in have[0]]
        self._outputs = list(outputs)
        # onnxruntime's Python wrapper repeats the checks of this class before each call: some 10 us when its code is
        # not cached.
        self._run = getattr(getattr(self._session, "_sess", None), "run", self._session.run)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        feeds = {
            name: (tensor.float() if (tensor := tensors[index]).dtype is torch.bfloat16 else tensor).numpy()
            for name, index in self._feeds
        }
        return [torch.from_numpy(output) for output in self._run(self._outputs, feeds, None)]

    def arrays(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the program on numpy arrays; for one sample this saves a tenth of the time of a call with tensors."""
        return self._run(self._outputs, {name: arrays[index] for name, index in self._feeds}, None)  # type: ignore[no-any-return]


class TorchEngine:
    """Runs the torch.export program, on any device."""

    name = "torch"

    def __init__(
        self, program: bytes, inputs: Sequence[str], outputs: Sequence[str], device: torch.device | str = "cpu"
    ) -> None:
        with _quiet():
            loaded = load_program(program)
            taken, given = len(loaded.graph_signature.user_inputs), _output_names(loaded)
            if taken != len(inputs) or given != list(outputs):
                raise ArchiveError(
                    f"model.pt2 takes {taken} tensors and gives {given}; the manifest has {list(inputs)} and {list(outputs)}",
                    rule="D2",
                )
            if torch.device(device).type != "cpu":
                from torch.export.passes import move_to_device_pass

                loaded = move_to_device_pass(loaded, str(device))
            self._module = loaded.module()

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(self._module(*tensors).values())

    def arrays(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the program on numpy arrays."""
        return [output.cpu().numpy() for output in self([torch.from_numpy(array) for array in arrays])]


def _output_names(program: ExportedProgram) -> list[str]:
    """Keys of the dict that the program returns; empty if the program returns another type."""
    spec = program.call_spec.out_spec
    returned = None if spec is None else tree_unflatten([None] * spec.num_leaves, spec)
    return list(returned) if isinstance(returned, dict) else []


def open_dense(
    archive: Archive,
    info: DenseInfo,
    *,
    device: str = "cpu",
    num_threads: int = 1,
    engine: Literal["onnx", "torch"] | None = None,
) -> DenseEngine:
    """The requested engine of the dense program, or the default one: the manifest's on the CPU, torch on other devices.

    Raises:
        ArchiveError: rules F4, F5, D1 to D3.
        ConfigError: the requested engine is not in the archive.
        UnavailableError: onnxruntime is needed and not installed.
    """
    chosen = engine or (info.engine if torch.device(device).type == "cpu" else "torch")
    if chosen == "onnx":
        if info.onnx is None:
            raise ConfigError(f"this archive has no ONNX program: {info.onnx_refused}; use dense_engine='torch'")
        if torch.device(device).type != "cpu":
            raise ConfigError(f"the ONNX engine runs on the CPU; got device {device!r}; use dense_engine='torch'")
    outputs = [output.name for output in info.outputs]
    return open_program(archive, "dense/model", info, outputs, device=device, num_threads=num_threads, engine=chosen)


def open_program(
    archive: Archive,
    path: str,
    info: DenseInfo | IdsInfo | ProgramInfo,
    outputs: Sequence[str],
    *,
    device: str = "cpu",
    num_threads: int = 1,
    engine: Literal["onnx", "torch"] | None = None,
) -> DenseEngine:
    """Open the program that ``info`` describes, as :func:`open_dense` does; without an ONNX form it runs on torch.

    Where ONNX runs, the torch program is checked and not loaded: loading takes a second and 60 MiB of each process.
    """
    program = archive.read(f"{path}.pt2")
    inputs = [i.name for i in info.inputs]
    if info.onnx is not None and torch.device(device).type == "cpu" and (engine or info.engine) == "onnx":
        check_program(program)
        return OnnxEngine(archive.read(f"{path}.onnx"), inputs, outputs, num_threads)
    return TorchEngine(program, inputs, outputs, device)
