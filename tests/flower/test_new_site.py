"""`noisewise site new`: a valid site file, hardened units, a script that a shell accepts."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command import Noisewise

from noisewise.errors import InvalidValueError
from noisewise.flower.new_site import write_site
from noisewise.site.site_file import load_site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_site(tmp_path / "site")
    return tmp_path / "site"


def unit(path: Path) -> dict[str, list[str]]:
    """The options of a service, each with all of its values."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", "").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_command_writes_all_files(tmp_path: Path, noisewise: Noisewise) -> None:
    result = noisewise("site", "new", str(tmp_path / "new"))
    assert result.returncode == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "Containerfile", "README.md", "noisewise-relay.service", "noisewise-vault.service",
        "site.toml", "start_vault.sh",
    ]  # fmt: skip
    with pytest.raises(InvalidValueError, match="must be a new or empty folder"):
        write_site(tmp_path / "new")


def test_the_site_file_is_valid_and_names_one_federation(folder: Path) -> None:
    part = load_site(folder / "site.toml").config.vault
    assert part is not None
    [one] = part.federations
    vault, relay = (
        unit(folder / "noisewise-vault.service"),
        unit(folder / "noisewise-relay.service"),
    )
    assert one.account == relay["User"][0]
    assert vault["SupplementaryGroups"] == relay["Group"]
    assert one.socket.startswith(f"/run/{vault['RuntimeDirectory'][0]}/")
    assert one.socket in relay["ExecStart"][0]
    assert vault["User"] != relay["User"]


def test_the_vault_has_no_network_and_a_read_only_system(folder: Path) -> None:
    vault = unit(folder / "noisewise-vault.service")
    expected = {
        "PrivateNetwork": "yes", "RestrictAddressFamilies": "AF_UNIX", "ProtectSystem": "strict",
        "PrivateTmp": "yes", "NoNewPrivileges": "yes", "CapabilityBoundingSet": "",
        "RuntimeDirectoryMode": "0711", "UMask": "0077", "LimitCORE": "0", "ProtectHome": "yes",
        "MemoryMax": "75%", "TasksMax": "512", "ProtectProc": "invisible",
    }  # fmt: skip
    assert {name: vault[name] for name in expected} == {k: [v] for k, v in expected.items()}
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(folder / "noisewise-vault.service")
    assert parser.sections() == ["Unit", "Service", "Install"]


YES = r"(yes|no)"
PATHS = r"(-?/\S+)( -?/\S+)*"
NAME = r"[a-z][a-z0-9-]*"
OPTIONS = {
    "Unit": {"Description": r".+", "After": r"[\w.@ -]+", "Wants": r"[\w.@ -]+"},
    "Install": {"WantedBy": r"[\w-]+\.target"},
    "Service": {
        "ExecStart": r"/\S+ .+", "User": NAME, "Group": NAME, "SupplementaryGroups": NAME,
        "UMask": r"0[0-7]{3}", "RuntimeDirectory": NAME, "RuntimeDirectoryMode": r"0[0-7]{3}",
        "StateDirectory": NAME, "StateDirectoryMode": r"0[0-7]{3}", "WorkingDirectory": r"/\S+",
        "Environment": r"\"?[A-Z_]+=\S+\"?( [A-Z_]+=\S+)*", "Restart": r"(no|on-failure|always)",
        "RestartSec": r"\d+", "TimeoutStopSec": r"\d+", "LimitCORE": r"\d+",
        "MemoryMax": r"\d+%", "TasksMax": r"\d+", "PrivateNetwork": YES,
        "RestrictAddressFamilies": r"AF_UNIX", "IPAddressDeny": r"any",
        "ProtectSystem": r"(yes|full|strict)", "ReadWritePaths": PATHS, "InaccessiblePaths": PATHS,
        "ProtectHome": r"(yes|read-only|tmpfs)", "PrivateTmp": YES, "PrivateDevices": YES,
        "ProtectProc": r"(noaccess|invisible|ptraceable)", "ProtectKernelTunables": YES,
        "ProtectKernelModules": YES, "ProtectKernelLogs": YES, "ProtectControlGroups": YES,
        "ProtectClock": YES, "ProtectHostname": YES, "NoNewPrivileges": YES,
        "CapabilityBoundingSet": r"", "RestrictNamespaces": YES, "RestrictRealtime": YES,
        "RestrictSUIDSGID": YES, "LockPersonality": YES, "SystemCallArchitectures": r"native",
        "SystemCallFilter": r"@system-service",
    },
}  # fmt: skip
"""The options of systemd that the units use, and values that its pages allow: systemd.unit(5),
systemd.exec(5), systemd.service(5), systemd.resource-control(5)."""


def unit_faults(text: str) -> list[str]:
    """Lines of a unit that systemd would ignore or refuse."""
    section, faults = "", []
    for line in text.replace("\\\n", "").splitlines():
        name, equals, value = line.partition("=")
        if line.startswith("[") and line[1:-1] in OPTIONS and line.endswith("]"):
            section = line[1:-1]
        elif line and not line.startswith("#"):
            allowed = OPTIONS.get(section, {}).get(name)
            if not equals or allowed is None or not re.fullmatch(allowed, value):
                faults.append(line)
    return faults


def test_systemd_accepts_the_units(folder: Path) -> None:
    """Every option is one of systemd's, in its section, with a valid value."""
    units = ("noisewise-vault.service", "noisewise-relay.service")
    for name in units:
        assert unit_faults((folder / name).read_text()) == []
    text = (folder / units[0]).read_text()
    for right, wrong in [
        ("MemoryMax=75%", "MemoryMaximum=75%"), ("PrivateTmp=yes", "PrivateTmp=maybe"),
        ("ProtectProc=invisible", "ProtectProc=yes"), ("[Service]", "[Services]"),
        ("LimitCORE=0", "LimitCORE"), ("UMask=0077", "umask=0077"),
    ]:  # fmt: skip
        changed = text.replace(right, wrong)
        assert changed != text
        assert unit_faults(changed), wrong  # power: such a fault is seen


def test_systemd_verifies_the_units_where_it_is_installed(folder: Path) -> None:
    """The programs that the units name are replaced by `true`."""
    program = shutil.which("systemd-analyze")
    for name in ("noisewise-vault.service", "noisewise-relay.service"):
        path = folder / name
        for started in ("noisewise", "flower-supernode"):
            text = path.read_text().replace(f"/opt/noisewise/bin/{started}", "/bin/true")
            path.write_text(text)
        assert "ExecStart=/bin/true " in path.read_text()
    if program is not None:  # the test above checks the same options without systemd
        done = subprocess.run(
            [program, "verify", *map(str, folder.glob("*.service"))],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Unknown" not in done.stderr


def test_the_start_script_is_a_script_and_explains_itself(folder: Path) -> None:
    script = str(folder / "start_vault.sh")
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: sh start_vault.sh SITE_FILE" in done.stderr
