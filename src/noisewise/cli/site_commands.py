"""`noisewise site`: set up, check and run the vault of a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import SITE, AsJson, app, say
from noisewise.storage import to_json

site_app = typer.Typer(
    help="The vault of a site: a service whose account is the only one that reads the records.",
    no_args_is_help=True,
)
app.add_typer(site_app, name="site", rich_help_panel=SITE)

SiteFile = Annotated[Path, typer.Argument(metavar="SITE", help="The site's own file, site.toml.")]


@site_app.command("new")
def site_new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a site's file with a vault, service units, a start script, a container file, a README.

    Example:
      noisewise site new my-site
    """
    from noisewise.flower.new_site import write_site

    for path in write_site(folder):
        say(f"{path}")
    say(f"Read {folder / 'README.md'} next.")


@site_app.command("doctor")
def site_doctor_command(site: SiteFile) -> None:
    """Check what separates the vault from its relays, with a remedy for each fault.

    Run it under the vault's account. Nothing is charged and no record is read. Exit code 1 if a
    check fails; a warning (WARN) does not keep the vault from starting.

    Example:
      noisewise site doctor site.toml
    """
    from noisewise.site.serve_site import load_vault_site
    from noisewise.site.vault_checks import code_findings, vault_findings

    findings = code_findings(site)
    if not any(one.fault for one in findings):  # otherwise the file's code must not run
        findings = vault_findings(load_vault_site(site)[0], site)
    for one in findings:
        word, reason = ("FAIL", one.fault) if one.fault else ("WARN", one.warning)
        say(f"{word}  {one.subject}: {reason}" if reason else f"ok    {one.subject}")
        if reason:
            say(f"      remedy: {one.remedy}")
    faults = sum(bool(one.fault) for one in findings)
    warnings = sum(bool(one.warning) for one in findings)
    say(
        f"{len(findings)} checks, {faults} failed, {warnings} with a warning."
        + " The vault does not start." * bool(faults)
    )
    if faults:
        raise typer.Exit(1)


@site_app.command("serve")
def site_serve_command(site: SiteFile) -> None:
    """Run the vault until SIGTERM or Ctrl-C. It refuses to start if a check of `doctor` fails.

    A changed site file or record file takes effect after a restart.

    Example:
      noisewise --verbose site serve site.toml
    """
    from noisewise.site.serve_site import serve_site

    serve_site(site)


@site_app.command("status")
def site_status_command(
    socket: Annotated[Path, typer.Argument(metavar="SOCKET", help="The vault's socket.")],
    as_json: AsJson = False,
) -> None:
    """Print the status of a running vault. Use the relay's account.

    The vault's reply contains nothing about records.

    Example:
      noisewise site status /run/noisewise-vault/ward.sock
    """
    from noisewise.flower.relay import vault_status

    status = vault_status(socket)
    if as_json:
        say(to_json(status))
        return
    for name, value in status.items():
        say(f"{name}: {value}")
