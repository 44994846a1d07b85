"""Where packs are kept, which there are, who uses them, and their removal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from moet.base import env
from moet.base.log import get
from moet.checkpoint.open import Checkpoint
from moet.pack.faults import BrokenPack, PackFault, unreadable, unwritable
from moet.pack.identity import SUFFIX, as_text, identify, model_name, pack_name
from moet.pack.journal import JOURNAL, read_journal
from moet.pack.locks import LOCK, FolderLock, is_used
from moet.pack.reader import data_files, open_pack
from moet.pack.spec import MANIFEST, Plan, read_manifest

_log = get("pack.registry")

PARTIAL = ".partial"


class State(StrEnum):
    """What a pack's folder holds."""

    COMPLETE = "complete"
    STALE = "stale"  # complete, and its checkpoint has changed since
    UNFINISHED = "unfinished"
    DAMAGED = "damaged"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One pack of a list.

    Attributes:
        folder: the pack's own.
        state: what it is good for.
        source: the checkpoint's folder; empty: not known.
        nbytes: that its files take on their disks.
        records: that it has.
        total: that it will have; 0: not known.
        used: a process reads or writes it now.
        problem: why it cannot be opened; empty: it can.
    """

    folder: Path
    state: State
    source: str
    nbytes: int
    records: int
    total: int
    used: bool
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {**self.__dict__, "folder": str(self.folder), "state": self.state.value}
        return {"bytes" if name == "nbytes" else name: fact for name, fact in facts.items()}


def default_folder() -> Path:
    """Where packs are kept unless somebody names another place: ``packs`` in the cache."""
    return env.expand_user(env.read().cache_dir) / "packs"


def find_pack(checkpoint: Checkpoint, folders: Sequence[Path] = ()) -> Path | None:
    """The folder of a checkpoint's complete pack; None where there is none.

    Args:
        checkpoint: an open one.
        folders: where to look; none: in the default one.

    Raises:
        BrokenPack: STALE, there is only one of the same checkpoint before it was changed.
        BrokenCheckpoint: a file of the checkpoint cannot be read.
    """
    places = folders or (default_folder(),)
    name = pack_name(checkpoint, identify(checkpoint))
    for place in places:
        if (place / name / MANIFEST).exists():
            return place / name
        if (place / name / JOURNAL).exists():
            _log.warning("%s is not finished and not used; moet pack goes on", place / name)
    for folder in stale_packs(checkpoint, places):
        what = f"it is not of {checkpoint.folder} as it is now"
        raise BrokenPack(PackFault.STALE, folder, what)
    return None


def stale_packs(checkpoint: Checkpoint, places: Sequence[Path]) -> list[Path]:
    """Complete packs of a checkpoint as it was before it was changed; it is at the same place."""
    current = pack_name(checkpoint, identify(checkpoint))
    pattern = f"{model_name(checkpoint.folder)}-*{SUFFIX}"
    found = [folder for place in places for folder in sorted(place.glob(pattern))]
    return [f for f in found if f.name != current and _is_of(f, checkpoint)]


def _is_of(folder: Path, checkpoint: Checkpoint) -> bool:
    try:
        manifest, _ = read_manifest(folder / MANIFEST)
    except BrokenPack:
        return False
    return manifest.plan.source == as_text(checkpoint.folder.resolve())


def list_packs(folders: Sequence[Path] = ()) -> list[Entry]:
    """All packs of some folders (none: the default one), by name.

    Raises:
        BrokenPack: UNREADABLE, a folder that is there cannot be read.
    """
    found = [pack for place in folders or (default_folder(),) for pack in _packs_in(place)]
    return [describe(folder) for folder in found]


def _packs_in(place: Path) -> list[Path]:
    """Folders of packs; those that hold only a part of one that is kept elsewhere are left out."""
    try:
        entries = sorted(place.iterdir()) if place.exists() else []
    except OSError as error:
        raise unreadable(place, error) from error
    packs = [entry for entry in entries if entry.name.endswith(SUFFIX) and entry.is_dir()]
    return [pack for pack in packs if any((pack / name).exists() for name in (MANIFEST, JOURNAL))]


def describe(folder: Path) -> Entry:
    """What there is to say about one pack."""
    state, plan, problem, records = State.DAMAGED, None, "", 0
    try:
        if (folder / MANIFEST).exists():
            plan = read_manifest(folder / MANIFEST)[0].plan
            open_pack(folder)
            records = plan.records
            state = State.STALE if _has_changed(plan) else State.COMPLETE
        else:
            plan, journalled = read_journal(folder)
            state, records = State.UNFINISHED, len(journalled)
    except BrokenPack as error:
        problem = str(error)
    return Entry(
        folder=folder,
        state=state,
        source=plan.source if plan else "",
        nbytes=sum(_allocated(file) for file in _files(folder, plan)),
        records=records,
        total=plan.records if plan else 0,
        used=is_used(folder),
        problem=problem,
    )


def _has_changed(plan: Plan) -> bool:
    """Whether the checkpoint's files tell that the pack is stale; gone is not changed."""
    for file in plan.checkpoint:
        try:
            state = (Path(plan.source) / file.name).stat()
        except OSError:
            continue
        if (state.st_size, state.st_mtime_ns) != (file.nbytes, file.mtime_ns):
            return True
    return False


def _allocated(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


def _files(folder: Path, plan: Plan | None) -> list[Path]:
    """The files of records. Without a plan: those beside the manifest."""
    if plan is not None:
        return list(data_files(plan, folder))
    return sorted(folder.glob("experts-*.bin"))


def remove_pack(folder: Path) -> int:
    """Removes a pack, whole or unfinished; returns the bytes that its records took.

    The manifest goes last: a removal that was stopped leaves what cannot be opened and can be
    removed again. Nothing is touched that is not a pack's.

    Raises:
        BrokenPack: IN_USE; NO_PACK, the folder has neither manifest nor journal; WRITE_FAILED.
    """
    plan = _plan_of(folder)
    files = _files(folder, plan)
    places = sorted({folder.absolute(), *(file.parent.absolute() for file in files)})
    with ExitStack() as stack:
        for place in places:
            if place.exists():
                stack.enter_context(FolderLock(place, shared=False))
        freed = sum(_allocated(file) for file in files)
        try:
            for path in (*files, *_own_names(folder)):
                path.unlink(missing_ok=True)
            for place in places:
                _remove_folder(place)
        except OSError as error:
            raise unwritable(folder, error, "cannot be removed") from error
    return freed


def _plan_of(folder: Path) -> Plan | None:
    """What the folder says of its files; None where it is too damaged to say."""
    there = [name for name in (MANIFEST, JOURNAL) if (folder / name).exists()]
    if not there or not folder.name.endswith(SUFFIX):
        what = "it is no pack: no manifest and no journal are in a folder *.moetpack"
        raise BrokenPack(PackFault.NO_PACK, folder, what)
    try:
        manifest = MANIFEST in there
        return read_manifest(folder / MANIFEST)[0].plan if manifest else read_journal(folder)[0]
    except BrokenPack as error:
        _log.warning("%s: what lies in other folders is not known: %s", folder, error)
        return None


def _own_names(folder: Path) -> Iterator[Path]:
    for name in (JOURNAL + PARTIAL, MANIFEST + PARTIAL, JOURNAL, MANIFEST):
        yield folder / name


def _remove_folder(place: Path) -> None:
    """The folder, if nothing else is in it."""
    if place.exists() and {entry.name for entry in place.iterdir()} <= {LOCK}:
        (place / LOCK).unlink(missing_ok=True)
        place.rmdir()
