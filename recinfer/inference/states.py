"""The states of a predictor: the archive as loaded, and after each delta. A call runs on one state."""

from __future__ import annotations

import abc
import copy
import functools
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

from recinfer.archive.delta import Delta, patch_rows, read_delta, with_delta
from recinfer.archive.mapping import MappedShards
from recinfer.archive.paths import read_inside
from recinfer.archive.reader import Archive
from recinfer.errors import ArchiveError, InputError

__all__ = ["States", "at_one_state"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def at_one_state(method: _Method) -> _Method:
    """Run a method on the current state: deltas applied during the call do not affect it."""

    @functools.wraps(method)
    def run(self: States, *args: Any, **kwargs: Any) -> Any:
        return method(self._state or self, *args, **kwargs)

    return cast(_Method, run)


class States(abc.ABC):
    """Holds the current state of a predictor and replaces it when a delta is applied or undone.

    ``_state`` is a copy of the predictor with the rows and the dense program after the applied deltas; unchanged parts
    (counters, feature checks) are shared. Each call runs on one state to its end. The base is such a copy too, since a
    call on the predictor itself could see a partly applied delta.
    """

    _state: Self | None
    _previous: Self | None
    _base: Self

    def __init__(self: Self, archive: Archive) -> None:
        """Subclasses call this last: it copies their attributes as the base state."""
        self._state = None
        self._previous = None
        self._deltas: tuple[Delta, ...] = ()
        self._delta_lock = threading.Lock()
        self._archive = archive
        self._assemble(archive)
        self._base = copy.copy(self)
        self._state = self._base

    @abc.abstractmethod
    def _assemble(self, archive: Archive, edit: Callable[[MappedShards], None] | None = None) -> None:
        """Map the tables and open the dense program of ``archive``, with rows changed by ``edit``."""

    @abc.abstractmethod
    def _check_answers(self) -> None:
        """Raises ArchiveError if a golden request's answer differs from the stored one."""

    def apply_delta(self, path: str | os.PathLike[str]) -> None:
        """Apply a delta: update the model to a later checkpoint while requests run.

        A request, or a batch of merged requests, sees the whole delta or none of it. Pages of changed rows become
        private to this process; all others stay shared. Results then equal those of a full export.

        Args:
            path: a delta (``*.rqd``) for this archive, the next one in its chain.

        Raises:
            ArchiveError: the delta breaks a rule of DELTA.md, or its golden answers are not reproduced. The state is
                unchanged.
            UnavailableError: there is no memory for the changed rows. The state is unchanged.
        """
        self.apply(read_delta(path))

    def apply(self: Self, delta: Delta, *, check: bool = True) -> None:
        """Apply an opened delta like :meth:`apply_delta`; ``check`` also replays its golden requests."""
        with self._delta_lock:
            now = self._state or self
            state = self.with_delta_applied(delta, check=check)
            now._previous = None  # one state is kept for undo; older ones are built again, so memory stays bounded
            state._previous = now
            self._state = state

    def undo_delta(self: Self) -> None:
        """Return to the state before the last delta, atomically.

        Raises:
            InputError: no delta is applied.
        """
        with self._delta_lock:
            now = self._state or self
            if not now._deltas:
                raise InputError("no delta is applied, so there is none to undo")
            if len(now._deltas) == 1:
                self._state = self._base
            elif now._previous is not None:
                self._state = now._previous
            else:
                state = self._base
                for delta in now._deltas[:-2]:  # manifests only; with_delta_applied below maps the rows
                    state = state._with_manifest(delta)
                self._state = state.with_delta_applied(now._deltas[-2], at=state)

    def with_delta_applied(self, delta: Delta, *, at: Self | None = None, check: bool = True) -> Self:
        """A predictor with ``delta`` applied, its golden answers checked if ``check``; this predictor is unchanged.

        Raises:
            ArchiveError: as :meth:`apply_delta`.
        """
        now = at or self._state or self
        _check_unchanged(self.archive)
        archive = with_delta(now._archive, delta, now._deltas)
        deltas = (*now._deltas, delta)

        def edit(mapped: MappedShards) -> None:
            for each in deltas:
                patch_rows(mapped, archive.manifest, each)

        state = copy.copy(now)
        state._state = state._previous = None
        state._deltas = deltas
        state._archive = archive
        state._assemble(archive, edit)
        if check and delta.sha256:  # a delta without a hash is still being written and has no answers yet
            state._check_answers()
        return state

    def _with_manifest(self, delta: Delta) -> Self:
        state = copy.copy(self)
        state._state = None
        state._archive = with_delta(self._archive, delta, self._deltas)
        state._deltas = (*self._deltas, delta)
        return state

    @property
    def state(self) -> Self:
        """A predictor with the current state; deltas applied later do not affect it."""
        return self._state or self

    @property
    def archive(self) -> Archive:
        """The opened archive with all deltas applied."""
        return (self._state or self)._archive

    @property
    def content(self) -> list[str]:
        """SHA-256 (hex) of the archive's manifest, which lists the hashes of all other files, and of each applied
        delta.

        Two predictors with the same content give the same results, independent of their names.
        """
        now = self._state or self
        return [now._archive.manifest_sha256, *(delta.sha256 for delta in now._deltas)]

    @property
    def num_deltas(self) -> int:
        """Number of applied deltas, which is the sequence number of the last one; 0 without deltas."""
        return len((self._state or self)._deltas)


def _check_unchanged(archive: Archive) -> None:
    """Raises ArchiveError if the folder changed since loading, because rows are mapped from it again."""
    try:
        text = read_inside(archive.root, "manifest.json")
    except ArchiveError:
        text = b""
    if archive.manifest_sha256 and hashlib.sha256(text).hexdigest() != archive.manifest_sha256:
        raise ArchiveError(f"{str(archive.root)!r} was replaced since it was loaded; load it again", rule="X5")
