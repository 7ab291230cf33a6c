"""The lock files are pinned, hashed and complete, and pip rejects packages with other hashes."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("requirements*.lock"))


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock"] = module
    spec.loader.exec_module(module)
    return module


def requirements(text: str) -> list[str]:
    """The lines that pip reads, each with its continuation."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def unhashed(text: str) -> list[str]:
    """Requirements that are not a pinned version with hashes and nothing else."""
    form = re.compile(r"[A-Za-z0-9._-]+==[0-9][^\s+]*( +--hash=sha256:[0-9a-f]{64})+")
    return [line for line in requirements(text) if not form.fullmatch(line)]


def missing(wanted: list[str], text: str, lock: ModuleType) -> list[str]:
    """Requirements of pyproject.toml that no pin of these lock files meets."""
    pins = lock.pinned(text)
    found = []
    for requirement in map(Requirement, wanted):
        version = pins.get(str(canonicalize_name(requirement.name)))
        if version is None or not requirement.specifier.contains(version):
            found.append(str(requirement))
    return found


def test_there_is_a_lock_file_for_each_command(lock: ModuleType) -> None:
    assert [path.name for path in FILES] == sorted(entry.file for entry in lock.LOCKS)
    makefile = (ROOT / "Makefile").read_text()
    assert all(path.name in makefile for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_requirement_is_pinned_and_hashed(path: Path) -> None:
    text = path.read_text()
    assert unhashed(text) == []
    assert "://" not in text
    assert len(requirements(text)) == len(set(requirements(text))) > 2


def test_the_check_notices_what_it_should(lock: ModuleType) -> None:
    digest = "0" * 64
    for line in ("numpy==2.0", f"numpy>=2.0 --hash=sha256:{digest}", "numpy==2 --hash=sha256:12",
                 f"numpy==2+cpu --hash=sha256:{digest}", "-r other.lock"):  # fmt: skip
        assert unhashed(line) == [line]
    assert missing(["numpy>=3", "scipy"], "numpy==2.0 \\\n", lock) == ["numpy>=3", "scipy"]


def test_the_lock_files_hold_what_pyproject_asks_for_and_agree(lock: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = (ROOT / lock.LOCKS[0].file).read_text()
    assert missing(project["dependencies"], base, lock) == []
    versions: dict[str, set[str]] = {}
    for entry in lock.LOCKS:
        text = (ROOT / entry.file).read_text()
        wanted = [
            line for extra in entry.extras for line in project["optional-dependencies"][extra]
        ]
        assert missing(wanted, base + text, lock) == []
        for name, version in lock.pinned(text).items():
            versions.setdefault(name, set()).add(version)
    assert [name for name, found in versions.items() if len(found) > 1] == []


def test_make_installs_with_hashes_only() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "VENV=/nowhere", "check", "docs", "bench"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout  # fmt: skip
    installs = [line for line in planned.splitlines() if " pip install " in line]
    assert len(installs) == 5
    editable = [line for line in installs if line.endswith("--no-deps --no-build-isolation -e .")]
    assert len(editable) == 1
    assert all("--require-hashes" in line for line in installs if line not in editable)


def test_other_systems_files_are_listed_but_no_other_build(lock: ModuleType) -> None:
    offered = {
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": "chosen",
        "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_aarch64.whl": "other machine",
        "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl": "GPU",
        "torch-2.13.0-cp311-cp311-macosx_14_0_arm64.whl": "macOS",
        "torch-2.13.0-cp310-cp310-macosx_14_0_arm64.whl": "old Python",
        "torch-2.12.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": "old version",
        "torch-2.13.0.tar.gz": "source",
    }
    first = next(iter(offered))
    assert lock.allowed(first, offered) == {"chosen", "other machine", "macOS"}
    offered = {
        "a_b-1.0-cp39-abi3-manylinux_2_17_x86_64.whl": "abi3",
        "a_b-1.0-cp314-abi3-manylinux_2_17_x86_64.whl": "later Python",
        "a_b-1.0-cp313-cp313t-manylinux_2_17_x86_64.whl": "free-threaded",
        "a_b-1.0-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl": "PyPy",
        "a_b-1.0-py2.py3-none-any.whl": "pure",
        "a_b-1.0-cp311-cp311-win_amd64.whl": "Windows",
        "a_b-1.0.tar.gz": "source",
    }
    assert lock.allowed("a_b-1.0-py2.py3-none-any.whl", offered) == {"abi3", "pure"}
    assert "source" in lock.allowed("a_b-1.0.tar.gz", offered)


def make_wheel(folder: Path, content: str) -> Path:
    """The smallest wheel that pip installs."""
    folder.mkdir(exist_ok=True)
    metadata = "Metadata-Version: 2.1\nName: lock-probe\nVersion: 1.0\n"
    files = {
        "lock_probe.py": content,
        "lock_probe-1.0.dist-info/METADATA": metadata,
        "lock_probe-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    record = "lock_probe-1.0.dist-info/RECORD"
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(text)}\n")
    path = folder / "lock_probe-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, record: "".join(lines) + f"{record},,\n"}.items():
            archive.writestr(name, text)
    return path


def test_pip_resolves_hashes_and_refuses_a_changed_file(
    lock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    wheel = make_wheel(tmp_path / "wheels", "value = 1\n")
    pins = lock.pins(lock.resolve(["lock-probe"], {}), lock.Indexes())
    assert [(pin.name, pin.version) for pin in pins] == [("lock-probe", "1.0")]
    assert pins[0].hashes == {hashlib.sha256(wheel.read_bytes()).hexdigest()}
    (tmp_path / "probe.lock").write_text(pins[0].text())
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    words += ["--require-hashes", "-r", str(tmp_path / "probe.lock")]
    installed = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert "Would install lock-probe-1.0" in installed.stdout, installed.stderr
    make_wheel(tmp_path / "wheels", "value = 2\n")  # the same name and version, another content
    changed = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert changed.returncode != 0
    assert "DO NOT MATCH THE HASHES" in changed.stderr
