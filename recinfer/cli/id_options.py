"""The options that id steps bring: for each command a class, whose fields :func:`recinfer.cli.declared.takes_groups`
declares. The other files of this package name no step.
"""

from __future__ import annotations

from recinfer.vocabulary.options import ComparedVocabularies as DemoIds
from recinfer.vocabulary.options import NewVocabularyFiles as DeltaIds
from recinfer.vocabulary.options import PlannedVocabularyFiles as PlanIds
from recinfer.vocabulary.options import VocabularyFiles as ExportIds

__all__ = ["DeltaIds", "DemoIds", "ExportIds", "PlanIds"]
