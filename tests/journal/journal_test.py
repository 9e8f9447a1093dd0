"""The journal: the longest intact prefix after any damage, what is on disk, and its bound."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import DiskFull, Group, Trajectory, UserError
from rlx.journal import journal, records
from rlx.journal.journal import Journal

SECONDS = 30.0


def a_group(group_id=0, size=6):
    """A group of one trajectory with `size` tokens."""
    sampled = np.arange(size) >= 2
    trajectory = Trajectory(
        tokens=np.arange(size, dtype=np.int32),
        loss_mask=sampled,
        behaviour_logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        reward=1.0,
        stop_reason="stop",
        trajectory_id=f"{group_id}.0",
        prompt="2+2=",
        completion="4\n",
    )
    return Group(group_id, (trajectory,), {"question": "2+2=\n"})


def written(count):
    """Bytes of `count` records, some with a group, and the end of each."""
    data, ends = b"", [0]
    for n in range(count):
        packed = records.pack(a_group(n)) if n % 3 == 0 else b""
        data += records.encode(n, "group" if packed else "admit", {"group_id": n}, packed)
        ends.append(len(data))
    return data, ends


DATA, ENDS = written(7)


def intact(data):
    return [record.number for record in records.scan(data)]


@settings(deadline=None, max_examples=300)
@given(end=st.integers(0, len(DATA)))
def test_a_cut_leaves_the_records_that_end_before_it(end):
    assert intact(DATA[:end]) == [n for n in range(7) if ENDS[n + 1] <= end]


@settings(deadline=None, max_examples=600)
@given(place=st.integers(0, len(DATA) - 1), bits=st.integers(1, 255))
def test_a_flipped_byte_leaves_the_records_before_it(place, bits):
    data = bytearray(DATA)
    data[place] ^= bits
    assert intact(bytes(data)) == [n for n in range(7) if ENDS[n + 1] <= place]


def test_a_group_comes_back_whole():
    first = next(records.scan(DATA))
    group = first.group()
    assert (group.group_id, dict(group.row)) == (0, {"question": "2+2=\n"})
    assert np.array_equal(group.trajectories[0].versions, [-1, -1, 3, 3, 3, 3])


def write(directory, numbers, keep=1_000_000):
    made = Journal(directory, numbers[0], keep)
    for n in numbers:
        assert made.append("group", {"group_id": n}, a_group(n, 200)) == n
    made.close()
    made.check()


def numbers(directory, first=0):
    return [record.number for record, _ in journal.read(directory, first)]


def test_what_was_appended_is_read_across_files_from_any_number(tmp_path):
    write(tmp_path, range(60), keep=160_000)
    assert len(list(tmp_path.iterdir())) > 2
    assert numbers(tmp_path) == list(range(60))
    assert numbers(tmp_path, 37) == list(range(37, 60))
    assert journal.cut(tmp_path) == journal.cut(tmp_path, 41) == (0, 60)
    for record, place in journal.read(tmp_path, 50):
        assert place.read().group().group_id == record.number


def test_the_oldest_files_go_and_the_bound_holds(tmp_path):
    write(tmp_path, range(400), keep=100_000)
    assert 50_000 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000
    left = numbers(tmp_path)
    assert left == list(range(left[0], 400))
    assert left[0] > 0


@settings(deadline=None, max_examples=40)
@given(share=st.floats(0, 0.999), flip=st.booleans(), first=st.integers(0, 40))
def test_a_damaged_journal_is_cut_once_and_then_appended_to(tmp_path_factory, share, flip, first):
    place = tmp_path_factory.mktemp("journal")
    write(place, range(40), keep=160_000)
    files = sorted(place.iterdir())
    at = int(share * sum(path.stat().st_size for path in files))
    for path in files:
        if at < path.stat().st_size:
            break
        at -= path.stat().st_size
    data = bytearray(path.read_bytes())
    if flip:
        data[at] ^= 1
    path.write_bytes(data if flip else data[:at])
    before = numbers(place, first)
    ended = before[-1] + 1 if before else None
    assert before == list(range(first, first + len(before)))
    _, go_on = journal.cut(place, first)
    assert journal.cut(place, first) == (0, go_on)
    assert numbers(place, first) == before
    assert ended is None or go_on == ended
    write(place, range(go_on, go_on + 3), keep=160_000)
    assert numbers(place, first) == [*before, *range(go_on, go_on + 3)]


def test_a_killed_writer_loses_nothing_older_than_a_moment(tmp_path):
    program = (
        "import sys, time; from tests.journal.journal_test import Journal, a_group\n"
        f"made = Journal(__import__('pathlib').Path({str(tmp_path / 'j')!r}), 0, 1_000_000)\n"
        "for n in range(50): made.append('group', {'group_id': n}, a_group(n))\n"
        "print('appended', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    assert numbers(tmp_path / "j") == list(range(50))


def test_records_are_flushed_within_a_second_though_nothing_follows(tmp_path, monkeypatch):
    flushed, sync = [], os.fsync

    def note(handle):
        flushed.append(time.monotonic())
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    made = Journal(tmp_path, 0, 1_000_000)
    made.append("admit", {})
    begun = time.monotonic()
    while len(flushed) < 2:  # the directory's is the first
        assert time.monotonic() < begun + SECONDS
        time.sleep(0.01)
    assert flushed[1] - begun < 1.0 + 0.5  # a loaded machine
    made.close()


@pytest.mark.parametrize("full", [True, False])
def test_a_journal_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, full):
    def refuse(handle, data):
        raise OSError(28, "No space left on device") if full else OSError(5, "Input/output error")

    made = Journal(tmp_path, 0, 1_000_000)
    monkeypatch.setattr(os, "write", refuse)
    made.append("admit", {})
    made.close()
    kind, words = (DiskFull, "free some space") if full else (UserError, "correct it")
    with pytest.raises(kind, match=rf"cannot write .*{words}, or set journal.keep=0") as found:
        made.check()
    assert type(found.value) is kind


def test_a_file_that_cannot_be_begun_closes_no_file_of_others(tmp_path):
    """A closed descriptor's number belongs to the file that is opened next, as a checkpoint's."""
    place = tmp_path / "j"
    made, end = Journal(place, 0, 16_000), time.monotonic() + SECONDS
    made.append("group", {}, a_group(size=4000))  # above the size of a file
    while made._size == 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    place.rename(tmp_path / "gone")
    place.touch()
    made.append("admit", {})
    while made._error is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    with open(tmp_path / "other", "wb", buffering=0) as other:
        made.close()
        other.write(b"kept")
    assert (tmp_path / "other").read_bytes() == b"kept"
    with pytest.raises(UserError, match="cannot write"):
        made.check()


def test_a_partly_written_record_is_taken_back(tmp_path, monkeypatch):
    write(tmp_path, range(3))
    size, real = sum(p.stat().st_size for p in tmp_path.iterdir()), os.write
    taken = []

    def half(handle, data):
        if taken:
            raise OSError(28, "No space left on device")
        taken.append(real(handle, bytes(data[:20])))
        return taken[0]

    made = Journal(tmp_path, 0, 1_000_000)  # the same file, appended to
    monkeypatch.setattr(os, "write", half)
    made.append("admit", {})
    made.close()
    assert taken == [20]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) == size


def test_a_journal_that_is_off_writes_nothing(tmp_path):
    made = Journal(tmp_path / "j", 0, 0)
    assert made.append("admit", {}) == -1
    made.check()
    made.close()
    assert not (tmp_path / "j").exists()
