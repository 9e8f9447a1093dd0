"""How much memory there is: of a machine, of a container, under a limit of the shell's."""

import subprocess
import sys

from rlx.system import available_memory

GB = 10**9


def machine(tmp_path, cgroup=""):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 20000000 kB\nMemAvailable: 15000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    return tmp_path


def group(place, limit, used, stat, names=("memory.max", "memory.current")):
    place.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (place / name).write_text(f"{value}\n")


def test_without_a_container_it_is_the_machines(tmp_path):
    found = available_memory.memory(machine(tmp_path))
    assert found == (20_480_000_000, 15_360_000_000, "on this machine")
    assert str(found) == "15.4 of 20.5 GB free on this machine"


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path):
    root = machine(tmp_path, "0::/slice/job\n")
    top = root / "sys/fs/cgroup"
    group(top / "slice/job", "max", 3 * GB, "")
    group(top / "slice", 8 * GB, 6 * GB, f"anon 1\ninactive_file {2 * GB}\n")
    assert available_memory.memory(root) == (8 * GB, 4 * GB, "in its container (cgroup)")


def test_groups_of_the_first_kind_are_read_too(tmp_path):
    root = machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/box\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(root / "sys/fs/cgroup/memory/box", 2 * GB, GB, "total_inactive_file 0\n", names)
    group(root / "sys/fs/cgroup/memory", 1 << 62, GB, "total_inactive_file 0\n", names)
    assert available_memory.memory(root)[:2] == (2 * GB, GB)


def test_a_shells_limit_counts():
    script = "ulimit -v 4000000; exec " + sys.executable + " -c "
    code = "'from rlx.system import available_memory; print(available_memory.memory())'"
    done = subprocess.run(["sh", "-c", script + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("of 4.1 GB free under `ulimit -v`")
