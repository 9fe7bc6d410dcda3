"""A worker's answer to its supervisor after a change of its models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from recinfer.archive.strict_json import build
from recinfer.serving.engine.state import ServedState, Spread

__all__ = ["MadeChange"]


@dataclass(frozen=True)
class MadeChange:
    """The result of an admin call in one worker.

    Attributes:
        answer: the serialized answer for the client, in base64.
        before: the spread of each model before the change, with which the change is taken back.
        served_before: whether the call loaded a version that the worker served already.
        state: the worker's models after the change.
    """

    answer: str
    before: dict[str, Spread]
    served_before: bool
    state: ServedState

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object, by the names of the fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> MadeChange:
        """Read :meth:`to_json`'s object after its way through JSON text; raises ArchiveError for anything else."""
        return build(cls, value, "a worker's answer")
