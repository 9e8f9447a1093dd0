"""The site is built without a warning, and a reader's browser asks nobody else for anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings_handlers.python")
pytest.importorskip("material")
ROOT = Path(__file__).parents[2]


@pytest.mark.docs
def test_the_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9",
             "https_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {p.relative_to(tmp_path / "site").as_posix(): p.read_text()
             for p in (tmp_path / "site").rglob("*.html")}  # fmt: skip
    for path, page in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\bsrc=[\"']?(\w+:[^\s\"'>]*)", page)
        loaded += re.findall(
            r"<link[^>]*rel=\"?(?:stylesheet|preconnect|icon)[^>]*href=\"?(https?:[^\s>]*)", page
        )
        assert not [url for url in loaded if not url.startswith("data:")], f"{path} loads {loaded}"
    for path in ("index.html", "config/index.html", "api/index.html", "staleness/index.html"):
        assert path in pages
    assert "LossInputs" in pages["api/index.html"]
    assert 'id="rollout"' in pages["config/index.html"]
    assert "experiments/2026-11-staleness/index.html" in pages
    assert '<span class="formula">π<sub><b>beh</b></sub></span>' in pages["algorithms/index.html"]
