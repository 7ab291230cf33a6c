"""`write_site`: write the files of a site with a vault into a new folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template

from noisewise.errors import InvalidValueError
from noisewise.flower.new_app import AppSettings
from noisewise.storage import write_atomic

__all__ = ["write_site"]

_FILES = (
    "noisewise-vault.service",
    "noisewise-relay.service",
    "start_vault.sh",
    "Containerfile",
    "README.md",
)


def write_site(folder: Path, settings: AppSettings | None = None) -> tuple[Path, ...]:
    """Write a site's file with a vault, service units, a start script, a container file, a README.

    Args:
        folder: new or empty.
        settings: of the federation, for the model in the site's file; by default the demo's.

    Returns:
        The files.

    Raises:
        InvalidValueError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidValueError("DIR", str(folder), "must be a new or empty folder")
    package = resources.files("noisewise.flower")
    site = Template((package / "template" / "site.toml.txt").read_text())
    text = site.substitute((settings or AppSettings()).fields())
    text += (package / "site_template" / "vault.toml.txt").read_text()
    write_atomic(folder / "site.toml", text.encode())
    for name in _FILES:
        content = (package / "site_template" / f"{name}.txt").read_bytes()
        write_atomic(folder / name, content)
    return (folder / "site.toml", *(folder / name for name in _FILES))
