"""DataLoadingThread: copies batches of an iterator to the device while the main thread computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from recinfer.streamable import move_to

__all__ = ["DataLoadingThread"]

In = TypeVar("In")


class DataLoadingThread(threading.Thread, Generic[In]):
    """Loads the next batch of an iterator to a device, at most one batch ahead.

    The thread is a daemon. After :meth:`start`, one other thread calls :meth:`get_next_batch`, and :meth:`stop` to end
    early.

    Args:
        device: device of the batches.
        dataloader_iter: read by this thread alone.
        to_device_non_blocking: passed to the batch's ``to``.
        memcpy_stream_priority: priority of the CUDA stream that copies.
        memcpy_stream: the CUDA stream that copies; default: a new stream on CUDA.
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[In],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(name="DataLoadingThread", daemon=True)
        self._device = torch.device(device)
        self._iterator = dataloader_iter
        self._non_blocking = to_device_non_blocking
        if memcpy_stream is None and self._device.type == "cuda":
            memcpy_stream = torch.cuda.Stream(device=self._device, priority=memcpy_stream_priority)
        self._memcpy_stream = memcpy_stream
        self._changed = threading.Condition()  # guards the four attributes below
        self._ready: list[In] = []  # at most one batch
        self._error: BaseException | None = None
        self._ended = False
        self._stopped = False

    def run(self) -> None:
        """Load until the iterator ends or raises, or :meth:`stop` is called."""
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for batch in self._iterator:
                with torch.cuda.stream(self._memcpy_stream):
                    batch = move_to(batch, self._device, non_blocking=self._non_blocking)
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stopped or not self._ready)
                    if self._stopped:
                        break
        except BaseException as error:  # raised in the thread that calls get_next_batch
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def stop(self) -> None:
        """Stop the thread after the current batch; loaded batches are dropped."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def get_next_batch(self, none_throws: bool = False) -> In | None:
        """The next batch, on the device; None after the last one, or StopIteration with ``none_throws``.

        Errors of the iterator are raised here, once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            if self._ready and not self._stopped:
                batch = self._ready.pop()
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        if error is not None:
            raise error
        if none_throws:
            raise StopIteration
        return None
