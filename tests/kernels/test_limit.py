"""The store keeps within its limit: what was used least recently goes, and nothing that a running process uses."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coda_inductor.kernels import entries, limit, store

NAMES = ("coda_epilogue_a-1", "coda_epilogue_b-1", "coda_epilogue_c-1")


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Three kernels of 1000 bytes, used one, two and three days ago, a module, a record, a link and another's file."""
    made = store.open_store(str(tmp_path / "store"))
    for days, name in enumerate(NAMES, 1):
        store.write(made / "objects" / name / "form" / "k.o", "x" * 1000)
        aged(made / "objects" / name, days)
    for path, days in ((made / "epilogues" / "coda_epilogue_a.py", 9), (made / "tuning" / "a-64-0.json", 99)):
        store.write(path, "x" * 100)
        aged(path, days)
    (made / "objects" / "link").symlink_to(tmp_path)
    (made / "notes.txt").write_text("mine" * 1000)
    return made


def aged(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(path, (then, then))


def kept(full: Path) -> list[str]:
    return [name for name in NAMES if (full / "objects" / name / "form" / "k.o").exists()]


@pytest.mark.parametrize(
    ("bytes_", "left"),
    [(3200, 3), (3199, 2), (2200, 2), (1300, 1), (200, 0), (199, 0), (0, 0)],
)
def test_what_was_used_least_recently_goes_first(full: Path, bytes_: int, left: int) -> None:
    """Records last. What is not ours is neither counted nor removed."""
    removed = limit.make_room(full, bytes_)
    assert kept(full) == [*NAMES[:left]] and len(removed) == 3 - left + (bytes_ < 200) + (bytes_ < 100)
    assert (full / "epilogues" / "coda_epilogue_a.py").exists() == (bytes_ >= 200)
    assert (full / "tuning" / "a-64-0.json").exists() == (bytes_ >= 100)
    assert (full / "notes.txt").exists() and (full / "objects" / "link").is_symlink() and full.parent.is_dir()
    assert sorted(p.name for p in (full / limit.RUNNING).iterdir()) == [".making_room"]


def test_use_counts_as_use(full: Path) -> None:
    """The oldest is used now by a process that has ended since."""
    code = "import sys; from pathlib import Path; from coda_inductor.kernels import limit; "
    code += "limit.using(Path(sys.argv[1]), sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, str(full), NAMES[2]], check=True)
    limit.make_room(full, 1500)
    assert kept(full) == [NAMES[2]]


HOLDS = """
import os, sys
from pathlib import Path
from coda_inductor.kernels import limit
limit.using(Path(sys.argv[1]), *sys.argv[2:])
print("used", flush=True)
sys.stdin.readline()
if os.fork() == 0:  # a worker goes on when its parent has ended
    os.close(1)
    sys.stdin.readline()
"""


def test_what_a_running_process_uses_stays(full: Path) -> None:
    """However old; until it ends, and its forks."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(full), NAMES[1], "coda_epilogue_a.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "used\n"
        for path in (full / "objects" / NAMES[1], full / "epilogues" / "coda_epilogue_a.py"):
            aged(path, 100)
        limit.make_room(full, 0)
        assert kept(full) == [NAMES[1]] and (full / "epilogues" / "coda_epilogue_a.py").exists()
        process.stdin.write("\n")
        assert process.stdout.readline() == ""  # its fork has closed it, and it has ended
        limit.make_room(full, 0)
        assert kept(full) == [NAMES[1]]
        process.stdin.write("\n")
    deadline = time.monotonic() + 10
    while kept(full) and time.monotonic() < deadline:
        limit.make_room(full, 0)
    assert kept(full) == [] and [p.name for p in (full / limit.RUNNING).iterdir()] == [".making_room"]


def test_what_is_new_stays(full: Path) -> None:
    """Somebody may be writing it."""
    store.write(full / "objects" / "coda_epilogue_new-1" / "form" / "k.o", "x")
    limit.make_room(full, 0)
    assert (full / "objects" / "coda_epilogue_new-1").exists() and kept(full) == []


def test_two_do_not_make_room_at_once(full: Path) -> None:
    limit.make_room(full, 10**6)
    with (full / limit.RUNNING / ".making_room").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert limit.make_room(full, 0) == []
    assert kept(full) == [*NAMES] and len(limit.make_room(full, 0)) == 5


def test_room_is_made_once_in_a_process_and_never_without_a_limit(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[Path, int]]()

    def make_room(directory: Path, bytes_: int) -> list[limit.Part]:
        asked.append((directory, bytes_))
        return []

    monkeypatch.setattr(limit, "make_room", make_room)
    limit.keep_within(full, 0)
    limit.keep_within(full, 3)
    limit.keep_within(full, 3)
    assert asked == [(full, 3 * 10**9)]


def foreign(store_: Path) -> list[Path]:
    """Files and folders of others in all of the store's folders, old and huge; some are nearly called as ours are."""
    names = ["hub", "notes.txt", ".hidden", "kernel.py", "settings.json", "model.bin", "coda_epilogue", "1-a", ".gone"]
    names += ["coda_epilogue_a.txt", ".x.json.aaaaaaaa", "contest-mine.json", "0123456789abcdef.pt", "my-64-0.json"]
    made = [store_ / kind / name for kind in (*entries.NAMES, limit.RUNNING) for name in names]
    made += [store_ / "torch" / "0123456789abcdef.bin", store_ / "objects" / "hub2" / "a" / "k.o"]
    made += [store_ / "epilogues" / "coda_epilogue_f.py" / "k.o", store_ / "tuning" / "b-64-0.json" / "k.o"]
    made += [store_ / "objects" / "coda_epilogue_file-128x128co1x1"]
    for path in made:
        store.write(path, "")
        os.truncate(path, 20 * limit.GB)
    for path in store_.rglob("*"):
        aged(path, 400)
    return made


def test_what_has_no_name_of_ours_is_never_touched(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = foreign(full)
    assert len(limit.make_room(full, 10**6)) == 0  # nor counted
    for name, days in ((NAMES[0], 0), (NAMES[2], 500)):
        aged(full / "objects" / name, days)
    os.truncate(full / "objects" / NAMES[1] / "form" / "k.o", 2 * limit.GB)
    with caplog.at_level(logging.WARNING):
        limit.keep_within(full, 1)
        limit.keep_within(full, 1)
    said = f"{full} held more than 1 GB (CODA_INDUCTOR_CACHE_LIMIT): entries that were removed from it: 2, 2.00 GB"
    assert [r.getMessage() for r in caplog.records] == [said]
    assert kept(full) == [NAMES[0]]
    limit.make_room(full, 0)
    assert all(path.stat().st_size == 20 * limit.GB for path in theirs)


def test_without_locks_nothing_is_left_behind(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither open files nor files; what is used is younger all the same."""

    def none(*given: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    for name in (*NAMES, "coda_epilogue_d-1"):
        limit.using(full, name)
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not any(str(full) in file for file in files) and [*(full / limit.RUNNING).iterdir()] == []
    assert time.time() - (full / "objects" / NAMES[2]).stat().st_mtime < 60
    assert limit.make_room(full, 0) == []


def test_what_a_crash_left_goes(full: Path) -> None:
    """After an hour: it may be in use."""
    running = full / limit.RUNNING
    for name in (".import-abcdefgh", ".gone-abcdefgh", ".import-new_0000"):
        store.write(running / name / "big", "x")
    store.write(running / ".77-abcdefgh", "")
    for path in running.iterdir():
        aged(path, "new" not in path.name)
    limit.make_room(full, 10**6)
    assert sorted(p.name for p in running.iterdir()) == [".import-new_0000", limit.TURN]
    aged(running / ".import-new_0000", 1)
    limit.remove_leftovers(full)
    assert [p.name for p in running.iterdir()] == [limit.TURN]


def test_what_a_clock_that_was_ahead_wrote_goes_in_its_turn(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(full / "objects" / NAMES[0], -100)
    limit.make_room(full, 0)
    assert kept(full) == [NAMES[0]]
    later = time.time() + 2 * limit.FRESH_S
    monkeypatch.setattr(time, "time", lambda: later)
    limit.make_room(full, 0)
    assert kept(full) == []


def test_reading_a_record_is_use(full: Path) -> None:
    store.write(full / "tuning" / "b-64-0.json", '{"ms": 1}')
    aged(full / "tuning" / "b-64-0.json", 100)
    assert store.read_record(full, "b-64-0") == {"ms": 1}
    assert limit.make_room(full, 10) and (full / "tuning" / "b-64-0.json").exists()
    assert not (full / "tuning" / "a-64-0.json").exists()
