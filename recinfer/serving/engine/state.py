"""The state on which the workers of a port agree: the served versions with their deltas, and the spread of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ServedState", "ServedVersion", "Spread"]


@dataclass(frozen=True)
class Spread:
    """The versions of one model to which requests without a version go.

    Attributes:
        weights: version -> weight above 0.
        before: the weights that these replaced, to which a rollback returns; None: no others were set.
        labels: label -> version.
    """

    weights: dict[str, int]
    before: dict[str, int] | None = None
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedVersion:
    """A version that a process serves.

    Attributes:
        model, version: its names in requests.
        content: hashes of its archive's manifest and of each applied delta, see Predictor.content.
        deltas: names of its applied deltas of the model store, in order.
        undone: number of other applied deltas that were undone before these.
    """

    model: str
    version: str
    content: tuple[str, ...]
    deltas: tuple[str, ...] = ()
    undone: int = 0


@dataclass(frozen=True)
class ServedState:
    """The served models of a process, with which another process can begin.

    Attributes:
        versions: all served versions; the first is of the default model, and those of one model are in the order of their
            loading.
        spreads: model -> its spread.
    """

    versions: tuple[ServedVersion, ...]
    spreads: dict[str, Spread]

    def versions_of(self, model: str) -> list[ServedVersion]:
        """The served versions of a model; empty for a model that is not served."""
        return [served for served in self.versions if served.model == model]

    def weights_of(self, model: str) -> dict[str, int]:
        """The weights of a model; empty for a model that is not served."""
        return dict(self.spreads[model].weights) if model in self.spreads else {}
