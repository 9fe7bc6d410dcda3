"""Deploys an archive on several machines: Kubernetes manifests from its plan, or a deployment on a Ray cluster."""

from __future__ import annotations

from recinfer.errors import ConfigError
from recinfer.version import __version__

__all__ = ["BUSY_PERCENT", "IMAGE", "LOAD_PERCENT", "check_percent"]

BUSY_PERCENT = 70
"""Busy time of a server, in percent, above which another server is added: queues begin to grow there."""

IMAGE = f"recinfer:{__version__}-cpu"
"""The container image of this version, as docs/how-to/deploy-containers.md builds it."""

LOAD_PERCENT = 40
"""Load of a ranker, in percent, above which another ranker is added. The latency has not doubled yet, also 10 % above it, where
Kubernetes begins to act."""


def check_percent(found: int, what: str = "busy percent") -> None:
    """Raises ConfigError unless ``found`` is a percentage from 1 to 100."""
    if not 1 <= found <= 100:
        raise ConfigError(f"{what}: got {found}, expected 1 to 100")
