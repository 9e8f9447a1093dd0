"""The page's sandbox on another machine, over a real sshd on loopback."""

import asyncio
import re
from pathlib import Path

from rlx.sandbox.sandbox import ProgramLimits, SandboxOptions
from tests.launch.remote_servers_test import needs_sshd, ssh  # noqa: F401

pytestmark = needs_sshd
PAGE = Path("docs/tools.md").read_text()


def test_the_pages_sandbox_runs_programs_over_ssh_within_its_limits(
    ssh,  # noqa: F811
    monkeypatch,
    tmp_path,
):
    file = tmp_path / "remote.py"
    file.write_text(re.search(r"```python\n(# remote.py.*?)```", PAGE, re.DOTALL)[1])
    monkeypatch.setenv("SANDBOX_SSH", f"{ssh} a")
    monkeypatch.setenv("SANDBOX_COMMAND", "python3 -I -")  # bubblewrap may be missing here

    async def main():
        async with SandboxOptions(f"{file}:Remote").make() as sandbox:
            limits = ProgramLimits(wall_seconds=60.0)
            return await asyncio.gather(
                sandbox.run("print(2**100)", limits),
                sandbox.run("raise ValueError('no')", limits),
                sandbox.run("import time; time.sleep(1e6)", ProgramLimits(wall_seconds=1.0)),
            )

    good, bad, endless = asyncio.run(main())
    assert (good.status, good.text) == ("ok", f"{2**100}\n")
    assert (bad.status, bad.error) == ("error", "ValueError: no")
    assert endless.status == "timeout"
