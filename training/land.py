"""Bring a run home: python -m training.land RUN. Unpacks the export, keeps the record, renders."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import moet.demo
from training.export import write_json
from training.render import RECORD
from training.render import main as render


def commit() -> str:
    """The commit the run's sources were taken from."""
    done = subprocess.run(
        ["git", "log", "-1", "--format=%H", "--", "training", "src/moet/demo/tasks"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def unpack(run: Path) -> None:
    """The archive over the package data."""
    target = moet.demo.path().parent
    with tarfile.open(run / "moet-tiny.tar") as archive:
        archive.extractall(target, filter="data")
    for path in moet.demo.path().iterdir():
        path.chmod(0o644)


def main(run: Path) -> None:
    """Unpack, record, render."""
    unpack(run)
    record = json.loads((run / "record.json").read_text("utf-8"))
    del record["plan"]["out"]  # a folder of that machine
    write_json(RECORD, {"commit": commit(), **record})
    render()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
