"""Freed memory is used again without the kernel mapping it anew."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, resource, sys
from rlx.system.process_settings import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size, touched = 2200 << 20, 200 << 20  # as a model's step, beyond what an int counts
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    libc.memset(block, 1, touched)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, check=True)
    return int(done.stdout)


def test_second_allocation_faults_no_pages():
    assert faults("default") > 10_000  # else the test shows nothing
    assert faults("keep") < 100


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2",
    reason="a kernel without huge pages, or that counts addresses",
)
def test_the_heap_asks_for_huge_pages():
    program = """
import re
from rlx.system.process_settings import keep_freed_memory
keep_freed_memory()
heap = [part for part in re.split(r"\\n(?=[0-9a-f]+-)", open("/proc/self/smaps").read())
        if "[heap]" in part and " hg" in part]
print(sum(int(re.search(r"Size: +([0-9]+)", part)[1]) for part in heap) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) > 256  # MiB of addresses
