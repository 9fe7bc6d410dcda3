"""The Ray actor of a controller: one per deployment, detached, and restarted on any node."""

from __future__ import annotations

from typing import Any

from recinfer.deploy.ray.cluster import RayEngine
from recinfer.deploy.ray.control import Controller
from recinfer.deploy.ray.spec import Deployment

__all__ = ["ControllerActor"]


class ControllerActor:
    """Runs a Controller as a Ray actor, and returns the deployment's specification to clients that remove it."""

    def __init__(self, spec: Deployment) -> None:
        self._spec = spec
        self._controller = Controller(spec, RayEngine(spec))
        self._controller.start()

    def status(self) -> dict[str, Any]:
        """See recinfer.deploy.ray.control.Controller."""
        return self._controller.status()

    def scale(self, shards: int | None, rankers: int | None) -> None:
        """See recinfer.deploy.ray.control.Controller."""
        self._controller.scale(shards, rankers)

    def roll(self, version: str | None) -> str:
        """See recinfer.deploy.ray.control.Controller."""
        return self._controller.roll(version)

    def down(self) -> None:
        """See recinfer.deploy.ray.control.Controller."""
        self._controller.down()

    def spec(self) -> Deployment:
        """The specification of its deployment, without the token."""
        from dataclasses import replace

        return replace(self._spec, token=None)
