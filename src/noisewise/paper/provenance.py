"""The origin of figures: commit, date, machine and versions, without host names or paths."""

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
    """Return commit (None outside a git checkout), date, cores, processor model and versions."""
    return {
        "noisewise": noisewise.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": _processor()},
        "versions": {name: version(name) for name in ("torch", "numpy", "dp-accounting")}
        | {"python": platform.python_version()},
    }


def code_name() -> str:
    """Return the commit of the running code or, outside a git checkout, its version."""
    return _commit() or f"noisewise {noisewise.__version__}"


def _commit() -> str | None:
    """The commit of this package's checkout, with ``-changed`` if files were changed."""
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
