"""`noisewise ledger export | assessment | keygen | software`: documents for a privacy officer."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import AsJson, say
from noisewise.cli.ledger_commands import LedgerFile, SiteFile, ledger_app, site_of
from noisewise.errors import InvalidValueError

if TYPE_CHECKING:
    from noisewise.privacy.ledger import Statement
    from noisewise.report.impact_assessment import SiteFacts
    from noisewise.report.ledger_statement import Software
    from noisewise.site.site_file import Site


class Format(StrEnum):
    """Formats of a document."""

    CSV = "csv"
    JSON = "json"
    HTML = "html"


@ledger_app.command("export")
def ledger_export_command(
    ledger: LedgerFile,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output file. Default: print to the terminal."),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Format. Default: the suffix of the output file."),
    ] = None,
    site: SiteFile = None,
    key: Annotated[
        Path | None, typer.Option("--sign", help="The site's private key: also write FILE.sig.")
    ] = None,
) -> None:
    """Write a statement as HTML or JSON, or all entries as CSV.

    Examples:
      noisewise ledger export ward7.ledger --output statement.html
      noisewise ledger export ward7.ledger --output statement.html --site site.toml
      noisewise ledger export ward7.ledger --output statement.html --sign site.key
      noisewise ledger export ward7.ledger --format csv
    """
    from noisewise.privacy.ledger import Ledger
    from noisewise.report.ledger_statement import (
        ledger_risks,
        statement_csv,
        statement_html,
        statement_json,
    )
    from noisewise.storage import write_atomic

    chosen = form or _format_of(output)
    if key is not None and output is None:
        raise InvalidValueError("--output", None, "must be given with --sign")
    with Ledger.inspect(ledger) as book:
        statement = book.statement()
    if chosen == Format.CSV:
        text = statement_csv(statement)
    else:
        planned = None if site is None else site_of(site, statement).planned_steps
        risks, software = ledger_risks(statement, planned), _software()
        if chosen == Format.JSON:
            text = statement_json(statement, risks, software)
        else:
            text = statement_html(statement, risks, software, signed=key is not None)
    if output is None:
        say(text, nl=False)
        return
    content = text.encode()
    signature = None if key is None else _signature(key, content, statement)
    write_atomic(output, content)
    say(f"{output}")
    if signature is not None:
        beside = output.with_name(output.name + ".sig")
        write_atomic(beside, signature)
        say(f"{beside}")


def _signature(key: Path, content: bytes, statement: Statement) -> bytes:
    from noisewise.privacy.ledger.signature import sign

    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return sign(key, content, statement, now)


@ledger_app.command("keygen")
def ledger_keygen_command(
    key: Annotated[Path, typer.Argument(help="File of the new private key.")],
) -> None:
    """Create a key with which the site signs its statements, and KEY.pub for those who check them.

    Only the owner can read the private key. Keep it at the site, and give the public key to others
    in person or on a channel that they trust.

    Example:
      noisewise ledger keygen site.key
    """
    from noisewise.privacy.ledger.signature import make_keys

    public = make_keys(key)
    say(f"{key}: private key; keep it at the site")
    say(f"{public}: public key; give it to those who check statements")


@ledger_app.command("assessment")
def ledger_assessment_command(
    ledger: LedgerFile,
    site: Annotated[Path, typer.Option("--site", help="The site's file.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A file that ends in .md or .html.")
    ],
) -> None:
    """Write an appendix to a data protection impact assessment, filled from ledger and site file.

    The headings are those of GDPR Article 35(7). What only the site can know is marked as blank.

    Example:
      noisewise ledger assessment ward7.ledger --site site.toml --output assessment.html
    """
    from noisewise.privacy.ledger import Ledger
    from noisewise.report.impact_assessment import (
        assessment_html,
        assessment_markdown,
        make_assessment,
    )
    from noisewise.report.ledger_statement import ledger_risks
    from noisewise.storage import write_atomic

    if output.suffix not in (".md", ".html"):
        raise InvalidValueError("--output", str(output), "must end in .md or .html")
    with Ledger.inspect(ledger) as book:
        statement = book.statement()
    own = site_of(site, statement)
    risks = ledger_risks(statement, own.planned_steps)
    filled = make_assessment(statement, risks, _facts(own), _software())
    text = (assessment_html if output.suffix == ".html" else assessment_markdown)(filled)
    write_atomic(output, text.encode())
    say(f"{output}: {filled.blanks} passages are left for the site to fill in")


def _facts(site: Site) -> SiteFacts:
    """What the assessment needs of a site's file."""
    from noisewise.report.impact_assessment import SiteFacts

    config, plan = site.config, site.plan
    return SiteFacts(
        declared=config.declared_units,
        source=config.data.function or config.data.file or "",
        columns=tuple(
            name for name, spec in (config.columns or {}).items() if spec.get("type") != "drop"
        ),
        target=config.data.target,
        features=None if config.features is None else config.features.name,
        model=config.model.name,
        batch_size=plan.expected_batch,
        sample_rate=plan.sample_rate,
        clip_norm=config.training.clip_norm,
        noise_multiplier=plan.noise_multiplier,
        rounds=site.rounds_allowed,
        learning_rates=(config.limits.learning_rate[0], config.limits.learning_rate[1]),
        releases=0 if config.metrics is None else config.metrics.releases,
        declares=config.declaration is not None and config.declaration.publish,
        kept_replies=config.ledger.keep_replies,
        vault=config.vault is not None,
        max_records=plan.max_records,
        person=config.data.person,
    )


@ledger_app.command("software")
def ledger_software_command(as_json: AsJson = False) -> None:
    """Print the version of the software and the hash of the files that decide what leaves a site.

    Statements show the same hash. The same files have the same hash on every machine.

    Example:
      noisewise ledger software
    """
    software = _software()
    if as_json:
        say(json.dumps(asdict(software)))
        return
    say(f"noisewise {software.version}\ntrusted core  {software.core_files} files")
    say(f"sha256        {software.core_sha256}")


def _software() -> Software:
    from noisewise import __version__
    from noisewise.report.ledger_statement import Software
    from noisewise.site.core_files import core_files, core_hash

    return Software(__version__, core_hash(), len(core_files()))


def _format_of(output: Path | None) -> Format:
    """The format that the name of a file ends in."""
    ending = output.suffix.lstrip(".").lower() if output is not None else ""
    if ending in tuple(Format):
        return Format(ending)
    where, value = ("--format", None) if output is None else ("--output", str(output))
    allowed = "give --format csv, json or html, or a file name that ends in one of them"
    raise InvalidValueError(where, value, allowed)
