"""Another version on all rankers: loaded by all of them, or by none, before one of them switches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from recinfer.errors import InputError, RecinferError, UnavailableError
from recinfer.serving.admin_client import AdminClient, LoadedVersion

__all__ = ["activate", "load_everywhere", "tidy"]

Connect = Callable[[str], AdminClient]


def load_everywhere(rankers: Sequence[str], model: str, version: str, connect: Connect) -> list[str]:
    """Phase one: every ranker has its shards map and check the version, and replays its golden requests.

    Args:
        rankers: their addresses.
        connect: address -> admin client.

    Returns:
        Those that have it. One that is gone meanwhile is not among them: it starts again with what is served then.

    Raises:
        RecinferError: a ranker or shard refused it; it is unloaded where it was loaded, and nothing has changed.
    """
    fresh: list[str] = []
    done: list[str] = []
    for address in rankers:
        try:
            with connect(address) as admin:
                if version not in _versions(admin, model):
                    admin.load(model, version)
                    fresh.append(address)
            done.append(address)
        except RecinferError as error:
            if isinstance(error, UnavailableError) and _is_gone(address, connect):
                continue
            for each in fresh:
                with suppress(RecinferError), connect(each) as admin:
                    admin.unload(model, version)
            raise
    if not done:
        raise UnavailableError(f"no ranker is there to load version {version!r}; nothing has changed")
    return done


def activate(address: str, model: str, version: str, connect: Connect) -> None:
    """Have a ranker answer from ``version``, which it loads if it must. Raises RecinferError."""
    with connect(address) as admin:
        here = _versions(admin, model)
        if version not in here:
            try:
                here = admin.load(model, version)[model]
            except InputError:  # somebody else was faster
                here = _versions(admin, model)
                if version not in here:
                    raise
        if [name for name, found in here.items() if found.weight] != [version]:
            admin.set_default(model, version)


def tidy(address: str, model: str, keep: Sequence[str | None], connect: Connect) -> None:
    """Unload all versions but those in ``keep`` and those that requests go to. Raises RecinferError."""
    with connect(address) as admin:
        for version, found in _versions(admin, model).items():
            if version not in keep and not found.weight:
                admin.unload(model, version)


def _versions(admin: AdminClient, model: str) -> dict[str, LoadedVersion]:
    return admin.list_models().get(model, {})


def _is_gone(address: str, connect: Connect) -> bool:
    try:
        with connect(address) as admin:
            admin.list_models()
    except UnavailableError:
        return True
    return False
