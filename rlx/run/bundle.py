"""Pack what somebody needs to replay steps of a run elsewhere into one zip file, with checksums.

It unpacks to a directory like that of a run, with the records of these steps only.
"""

import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlx.base import UserError
from rlx.journal import records
from rlx.observe.metrics import STARTS
from rlx.run.inputs import INITIAL
from rlx.run.replay_run import Plan, Recorded

_JOURNAL = f"journal/{0:020d}.records"


def write(path: Path, recorded: Recorded, plan: Plan) -> None:
    """Write the bundle of a plan's steps; UserError if it cannot be written."""
    workdir, config = recorded.workdir, recorded.config(plan.begin + 1)
    files = {name: workdir / name for name in ("config.json", STARTS, "metrics.jsonl")}
    files |= _below(workdir / "code", "code") | _below(recorded.model(config), INITIAL)
    files |= {f"images/{name}": workdir / "images" / name for name in _images(recorded, plan)}
    if plan.origin:
        files |= _below(plan.origin, f"checkpoints/{plan.origin.name}")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(scratch, "w", strict_timestamps=False) as file:
            for name, source in files.items():
                file.write(source, name)
            file.writestr(_JOURNAL, b"".join(_records(recorded, plan)))
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; give another --bundle") from error


def _images(recorded: Recorded, plan: Plan) -> set[str]:
    groups = (group for step in range(plan.begin + 1, plan.last + 1)
              for group in recorded.groups(step))  # fmt: skip
    return {name for group in groups for each in group.trajectories for name in each.images}


def _below(place: Path, name: str) -> dict[str, Path]:
    found = sorted(path for path in place.rglob("*") if path.is_file())
    return {f"{name}/{path.relative_to(place)}": path for path in found}


def _records(recorded: Recorded, plan: Plan) -> Iterator[bytes]:
    number = 0
    for step in range(plan.begin, plan.last):
        groups = [place.read() for place in recorded.batches.groups[step]]
        ids = [record.fields["group_id"] for record in groups]
        tried = recorded.batches.attempts
        events = [(record.kind, record.fields, record.packed) for record in groups]
        events += [("admit", {"group_id": g, "attempt": tried.get(g, 0)}, b"") for g in ids]
        events.append(("take", {"step": step, "groups": ids}, b""))
        if step + 1 in recorded.batches.weights:
            events.append(("weights", recorded.batches.weights[step + 1], b""))
        for kind, fields, packed in events:
            yield records.encode(number, kind, fields, packed)
            number += 1


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """Yield the directory of a run, or of an unpacked bundle; UserError if it is damaged."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="rlx-replay-") as place:
        try:
            with zipfile.ZipFile(path) as file:
                file.extractall(place)  # checks every CRC-32
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{path} is neither the directory of a run nor a whole bundle ({error}); get it "
                "again"
            ) from error
        yield Path(place)
