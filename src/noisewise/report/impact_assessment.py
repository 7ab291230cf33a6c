"""An appendix to a data protection impact assessment, filled from a site's file and its ledger.

The headings are those of Article 35(7) of the General Data Protection Regulation. What only the
site can know is left blank and marked. The text describes the processing; it makes no legal claim.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from noisewise.privacy.ledger import Statement
from noisewise.report.html import template_environment
from noisewise.report.ledger_groups import federations, short_time, software_uses
from noisewise.report.ledger_statement import (
    Risks,
    Software,
    epsilon_text,
    percent_up,
    risk_rows,
)
from noisewise.text import printable

__all__ = ["Assessment", "SiteFacts", "assessment_html", "assessment_markdown", "make_assessment"]

BLANK = "To be filled in by the site"


@dataclass(frozen=True)
class SiteFacts:
    """What the site's file says, as text where a file's value can have several forms.

    Attributes:
        declared: declared number of records, or of persons if the budget protects persons.
        source: file or function that the records come from.
        columns: names of the columns that become inputs; empty if the records are arrays.
        target: what the model predicts, the column or array with it.
        features: name of the public feature map; None if there is none.
        model: name of the model.
        batch_size: expected number of records, or persons, in a step.
        sample_rate: share of the records, or persons, that a step reads, on average.
        clip_norm: largest contribution of one record, or person, to a step.
        noise_multiplier: deviation of the noise divided by ``clip_norm``.
        rounds: number of rounds that are ever charged.
        learning_rates: smallest and largest learning rate that a server may ask for.
        releases: number of noised scores that are ever charged; 0 if the site sends none.
        declares: whether servers that ask receive the unit and the budget.
        kept_replies: how many replies the ledger stores; None for all.
        vault: whether the site's file describes a vault.
        max_records: how many records of a person a step uses at most; None for records.
        person: the column or array that says whose record each one is; None for records.
    """

    declared: int
    source: str
    columns: tuple[str, ...]
    target: str
    features: str | None
    model: str
    batch_size: int
    sample_rate: float
    clip_norm: float
    noise_multiplier: float
    rounds: int
    learning_rates: tuple[float, float]
    releases: int
    declares: bool
    kept_replies: int | None
    vault: bool
    max_records: int | None = None
    person: str | None = None


@dataclass(frozen=True)
class Blank:
    """Something that only the site can fill in."""

    what: str


@dataclass(frozen=True)
class Grid:
    """A table of text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = str | Blank | Grid
"""A paragraph, a blank or a table."""


@dataclass(frozen=True)
class Section:
    """A heading with its blocks."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Assessment:
    """The appendix: a title, an introduction and the sections."""

    title: str
    introduction: str
    sections: tuple[Section, ...]

    @property
    def blanks(self) -> int:
        """How many passages the site has to fill in."""
        blocks = [block for section in self.sections for block in section.blocks]
        return sum(isinstance(block, Blank) for block in blocks)


def make_assessment(
    statement: Statement,
    risks: Risks,
    facts: SiteFacts,
    software: Software,
    printed: datetime | None = None,
) -> Assessment:
    """Fill in the appendix.

    Args:
        statement: statement of the ledger.
        risks: of the ledger and the site's plan.
        facts: of the site's file.
        software: that writes the appendix.
        printed: its date; None uses the current time.
    """
    date = short_time((printed or datetime.now(UTC)).astimezone(UTC).isoformat())
    introduction = (
        f"Written on {date} UTC from the site's file and the ledger "
        f"{statement.ledger_id} ({statement.events} events, last hash {statement.head}). Passages "
        f"marked “{BLANK}” are blank. This appendix describes the processing. It is not legal "
        "advice and does not state that a legal requirement is met."
    )
    return Assessment(
        f"Data protection impact assessment, appendix for {statement.dataset_id}",
        introduction,
        (
            _description(statement, facts),
            _necessity(statement, facts),
            _risks(statement, risks),
            _measures(statement, facts, software),
            _approval(),
        ),
    )


def _description(statement: Statement, facts: SiteFacts) -> Section:
    stored = "all" if facts.kept_replies is None else f"the latest {facts.kept_replies:,}"
    entries = statement.entries
    period = "no round so far"
    if entries:
        first, last = short_time(entries[0].reserved_at), short_time(entries[-1].reserved_at)
        period = f"{first} to {last} UTC"
    rounds = sum(entry.purpose == "training" for entry in entries)
    named = "; ".join(use.text for use in federations(entries) if use.name) or "none is named"
    scores = f"at most {facts.releases:,} noised scores" if facts.releases else "no"
    rows = (
        ("dataset", statement.dataset_id),
        (f"{statement.unit}s, as declared in the site's file", f"{facts.declared:,}"),
        ("where the records come from", facts.source),
        ("columns that the model reads", _columns(facts)),
        *(
            (("column that says whose record each one is", f"{facts.person}; it is no input"),)
            if facts.person
            else ()
        ),
        ("what the model predicts", facts.target),
        ("public feature map", facts.features or "none"),
        ("model", facts.model),
        ("rounds so far", f"{rounds:,} of at most {facts.rounds:,}"),
        ("period so far", period),
        ("federations in the ledger", named),
        ("replies that can have left the site", f"at most {statement.sealed:,}"),
        ("score sent to servers", scores),
        ("budget declared to servers that ask", "yes" if facts.declares else "no"),
        ("copies of replies that the site keeps", stored),
    )
    return Section(
        "1. Systematic description of the processing (Article 35(7)(a))",
        (
            "The site trains a model together with other sites. The server sends the model's "
            "current numbers. The site changes them with its own records, adds random noise, and "
            "sends the noised change back. The records do not leave the site.",
            Grid(("what", "value"), rows),
            Blank("purposes of the processing, and the legitimate interest if there is one"),
            Blank("controller, joint controllers and processors; who operates the server"),
            Blank("federations that this dataset takes part in, with their operators"),
            Blank("groups of persons in the dataset, categories of data, special categories"),
            Blank("recipients of the trained model, and how long records and model are kept"),
        ),
    )


def _columns(facts: SiteFacts) -> str:
    """The columns that become inputs, in words if the site's file does not list them."""
    if facts.columns:
        return ", ".join(facts.columns)
    if not facts.source.endswith(".csv"):
        return "arrays without column names"
    others = " and ".join(name for name in (facts.target, facts.person) if name)
    return f"all columns of {facts.source} except {others}"


def _necessity(statement: Statement, facts: SiteFacts) -> Section:
    return Section(
        "2. Necessity and proportionality (Article 35(7)(b))",
        (
            "What limits the processing to what the purpose needs:",
            Grid(
                ("limit", "value"),
                (
                    ("records sent to others", "none"),
                    (f"share of the {statement.unit}s that one step reads",
                     f"{100 * facts.sample_rate:.3g} % on average "
                     f"({facts.batch_size:,} {statement.unit}s)"),
                    *_most_records(facts),
                    ("total privacy loss, over all rounds and federations",
                     f"epsilon {statement.epsilon:g} at delta {statement.delta:g}, for each single "
                     f"{statement.unit}; it cannot be raised later"),
                    ("spent so far", f"epsilon {epsilon_text(statement.spent, 4, up=True)}"),
                    ("what a server can ask for", "a round of this model, with a learning rate "
                     f"from {facts.learning_rates[0]:g} to {facts.learning_rates[1]:g}"),
                ),
            ),
            Blank("why the purpose needs these records, and why less data or less detail, "
                  "synthetic data or training at one site alone would not do"),
            Blank("legal basis; how the persons are informed; how they can object, and have "
                  "records corrected or erased (an erased record takes no part in later rounds; "
                  "earlier replies cannot be taken back)"),
        ),
    )  # fmt: skip


def _most_records(facts: SiteFacts) -> tuple[tuple[str, str], ...]:
    if facts.max_records is None:
        return ()
    return (("records of one person that a step uses", f"at most {facts.max_records:,}"),)


def _risks(statement: Statement, risks: Risks) -> Section:
    unit = statement.unit
    plan = (
        "all rounds that the site's file permits"
        if risks.whole.source == "steps"
        else "the worst case for epsilon and delta"
    )
    advantages = percent_up(risks.spent.advantage), percent_up(risks.whole.advantage)
    bounds = (
        *risk_rows(risks),
        ("largest difference of the two shares (advantage)", "0 %", *advantages),
    )
    other = [
        ("The content of a record is inferred", "The same bounds apply: whoever learns from the "
         "replies what one record contains can also tell that it was used."),
        ("A person is at several sites, or in several datasets", "Not bounded by this ledger: the "
         "budgets of all of them are spent."),
        ("The server sends code that reads the records", "Not bounded by the ledger. It depends on "
         "the account under which such code runs; see section 4."),
        ("The disk or machine is set back to an earlier state", "Spending since then is unknown "
         "and not counted; see section 4."),
        ("The model says something about a whole group", "Not bounded: it would be learned without "
         "any single person's record too."),
        ("Reply times reveal something", "Not bounded by the ledger."),
    ]  # fmt: skip
    if unit == "record":
        several = "The budget protects single records. For a person with k records, k times the "
        other.insert(1, ("A person has several records", several + "epsilon is spent."))
    return Section(
        "3. Risks to the rights and freedoms of the persons (Article 35(7)(c))",
        (
            f"Somebody finds out that a certain {unit} was in the dataset. The table shows the "
            f"largest share of the {unit}s in the dataset that any attacker can name, for a given "
            "share of false alarms. The attacker sees everything that left the site, knows all "
            f"other {unit}s and has unlimited computing power. All figures are upper bounds, "
            f"rounded up. Whole budget: {plan}.",
            Grid(("false alarms", "by guessing", "spent so far", "whole budget"), bounds),
            Grid(("other risk", "what bounds it"), tuple(other)),
            Blank("how severe each risk is for the persons, how likely it is, and whether the "
                  "figures above are acceptable for these data"),
        ),
    )  # fmt: skip


def _measures(statement: Statement, facts: SiteFacts, software: Software) -> Section:
    rows = (
        ("random noise in every step", f"deviation {facts.noise_multiplier:.4g} times the largest "
         f"contribution of one {statement.unit}; from the operating system's secure generator"),
        ("limited contribution", f"no {statement.unit} changes a step by more than "
         f"{facts.clip_norm:g} (clipping norm)"),
        ("ledger", "charges every round before training starts, and refuses a round that does not "
         "fit into the budget"),
        ("vault", "the site's file describes one: a service under its own account alone reads "
         "records and ledger" if facts.vault else "the site's file describes none"),
        ("number of rounds", f"at most {facts.rounds:,} are ever charged"),
        ("refusals", "the server receives no reason; the site keeps it"),
        ("history", "each entry is hashed with the previous one; changes and old copies of the "
         "ledger file are detected"),
        ("software that ran", "; ".join(use.text for use in software_uses(statement.entries))
         or "none yet"),
        ("software today", f"noisewise {software.version}; SHA-256 of the "
         f"{software.core_files} files that decide what leaves the site: {software.core_sha256}"),
    )  # fmt: skip
    return Section(
        "4. Measures (Article 35(7)(d))",
        (
            Grid(("measure", "how"), rows),
            Blank("account under which the client runs, which code of the server it accepts, and "
                  "who can read the records, the ledger and the site's file"),
            Blank("encryption and authentication of the connection to the server"),
            Blank("who reads the ledger's statement, how often, and where the last hash is kept"),
            Blank("what is done after a disk or machine was restored (treat the whole budget as "
                  "spent if spending since the backup is unknown)"),
            Blank("who reviewed the software with the hashes above, and when"),
        ),
    )  # fmt: skip


def _approval() -> Section:
    return Section(
        "5. Consultation and approval",
        (
            Blank("advice of the data protection officer"),
            Blank("views of the persons concerned or their representatives, where appropriate"),
            Blank("decision, date of the next review, name and signature"),
        ),
    )


def assessment_html(assessment: Assessment) -> str:
    """Return the appendix as an HTML page that loads no other file."""
    template = template_environment().get_template("impact_assessment.html")
    return template.render(a=assessment, blank=BLANK)


def assessment_markdown(assessment: Assessment) -> str:
    """Return the appendix as Markdown, with all special characters of names escaped."""
    lines = [f"# {_escaped(assessment.title)}", "", _escaped(assessment.introduction)]
    for section in assessment.sections:
        lines += ["", f"## {_escaped(section.title)}"]
        for block in section.blocks:
            lines += ["", *_markdown(block)]
    return "\n".join(lines) + "\n"


def _markdown(block: Block) -> list[str]:
    if isinstance(block, str):
        return [_escaped(block)]
    if isinstance(block, Blank):
        return [f"> **{BLANK}:** {_escaped(block.what)}", ">", "> ..."]
    rows = [block.headings, tuple("---" for _ in block.headings), *map(_cells, block.rows)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _cells(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(_escaped(cell) for cell in row)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#&~])", r"\\\1", printable(text))
