"""The appendix to a data protection impact assessment: filled in, blanks marked, names escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from command import Noisewise
from ledger_cases import play, reopen
from site_cases import METRICS, make_site

from noisewise.privacy import PrivacyBudget
from noisewise.privacy.ledger import Ledger
from noisewise.report.impact_assessment import (
    BLANK,
    SiteFacts,
    assessment_html,
    assessment_markdown,
    make_assessment,
)
from noisewise.report.ledger_statement import Software, ledger_risks, risk_rows

FACTS = SiteFacts(
    declared=2400, source="records.csv", columns=("age", "blood_pressure"), target="disease",
    features=None, model="softmax", batch_size=32, sample_rate=32 / 2400, clip_norm=1.5,
    noise_multiplier=2.7, rounds=100, learning_rates=(0.01, 1.0), releases=10, declares=False,
    kept_replies=20, vault=True,
)  # fmt: skip
SOFTWARE = Software("1.2.3", "ab" * 32, 81)


def both(path: Path) -> dict[str, str]:
    with Ledger.inspect(path) as ledger:
        statement = ledger.statement()
    filled = make_assessment(statement, ledger_risks(statement), FACTS, SOFTWARE)
    return {"md": assessment_markdown(filled), "html": assessment_html(filled)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Ledger.create(tmp_path / "l", PrivacyBudget(2.0, 1e-6), "ward 7")
    with reopen(tmp_path / "l", dataset_id="ward 7", budget=PrivacyBudget(2.0, 1e-6)) as ledger:
        play(ledger, 4)
    return tmp_path / "l"


@pytest.mark.parametrize("form", ["md", "html"])
def test_all_headings_facts_and_blanks_are_there(path: Path, form: str) -> None:
    text = both(path)[form].replace("\\", "")
    for part in "abcd":
        assert f"Article 35(7)({part})" in text
    for fact in ("2,400", "records.csv", "blood_pressure", "disease", "4 of at most 100", "1.33 %",
                 "epsilon 2 at delta 1e-06", "the latest 20", "at most 10 noised scores",
                 "deviation 2.7", "0.01 to 1", "ab" * 32, "A person has several records",
                 "for each single record", "a service under its own account"):  # fmt: skip
        assert fact in text, fact
    with Ledger.inspect(path) as ledger:
        statement = ledger.statement()
    for cell in [cell for row in risk_rows(ledger_risks(statement)) for cell in row]:
        assert cell in text
    assert statement.head in text
    assert text.count(f"{BLANK}:") == 16
    assert not re.search(r"complian|GDPR-safe|anonym|lawful|guarantee", text)  # no legal claims


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = "<script>x</script> | [a](b) `c` **d** # \u202e"
    budget = PrivacyBudget(2.0, 1e-6)
    Ledger.create(tmp_path / "l", budget, name.replace("\u202e", "e"))
    page = both(tmp_path / "l")
    assert "<script" not in page["html"]
    assert "&lt;script&gt;" in page["html"]
    row = next(line for line in page["md"].splitlines() if line.startswith("| dataset"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    assert "\\<script\\>" in row
    assert not re.search(r"(?<!\\)[`*<\[]", row)


def test_the_command_fills_in_the_sites_file(tmp_path: Path, noisewise: Noisewise) -> None:
    site = make_site(tmp_path)
    command = ("ledger", "assessment", tmp_path / "site.ledger", "--site", site, "--output")
    code, out, _ = noisewise(*command, tmp_path / "a.md")
    assert (code, "16 passages are left" in out) == (0, True)
    text = (tmp_path / "a.md").read_text()
    assert "all rounds that the site's file permits" in text
    assert "| score sent to servers | no |" in text
    site.write_text(site.read_text() + METRICS.format(noise=5.0, records=100, releases=7))
    assert noisewise(*command, tmp_path / "a.html")[0] == 0
    assert "at most 7 noised scores" in (tmp_path / "a.html").read_text()
    code, _, err = noisewise(*command, tmp_path / "a.pdf")
    assert (code, "must end in .md or .html" in err) == (2, True)


@pytest.mark.parametrize("person", [None, "patient"])
def test_columns_of_a_table_are_named_though_the_file_does_not_list_them(
    path: Path, person: str | None
) -> None:
    with Ledger.inspect(path) as ledger:
        statement = ledger.statement()
    risks = ledger_risks(statement)
    facts = replace(FACTS, columns=(), person=person)
    text = assessment_markdown(make_assessment(statement, risks, facts, SOFTWARE))
    text = text.replace("\\", "")
    others = "disease" if person is None else "disease and patient"
    assert f"| all columns of records.csv except {others} |" in text
    assert ("| patient; it is no input |" in text) == (person is not None)
    arrays = replace(facts, source="records.npz")
    text = assessment_markdown(make_assessment(statement, risks, arrays, SOFTWARE))
    assert "| arrays without column names |" in text


def test_a_person_as_the_unit_has_no_line_about_several_records(path: Path) -> None:
    with Ledger.inspect(path) as ledger:
        statement = replace(ledger.statement(), unit="person")
    filled = make_assessment(statement, ledger_risks(statement), FACTS, SOFTWARE)
    text = assessment_markdown(filled)
    assert "A person has several records" not in text
    assert "for each single person" in text
