"""Files whose content is used again once it has changed and is sound."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from recinfer.errors import ConfigError, InputError

__all__ = ["FollowedFiles", "is_pipe"]

T = TypeVar("T")


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a pipe, such as bash's ``<(command)``: it gives its content once, and a second read would wait forever."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


class FollowedFiles(Generic[T]):
    """The files of one purpose. Thread-safe.

    Args:
        name: of the content, for the log.
        log: of the owner.

    Attributes:
        used: the content in use.
        outcomes: how often changed files were used ("ok") and were not ("failed").
    """

    def __init__(self, name: str, log: logging.Logger) -> None:
        self.used: T | None = None
        self.outcomes: Counter[str] = Counter(ok=0, failed=0)
        self._name = name
        self._log = log
        self._odd: T | str | None = None  # the last content that could not be used, or the error of reading it
        self._is_reported = False
        self._lock = threading.Lock()

    def look(self, read: Callable[[], T], use: Callable[[T], None]) -> bool:
        """Read the files, and use them if they have changed; returns whether they are used.

        Files that cannot be used change nothing. The log reports them if they are the same at two looks in a row, once, since
        certificate and key are often written one after the other.

        Args:
            read: returns the content; ``use``: checks and uses it. Both raise ConfigError or InputError.
        """
        with self._lock:
            content: T | None = None
            try:
                content = read()
                if content == self.used:
                    self._ended("the %s are those in use again")
                    return False
                if content == self._odd and self._is_reported:
                    return False
                use(content)
            except (ConfigError, InputError) as error:
                self._failed(str(error) if content is None else content, error)
                return False
            self.used = content
            self.outcomes["ok"] += 1
            if not self._ended("the %s were read again: new connections and calls use them"):
                self._log.info("the %s were read again: new connections and calls use them", self._name)
            return True

    def _ended(self, text: str) -> bool:
        """Forget a failure; returns whether the log had reported it, so that it reports its end at a level that is shown too."""
        was_reported = self._odd is not None and self._is_reported
        self._odd, self._is_reported = None, False
        if was_reported:
            self._log.warning(text, self._name)
        return was_reported

    def _failed(self, odd: T | str, error: Exception) -> None:
        if odd != self._odd:
            self._odd, self._is_reported = odd, False
        elif not self._is_reported:
            self._is_reported = True
            self.outcomes["failed"] += 1
            self._log.error("the %s stay as they were: %s", self._name, error)
