"""Where figures come from: commit, date, machine and versions, without names of hosts or paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import noisewise

__all__ = ["code_name", "provenance"]


def provenance() -> dict[str, Any]:
    """Commit (None outside a checkout), date, cores, processor model and versions."""
    return {
        "noisewise": noisewise.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": _processor()},
        "versions": {name: version(name) for name in ("torch", "numpy", "dp-accounting")}
        | {"python": platform.python_version()},
    }


def code_name() -> str:
    """What names the code that runs: its commit or, outside a checkout, its version."""
    return _commit() or f"noisewise {noisewise.__version__}"


def _commit() -> str | None:
    """The commit of the checkout that this package lies in, with a mark if files were changed."""
    package = Path(noisewise.__file__).parent
    words = ["git", "-C", str(package), "describe", "--always", "--abbrev=12", "--dirty=-changed"]
    try:
        tracked = subprocess.run(
            ["git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py"],
            capture_output=True,
            timeout=10,
        )
        if tracked.returncode != 0:
            return None
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    """The model of the processor, as the operating system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
