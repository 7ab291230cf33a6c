"""`noisewise ledger`: a site's promised and spent privacy budget."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import SITE, AsJson, Protected, app, say, warn
from noisewise.errors import InvalidValueError, LedgerError

if TYPE_CHECKING:
    from noisewise.privacy.ledger import Statement
    from noisewise.privacy.ledger.signature import Signed
    from noisewise.site.site_file import Site

ledger_app = typer.Typer(
    help="Create, show, verify and export the privacy ledger of a site.", no_args_is_help=True
)
app.add_typer(ledger_app, name="ledger", rich_help_panel=SITE)

_UNKNOWN_HEAD = 3

LedgerFile = Annotated[Path, typer.Argument(help="File of the ledger of one dataset.")]
SiteFile = Annotated[
    Path | None,
    typer.Option("--site", help="The site's file: the risk of the whole budget is then exact."),
]


@ledger_app.command("init")
def ledger_init_command(
    ledger: LedgerFile,
    dataset: Annotated[str, typer.Option(help="Name or fingerprint of the dataset.")],
    epsilon: Annotated[
        float,
        typer.Option(help="Epsilon that is promised to each record (or person); it is fixed."),
    ],
    delta: Annotated[
        float,
        typer.Option(help="Delta of the promise; must be far below 1 / records (or persons)."),
    ],
    accountant: Annotated[str, typer.Option(help="One of pld, rdp, moments.")] = "pld",
    unit: Annotated[
        Protected,
        typer.Option(help="What the budget protects: a record, or a person with all records."),
    ] = Protected.RECORD,
    records: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Declared number of records (or persons), to check delta; it is not stored.",
        ),
    ] = None,
) -> None:
    """Create an empty ledger, once for each dataset. An existing ledger is never replaced.

    Examples:
      noisewise ledger init ward7.ledger --dataset ward-7-2026 --epsilon 2 --delta 1e-6
      noisewise ledger init ward8.ledger --dataset ward-8 --epsilon 2 --delta 1e-6 --unit person
    """
    from noisewise.privacy.budget import PrivacyBudget, budget_warnings
    from noisewise.privacy.ledger import Ledger

    budget = PrivacyBudget(epsilon, delta)
    Ledger.create(ledger, budget, dataset, accountant, unit=unit.value)
    warn(budget_warnings(budget, records, unit.value))
    say(
        f"{ledger}: epsilon {epsilon:g} at delta {delta:g} for each {unit.value} of '{dataset}'. "
        f"Keep {ledger.name} and {ledger.name}-witness together, on a local disk."
    )


@ledger_app.command("show")
def ledger_show_command(
    ledger: LedgerFile,
    last: Annotated[int, typer.Option(min=0, metavar="N", help="How many entries to show.")] = 20,
    site: SiteFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what was promised, spent and left, for which federations, and what it means as risk.

    Examples:
      noisewise ledger show ward7.ledger
      noisewise ledger show ward7.ledger --site site.toml
    """
    from noisewise.privacy.ledger import Ledger
    from noisewise.report.ledger_statement import ledger_risks, statement_json, statement_text

    with Ledger.inspect(ledger) as book:
        statement = book.statement()
    planned = None if site is None else site_of(site, statement).planned_steps
    risks = ledger_risks(statement, planned)
    if as_json:
        say(statement_json(statement, risks), nl=False)
    else:
        say(statement_text(statement, last, risks))


def site_of(file: Path, statement: Statement) -> Site:
    """Read the site's file that belongs to a ledger."""
    from noisewise.site.site_file import load_site

    site = load_site(file)
    named = (site.config.ledger.dataset, site.budget.epsilon, site.budget.delta, site.plan.unit)
    if named != (statement.dataset_id, statement.epsilon, statement.delta, statement.unit):
        allowed = (
            f"must be the file of this ledger: dataset '{statement.dataset_id}', epsilon "
            f"{statement.epsilon:g}, delta {statement.delta:g}, unit {statement.unit}"
        )
        raise InvalidValueError("--site", str(file), allowed)
    return site


@ledger_app.command("verify")
def ledger_verify_command(
    ledger: Annotated[
        Path | None,
        typer.Argument(help="File of the ledger; not required with --signature."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="A hash that was noted earlier (16 digits or more); must be in the ledger."
        ),
    ] = None,
    events: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="The number of events that was noted with the hash."),
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(help="Signature of a statement: STATEMENT.sig.")
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(help="The site's public key, received from the site itself.")
    ] = None,
    statement: Annotated[
        Path | None, typer.Option(help="The signed statement. Default: --signature without .sig.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every page, hash, stored reply and the spent budget; or a signed statement.

    With --signature, the statement, its signature and the signed last hash are checked. With a
    ledger too, that hash must be in the ledger.

    Exit code 0: valid. 1: not valid. 2: an option is invalid. 3: the ledger is valid and does not
    contain the hash of --head.

    Examples:
      noisewise ledger verify ward7.ledger
      noisewise ledger verify ward7.ledger --head 1b605e71ab0318da --events 91
      noisewise ledger verify --signature statement.html.sig --public-key site.key.pub
    """
    from noisewise.privacy.ledger import verify_ledger

    answer: dict[str, object] = {}
    if signature is not None:
        if (head, events) != (None, None):
            allowed = "must be left out with --signature, which contains them"
            raise InvalidValueError("--head", head or events, allowed)
        signed = _signed(signature, public_key, statement, as_json)
        head, events, answer = signed.head, signed.events, {"signed": asdict(signed)}
        if ledger is None:
            say(json.dumps({"ok": True, **answer}) if as_json else "the ledger was not checked")
            return
    elif public_key is not None or statement is not None:
        raise InvalidValueError("--signature", None, "must be given with --public-key, --statement")
    if ledger is None:
        raise InvalidValueError("LEDGER", None, "must be given, or --signature")
    outcome = verify_ledger(ledger, head, events=events)
    unknown = not outcome.ok and not outcome.problems
    if as_json:
        answer |= {"ok": outcome.ok, "events": outcome.events, "head": outcome.head}
        answer |= {"problems": list(outcome.problems)}
        say(json.dumps({**answer, "noted": outcome.noted, "remark": outcome.remark}))
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


def _signed(file: Path, key: Path | None, statement: Path | None, as_json: bool) -> Signed:
    """Check a signed statement; the command ends with exit code 1 if it is not valid."""
    from noisewise.privacy.ledger.signature import check_signature, read_public_key

    if key is None:
        raise InvalidValueError("--public-key", None, "must be given with --signature")
    public = read_public_key(key)
    if statement is None and file.suffix != ".sig":
        allowed = "must end in .sig; otherwise name the statement with --statement"
        raise InvalidValueError("--signature", str(file), allowed)
    statement = statement or file.with_suffix("")
    try:
        signed = check_signature(file.read_bytes(), public, statement.read_bytes())
    except OSError as error:
        allowed = f"cannot be read ({error.strerror})"
        raise InvalidValueError("--signature", str(error.filename), allowed) from error
    except LedgerError as error:
        answer = json.dumps({"ok": False, "problems": [str(error)]})
        say(answer if as_json else f"NOT VALID: {error}")
        raise typer.Exit(1) from error
    if not as_json:
        say(f"valid signature: {statement} is unchanged since {signed.signed_at}")
        say(f"signed at event {signed.events} of ledger {signed.ledger_id}")
    return signed


@ledger_app.command("why")
def ledger_why_command(
    ledger: Annotated[
        Path,
        typer.Argument(help="File of the ledger, or the site's file if the ledger cannot be read."),
    ],
    last: Annotated[
        int, typer.Option(min=1, max=50, metavar="N", help="How many refusals to show.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Show why the site did not take part: its last refusals, the newest first.

    The command also works if the ledger is missing or corrupt.

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
        say(f"no refusal is recorded for {ledger}")
    for refusal in refusals:
        round_text = "" if refusal.round is None else f"  round {refusal.round}"
        say(f"{refusal.time}{round_text}  {refusal.reason}\n  remedy: {refusal.remedy}")
