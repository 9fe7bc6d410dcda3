"""Two workers on an archive with vocabularies: one mapped index, raw ids, a delta amid requests, a worker killed after it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import torch

from recinfer.errors import UnavailableError
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.vocabulary.info import VocabularyInfo
from tests.caller_threads import CallerThreads
from tests.serving.supervised import supervised
from tests.vocabulary.made import MAX, MIN
from tests.vocabulary.test_deltas import Chain, chain, mark, request_of
from tests.waiting import until

__all__ = ["chain"]


class Callers(CallerThreads):
    """Callers with a connection each that look up the same raw ids again and again, each answer of one state.

    Attributes:
        seen: states that answered; wrong: answers of none, of which there should be none.
    """

    def __init__(self, target: str, made: Chain, ids: np.ndarray, count: int = 6) -> None:
        super().__init__(count)
        self.target, self.ids = target, ids
        self.known = [torch.from_numpy(np.isin(ids, vocabulary.ids)) for _, vocabulary in made[2]]
        self.marks = torch.stack([mark(int(id_) % 10**14) for id_ in ids])
        self.seen: list[int] = []
        self.wrong: list[torch.Tensor] = []
        self.failed = 0

    def state(self) -> int | None:
        """The state that a new connection's worker has; None: it has ended."""
        try:
            with InferenceClient(self.target, timeout=60, retries=0) as client:
                found = client.lookup(request_of(self.ids)).pooled.values()
        except UnavailableError:
            self.failed += 1
            return None
        read = (found == self.marks).all(1)
        for number, known in enumerate(self.known):
            # Ids that the state lacks all read the row of unknown ids; the last three ids are in no state.
            if torch.equal(read, known) and torch.equal(found[~known], found[-1].expand_as(found[~known])):
                return number
        self.wrong.append(found)
        return -1

    def _call(self, number: int) -> None:
        while not self._stop.is_set():
            state = self.state()
            if state is not None:
                self.seen.append(state)


def mappings(pid: int, path: Path) -> list[tuple[str, str]]:
    """(permissions, inode) of the places where a process has mapped ``path``."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [(fields[1], fields[4]) for line in lines if (fields := line.split(maxsplit=5))[5:] == [str(path)]]


def test_two_workers_map_one_index_and_switch_ids_and_rows_at_once(chain: Chain, tmp_path: Path) -> None:
    archive, deltas, made = chain
    folder = tmp_path / "small"
    shutil.copytree(archive.root, folder / "7")
    for delta in deltas:
        shutil.copy(delta, folder)
    every = np.unique(np.concatenate([vocabulary.ids for _, vocabulary in made]))
    ids = np.concatenate((np.random.default_rng(2).permutation(every)[:300], [MIN, -1, MAX]))
    with supervised("--model-store", tmp_path, "--admin") as (supervisor, target, said), AdminClient(target) as admin:
        found = [mappings(pid, (folder / "7" / VocabularyInfo.path(0)).resolve()) for pid in supervisor.pids]
        assert len(found) == 2 and found[0] == found[1] == [("r--s", found[0][0][1])]
        with Callers(target, chain, ids) as callers:
            until(lambda: len(callers.seen) > 12)
            assert set(callers.seen) == {0}
            for delta in deltas:
                admin.apply_delta("small", delta.name)
            until(lambda: len(deltas) in callers.seen)
            assert {callers.state() for _ in range(12)} == {len(deltas)}
            assert not callers.failed
            before = supervisor.pids
            os.kill(before[0], signal.SIGKILL)
            until(lambda: any("serves again" in line for line in said))
            admin.undo_delta("small")
            assert {callers.state() for _ in range(12)} == {len(deltas) - 1}
        assert not callers.wrong
        assert callers.failed <= 2 * 7
        assert len(supervisor.pids) == 2 and before[0] not in supervisor.pids
