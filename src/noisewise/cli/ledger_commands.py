"""`noisewise ledger`: what a site has promised its records, and what is spent of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from noisewise.cli.common import AsJson, app, say, warn
from noisewise.errors import InvalidValueError

ledger_app = typer.Typer(
    help="A site's privacy ledger: make it, read it, check it, print it.", no_args_is_help=True
)
app.add_typer(ledger_app, name="ledger")

_UNKNOWN_HEAD = 3

LedgerFile = Annotated[Path, typer.Argument(help="The ledger of one dataset, a file.")]


class Format(StrEnum):
    """Formats of an export."""

    CSV = "csv"
    JSON = "json"
    HTML = "html"


@ledger_app.command("init")
def ledger_init_command(
    ledger: LedgerFile,
    dataset: Annotated[str, typer.Option(help="Name or fingerprint of the dataset.")],
    epsilon: Annotated[float, typer.Option(help="Promised to each record, for good.")],
    delta: Annotated[float, typer.Option(help="delta of the promise, far below 1 / records.")],
    accountant: Annotated[str, typer.Option(help="One of pld, rdp, moments.")] = "pld",
    records: Annotated[
        int | None, typer.Option(min=1, help="Declared number of records: checks delta; not kept.")
    ] = None,
) -> None:
    """Make an empty ledger, once for each dataset. None is ever replaced.

    Example:
      noisewise ledger init ward7.ledger --dataset ward-7-2026 --epsilon 2 --delta 1e-6
    """
    from noisewise.privacy.budget import PrivacyBudget, budget_warnings
    from noisewise.privacy.ledger import Ledger

    budget = PrivacyBudget(epsilon, delta)
    Ledger.create(ledger, budget, dataset, accountant)
    warn(budget_warnings(budget, records))
    say(
        f"{ledger}: epsilon {epsilon:g} at delta {delta:g} for each record of '{dataset}'. Keep "
        f"{ledger.name} and {ledger.name}-witness together, on a local disk."
    )


@ledger_app.command("show")
def ledger_show_command(
    ledger: LedgerFile,
    last: Annotated[int, typer.Option(min=0, help="How many entries to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show what was promised, what is spent and what is left.

    Example:
      noisewise ledger show ward7.ledger
    """
    from noisewise.privacy.ledger import Ledger
    from noisewise.report.ledger_statement import statement_json, statement_text

    with Ledger.inspect(ledger) as book:
        statement = book.statement()
    say(statement_json(statement) if as_json else statement_text(statement, last), nl=not as_json)


@ledger_app.command("verify")
def ledger_verify_command(
    ledger: LedgerFile,
    head: Annotated[
        str | None,
        typer.Option(help="A last hash noted earlier, 16 digits or more: is it still there?"),
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=0, help="The number of events noted beside --head.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every page, hash, stored reply and the spent budget.

    Exit code 0: valid. 1: not valid. 2: an option is invalid. 3: the ledger is valid and does not
    contain the hash of --head.

    Examples:
      noisewise ledger verify ward7.ledger
      noisewise ledger verify ward7.ledger --head 1b605e71ab0318da --events 91
    """
    from noisewise.privacy.ledger import verify_ledger

    outcome = verify_ledger(ledger, head, events=events)
    unknown = not outcome.ok and not outcome.problems
    if as_json:
        answer = {"ok": outcome.ok, "events": outcome.events, "head": outcome.head}
        noted = {"noted": outcome.noted, "remark": outcome.remark}
        say(json.dumps({**answer, "problems": list(outcome.problems), **noted}))
    elif outcome.problems:
        say("NOT VALID; clients refuse to use this ledger:")
        for problem in outcome.problems:
            say(f"  {problem}")
    else:
        say(f"valid: {outcome.events} events, last hash {outcome.head}")
    if not as_json and outcome.remark and outcome.noted in ("found", "unknown"):
        say(f"{'UNKNOWN HEAD: ' if unknown else ''}{outcome.remark}")
    if not outcome.ok:
        raise typer.Exit(_UNKNOWN_HEAD if unknown else 1)


@ledger_app.command("why")
def ledger_why_command(
    ledger: Annotated[
        Path, typer.Argument(help="The ledger; the site's file if that could not be read.")
    ],
    last: Annotated[int, typer.Option(min=1, max=50, help="How many refusals to show.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show why the site did not take part: its last refusals, the newest first.

    It works when the ledger is missing or corrupt.

    Examples:
      noisewise ledger why ward7.ledger
      noisewise ledger why ward7.ledger --last 10
    """
    from noisewise.privacy.ledger import read_refusals

    refusals = read_refusals(ledger, last)
    if as_json:
        say(json.dumps([asdict(refusal) for refusal in refusals], indent=1))
        return
    if not refusals:
        say(f"no refusal is noted for {ledger}")
    for refusal in refusals:
        asked = "" if refusal.round is None else f"  round {refusal.round}"
        say(f"{refusal.time}{asked}  {refusal.reason}\n  remedy: {refusal.remedy}")


@ledger_app.command("export")
def ledger_export_command(
    ledger: LedgerFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file; else it is printed.")
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Default: what the file's name ends in.")
    ] = None,
) -> None:
    """Write all entries as CSV or JSON, or a one-page statement as HTML.

    Examples:
      noisewise ledger export ward7.ledger --output statement.html
      noisewise ledger export ward7.ledger --format csv
    """
    from noisewise.privacy.ledger import Ledger
    from noisewise.report.ledger_statement import statement_csv, statement_html, statement_json
    from noisewise.storage import write_atomic

    ending = output.suffix.lstrip(".").lower() if output is not None else ""
    if form is None and ending not in tuple(Format):
        where = "--format" if output is None else "--output"
        value = None if output is None else str(output)
        allowed = "give --format csv, json or html, or a file name that ends in one of them"
        raise InvalidValueError(where, value, allowed)
    write = {Format.CSV: statement_csv, Format.JSON: statement_json, Format.HTML: statement_html}
    with Ledger.inspect(ledger) as book:
        text = write[form or Format(ending)](book.statement())
    if output is None:
        say(text, nl=False)
        return
    write_atomic(output, text.encode())
    say(f"{output}")
