"""The store keeps within its limit: what was used least recently goes, and nothing that a running process uses."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coda_inductor.kernels import limit, store

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
    monkeypatch.setattr(limit, "make_room", lambda directory, bytes_: asked.append((directory, bytes_)))
    limit.keep_within(full, 0)
    limit.keep_within(full, 3)
    limit.keep_within(full, 3)
    assert asked == [(full, 3 * 10**9)]
