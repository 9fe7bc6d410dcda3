"""Training pipelines: while one batch trains, the ids of the next are exchanged and the one after is copied to the
device.

Names and arguments are TorchRec's (``torchrec.distributed.train_pipeline``). The stages of a batch are: copy to the
device; exchange of ids among ranks (``ShardedModule.input_dist``: sizes first, then ids); rows into the caches
(prefetch pipeline only); forward, backward, optimizer. On CUDA each stage has a stream; on CPU the same schedule runs
without streams, and gloo's threads send the ids while the main thread computes.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from recinfer.distributed.exchange.kjt import KJTAllToAll, KJTSplitsAllToAllMeta
from recinfer.distributed.exchange.kjt_lists import FusedKJTListSplitsAwaitable
from recinfer.distributed.sharded.model_parallel import get_module
from recinfer.distributed.train_pipeline.contexts import TrainPipelineContext, on_stream
from recinfer.distributed.train_pipeline.forwards import BaseForward, KJTAllToAllForward, PipelinedForward
from recinfer.distributed.train_pipeline.tracing import build_args, find_sharded_calls
from recinfer.distributed.types import ShardedModule
from recinfer.errors import ConfigError
from recinfer.module_tree import named_children
from recinfer.streamable import move_to

__all__ = ["TrainPipeline", "TrainPipelineBase", "TrainPipelineSparseDist"]

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipeline(abc.ABC, Generic[In, Out]):
    """Interface of pipelines that train a model on the batches of an iterator, one per call."""

    @abc.abstractmethod
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one batch and return the model's output.

        Raises:
            StopIteration: the iterator and the pipeline are empty.
        """


class _Steps(TrainPipeline[In, Out]):
    """Base of all pipelines: streams, copies of batches to the device, backward and optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._memcpy_stream = self._stream()
        self._taken_to_train = False  # the batches that are in the pipeline

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(device=self._device, priority=-1) if self._on_gpu else None

    def _take(self, dataloader_iter: Iterator[In]) -> In | None:
        """Start copying the next batch to the device; returns None after the last batch."""
        batch = next(dataloader_iter, None)
        with on_stream(self._memcpy_stream):
            return move_to(batch, self._device)

    def _wait_for_copy(self, batch: In, stream: torch.cuda.Stream | None) -> None:
        """Let the current stream wait for the copy of ``batch``."""
        if stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(stream)
        record = getattr(batch, "record_stream", None)
        if record is not None:
            record(current)

    def _forward(self, batch: In) -> tuple[torch.Tensor, Any]:
        result = self._model(batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(
                "a training pipeline needs a model that returns (loss, output); "
                f"{type(get_module(self._model)).__name__} returned a {type(result).__name__}. Wrap it, as "
                "models.dlrm.DLRMTrain does"
            )
        return result

    def _trains(self) -> bool:
        return self._model.training

    def _checked_mode(self, num_held: int) -> bool:
        """Whether to train; raises ConfigError if the pipeline holds ``num_held`` batches of the other mode."""
        training = self._trains()
        if num_held and training is not self._taken_to_train:
            was, now = ("train", "eval") if self._taken_to_train else ("eval", "train")
            raise ConfigError(
                f"the model went from {was} to {now} mode with {num_held} batches in the pipeline, which were taken in "
                f"{was} mode and would now be run in {now} mode. Call progress() until StopIteration before the switch "
                "(itertools.islice ends a loader early), or drop them: detach(), or a new pipeline"
            )
        self._taken_to_train = training
        return training

    def _update(self, losses: torch.Tensor) -> None:
        torch.sum(losses, dim=0).backward()
        self._optimizer.step()


class TrainPipelineBase(_Steps[In, Out]):
    """Two stages: the next batch is copied to the device while this one trains.

    Args:
        model: takes a batch and returns (loss, output).
        optimizer: for parameters without a fused optimizer.
        device: device of the model.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        super().__init__(model, optimizer, device)
        self._next: In | None = None
        self._started = False

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train (or, in eval mode, run) one batch; see :class:`TrainPipelineSparseDist` for a switch of the mode."""
        training = self._checked_mode(int(self._next is not None))
        if not self._started or self._next is None:  # a new iterator may follow the end of an iterator
            self._next, self._started = self._take(dataloader_iter), True
        batch = self._next
        if batch is None:
            raise StopIteration
        if training:
            self._optimizer.zero_grad()
        self._wait_for_copy(batch, self._memcpy_stream)
        losses, output = self._forward(batch)
        self._next = self._take(dataloader_iter)
        if training:
            self._update(losses)
        return output


class TrainPipelineSparseDist(_Steps[In, Out]):
    """Three stages: copy to the device, exchange of ids, and forward with backward.

    Ids are exchanged ahead for sharded modules whose input is an attribute or item of the batch; a module whose input
    is computed in the model exchanges them in its forward. The model must be symbolically traceable by torch.fx, with
    the exception of sharded modules and DistributedDataParallel.

    Args:
        model: takes a batch and returns (loss, output); a DistributedModelParallel.
        optimizer: for parameters without a fused optimizer.
        device: device of the model.
        execute_all_batches: train the batches that are still in the pipeline after the iterator's end.
        apply_jit: compile the modules that are not sharded with torch.jit.script.

    Raises:
        ConfigError: at the first batch, for a model that cannot be traced.
    """

    _forward_type: type[BaseForward] = PipelinedForward
    _depth = 3  # batches in the pipeline: training, exchanging ids, copied

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._execute_all_batches = execute_all_batches
        self._apply_jit = apply_jit
        self._data_dist_stream = self._stream()
        self._context = self._new_context()
        self._batches: deque[In] = deque()
        self._exhausted = False
        self._pipelined: list[ShardedModule] = []
        self._originals: list[tuple[nn.Module, Any]] = []
        self._attached = False

    def _new_context(self) -> TrainPipelineContext:
        return TrainPipelineContext()

    # ------------------------------------------------------------------------------------------------- the model

    def attach(self) -> None:
        """Replace the forwards in the model by pipelined forwards; the first batch does so automatically."""
        if self._attached:
            return
        core = get_module(self._model)
        modules = dict(core.named_modules())
        for name, args in find_sharded_calls(core).items():
            module = modules[name]
            assert isinstance(module, ShardedModule)
            stand_in = self._forward_type(name, args, module, self._context, self._stage_stream())  # type: ignore[call-arg]
            self._originals.append((module, None))
            module.forward = stand_in  # type: ignore[method-assign,assignment]
            self._pipelined.append(module)
            for part in _input_exchanges(module):
                part.forward = KJTAllToAllForward(part._pg, part._splits, part._stagger)  # type: ignore[method-assign,assignment]
                self._originals.append((part, None))
        if self._apply_jit:
            _script(core)
        self._attached = True

    def detach(self) -> nn.Module:
        """Restore the model's own forwards and return the model; batches in the pipeline are dropped."""
        for module, _ in self._originals:
            module.__dict__.pop("forward", None)
        self._originals.clear()
        self._pipelined.clear()
        self._batches.clear()
        self._context = self._new_context()
        self._attached = False
        return self._model

    def _stage_stream(self) -> torch.cuda.Stream | None:
        return self._data_dist_stream

    # ------------------------------------------------------------------------------------------------- the stages

    def _start_sparse_data_dist(self, batch: In) -> None:
        """Start the exchange of sizes for ``batch``."""
        context = self._context
        context.input_dist_splits_requests.clear()
        context.module_contexts_next_batch.clear()
        context.fused_splits_awaitables.clear()
        with on_stream(self._data_dist_stream):
            self._wait_for_copy(batch, self._memcpy_stream)
            for module in self._pipelined:
                forward: Any = module.forward
                args, kwargs = build_args(forward.args, batch)
                module_context = module.create_context()
                context.module_contexts_next_batch[forward.name] = module_context
                context.input_dist_splits_requests[forward.name] = module.input_dist(module_context, *args, **kwargs)
            _fuse_splits(context)

    def _wait_sparse_data_dist(self) -> None:
        """Wait for the sizes and start the exchange of ids."""
        context = self._context
        with on_stream(self._data_dist_stream):
            for names, fused in context.fused_splits_awaitables:
                for name, request in zip(names, fused.wait()):
                    context.input_dist_tensors_requests[name] = request
            for name, splits in context.input_dist_splits_requests.items():
                context.input_dist_tensors_requests[name] = splits.wait()
        context.input_dist_splits_requests.clear()
        context.fused_splits_awaitables.clear()
        context.module_contexts.update(context.module_contexts_next_batch)
        context.module_contexts_next_batch.clear()

    def _enqueue(self, dataloader_iter: Iterator[In]) -> None:
        batch = self._take(dataloader_iter)
        if batch is None:
            self._exhausted = True
        else:
            self._exhausted = False
            self._batches.append(batch)

    def _fill(self, dataloader_iter: Iterator[In]) -> None:
        """Fill the pipeline to its state after a call of :meth:`progress`."""
        if not self._batches:
            self._enqueue(dataloader_iter)
            if not self._batches:
                return
            self.attach()
            self._start_sparse_data_dist(self._batches[0])
            self._wait_sparse_data_dist()
        while len(self._batches) < self._depth - 1 and not self._exhausted:
            self._enqueue(dataloader_iter)

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train (or, in eval mode, run) one batch.

        Raises:
            StopIteration: the iterator and the pipeline are empty.
            ConfigError: the model changed to eval mode, or back, while the pipeline holds batches; the change can be
                undone.
        """
        training = self._checked_mode(len(self._batches))
        self._fill(dataloader_iter)
        if not self._batches or (self._exhausted and not self._execute_all_batches):
            self._forget()
            raise StopIteration
        if training:
            self._optimizer.zero_grad()
        self._wait_for_copy(self._batches[0], self._memcpy_stream)
        self._before_forward()
        if not self._exhausted:
            self._enqueue(dataloader_iter)
        losses, output = self._forward(self._batches[0])
        self._before_update()
        if training:
            self._update(losses)
        self._batches.popleft()
        return output

    def _before_forward(self) -> None:
        """Hook: start stages of coming batches before this one's forward."""
        if len(self._batches) > 1:
            self._start_sparse_data_dist(self._batches[1])

    def _before_update(self) -> None:
        """Hook: start stages of coming batches before this one's backward."""
        self._wait_sparse_data_dist()

    def _forget(self) -> None:
        """Reset after the end of an iterator; pending exchanges are awaited, since other ranks sent data."""
        for request in self._context.input_dist_tensors_requests.values():
            request.wait()
        self._batches.clear()
        self._context.input_dist_tensors_requests.clear()
        self._context.module_contexts.clear()
        self._exhausted = False


def _input_exchanges(module: ShardedModule) -> list[KJTAllToAll]:
    """The input exchanges of a sharded module, which are not in its module tree."""
    found: list[KJTAllToAll] = []
    for part in getattr(module, "_input_dists", []):
        found += [m for m in part.modules() if isinstance(m, KJTAllToAll)]
    return found


def _fuse_splits(context: TrainPipelineContext) -> None:
    """Combine the unstarted requests into one exchange of sizes for each process group."""
    groups: dict[Any, list[str]] = {}
    for name, request in context.input_dist_splits_requests.items():
        waiting = getattr(request, "awaitables", ())
        group = next((member.pg for member in waiting if isinstance(member, KJTSplitsAllToAllMeta)), None)
        if group is not None:
            groups.setdefault(group, []).append(name)
    for group, names in groups.items():
        requests: list[Any] = [context.input_dist_splits_requests.pop(name) for name in names]
        contexts: list[Any] = [context.module_contexts_next_batch[name] for name in names]
        fused = FusedKJTListSplitsAwaitable(requests=requests, contexts=contexts, pg=group)
        context.fused_splits_awaitables.append((names, fused))


def _script(module: nn.Module, done: dict[nn.Module, nn.Module] | None = None) -> None:
    """torch.jit.script every child that holds no sharded module, once under all its names."""
    done = {} if done is None else done
    for name, child in list(named_children(module)):
        if any(isinstance(m, ShardedModule) for m in child.modules()):
            if not isinstance(child, ShardedModule):
                _script(child, done)
            continue
        try:
            if child not in done:
                done[child] = torch.jit.script(child)
            setattr(module, name, done[child])
        except Exception as error:
            raise ConfigError(
                f"apply_jit=True: torch.jit.script fails for {name!r}, a {type(child).__name__}: {error}"
            ) from error
