"""The examples in docker/k8s and docker/helm: a 46 GiB model on two ranks. ``python -m tests.deploy.example`` writes them
again."""

from __future__ import annotations

from pathlib import Path

from recinfer.deploy.groups import MIB, Footprint, RankGroup
from recinfer.deploy.helm import write_chart
from recinfer.deploy.k8s import K8sOptions, write_manifests

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "k8s"
CHART = FOLDER.parent / "helm" / "recinfer"
FOUND = Footprint(
    "ctr",
    "1",
    (RankGroup(0, (0,), 23_500 * MIB), RankGroup(1, (1,), 23_100 * MIB)),
    ranker_bytes=1_064 * MIB,
    ranker_limit_bytes=1_360 * MIB,
)
OPTIONS = K8sOptions(max_rankers=8)

if __name__ == "__main__":
    write_manifests(FOUND, OPTIONS, FOLDER)
    write_chart(FOUND, OPTIONS, CHART)
