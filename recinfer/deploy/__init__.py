"""An archive on many machines: Kubernetes manifests from its plan, or a deployment on a Ray cluster."""

from __future__ import annotations

from recinfer.errors import ConfigError

__all__ = ["BUSY_PERCENT", "check_percent"]

BUSY_PERCENT = 70
"""Per cent of its time that a server may be busy before there should be more of them: queues begin to grow there."""


def check_percent(found: int) -> None:
    """Raises ConfigError unless ``found`` may stand in its place."""
    if not 1 <= found <= 100:
        raise ConfigError(f"busy per cent: got {found}, expected 1 to 100")
