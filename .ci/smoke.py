"""Smoke test of an installed noisewise (`make build`): every file is there, and short runs work.

Run it with the interpreter of an environment into which the wheel was installed, not this folder.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import noisewise

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "noisewise"
COMMAND = str(Path(sys.executable).parent / "noisewise")
CONFIG = """\
[data]
name = "digits"
clients = 4
[population]
epsilon = [1.0, 2.0, 4.0, 8.0]
batch_size = 16
delta = 1e-3
[model]
name = "softmax"
[training]
rounds = 2
learning_rate = 1.0
clip_norm = 1.0
[compare]
seeds = 1
methods = ["NoiseWise", "RobustHDP", "DPFedAvg"]
"""


def missing_files(installed: Path) -> list[str]:
    """Files of the source folder that the installed package does not have."""
    files = (path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file())
    wanted = (path for path in files if "__pycache__" not in path.parts)
    return sorted(str(path) for path in wanted if not (installed / path).is_file())


def main() -> None:
    """Run all checks; the first one that fails ends the program with a message."""
    installed = Path(noisewise.__file__).resolve().parent
    if not installed.is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(
            f"noisewise is imported from {installed}, not from {sys.prefix}: install the wheel"
        )
    if missing := missing_files(installed):
        sys.exit(f"the wheel lacks {len(missing)} files, e.g. {missing[0]}: see package-data")
    version = importlib.metadata.version("noisewise")
    if version != noisewise.__version__:
        sys.exit(f"metadata say version {version}, the package says {noisewise.__version__}")
    for name in noisewise.__all__:
        getattr(noisewise, name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "short.toml").write_text(CONFIG)
        for words in (
            ["--version"],
            ["methods"],
            ["compare", "short.toml", "--output", "runs"],
            ["flower", "new", "app"],
        ):
            subprocess.run([COMMAND, *words], cwd=folder, check=True, timeout=1800)
        if not (Path(folder) / "runs" / "report.html").is_file():
            sys.exit("`noisewise compare` wrote no report.html")
    print(f"noisewise {version}: the installed package works")


if __name__ == "__main__":
    main()
