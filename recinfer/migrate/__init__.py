"""Programs written for TorchRec, made to import recinfer: what changes in each file, and which names are not here."""

from __future__ import annotations

from recinfer.migrate.files import FileChange, MissingName, python_files
from recinfer.migrate.rewrite import migrate_file

__all__ = ["FileChange", "MissingName", "migrate_file", "python_files"]
