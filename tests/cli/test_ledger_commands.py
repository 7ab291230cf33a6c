"""`noisewise ledger` and `noisewise audit`: output, files and errors."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command import Noisewise
from site_cases import make_site

from noisewise.errors import BudgetSpentError, InvalidValueError
from noisewise.privacy import PrivacyBudget, epsilon_of
from noisewise.privacy.attack_risk import risk_of_steps
from noisewise.privacy.ledger import (
    Charge,
    Ledger,
    Reservation,
    instruction_hash,
    metrics_charge,
    note_refusal,
)
from noisewise.report.ledger_groups import federations, kinds, software_uses
from noisewise.report.ledger_statement import (
    epsilon_text,
    ledger_risks,
    percent_up,
    risk_rows,
    statement_html,
    statement_text,
)
from noisewise.site.site_file import load_site

DATASET = "Ward <7> & co"
BUDGET = PrivacyBudget(2.0, 1e-6)
CHARGE = Charge("training", 0.02, 3.0, 50)


@pytest.fixture
def path(tmp_path: Path, noisewise: Noisewise) -> Path:
    """A ledger made on the command line, with five rounds and one release of metrics."""
    made = tmp_path / "ward7.ledger"
    code, out, _ = noisewise(
        "ledger", "init", made, "--dataset", DATASET, "--epsilon", 2, "--delta", 1e-6
    )
    assert code == 0
    assert "witness" in out
    with Ledger.open(made, dataset_id=DATASET, budget=BUDGET) as ledger:
        for number in range(6):
            cost = metrics_charge(60.0) if number == 5 else CHARGE
            granted = ledger.reserve(instruction_hash(bytes([number])), cost)
            assert isinstance(granted, Reservation)
            if number != 2:
                ledger.seal(granted, bytes(1000 + number))
    return made


def test_show_says_what_an_officer_asks(path: Path, noisewise: Noisewise) -> None:
    code, out, _ = noisewise("ledger", "show", path)
    assert code == 0
    for words in (DATASET, "epsilon 2 at delta 1e-06", "remaining", "at most 5 noised replies",
                  "1 further round was charged", "more rounds like the last one",
                  "no reply"):  # fmt: skip
        assert words in out
    assert out.count("training") == 5
    with Ledger.inspect(path) as ledger:
        risks = ledger_risks(ledger.statement())
    for label, guess, spent, whole in risk_rows(risks):
        assert re.search(rf"{re.escape(label)} +{guess} +{spent} +{whole}\n", out)
    both = (percent_up(risks.spent.advantage), percent_up(risks.whole.advantage))
    assert re.search(rf"advantage +0 % +{both[0]} +{both[1]}\n", out)
    assert len({risks.spent.advantage, risks.whole.advantage, 0.0}) == 3
    assert "software   unknown (an older version): 6 entries, 20" in out
    _, short, _ = noisewise("ledger", "show", path, "--last", 2)
    assert "(4 earlier entries not shown" in short
    _, none, _ = noisewise("ledger", "show", path, "--last", 0)
    assert "training" not in none


def test_show_json_and_exports_agree(path: Path, noisewise: Noisewise) -> None:
    _, out, _ = noisewise("ledger", "show", path, "--json")
    shown = json.loads(out)
    assert shown["epsilon"] == 2.0
    assert shown["spent"] + shown["left"] == pytest.approx(2.0)
    assert 0 < shown["share"] < 1
    _, exported, _ = noisewise("ledger", "export", path, "--format", "json")
    written = json.loads(exported)
    written_by = written.pop("written_by")
    assert written == shown
    risk = shown["risk"]
    assert shown["unit"] == "record"
    assert risk["false_positive_rates"] == [0.001, 0.01, 0.1]
    assert (risk["spent"]["source"], risk["whole"]["source"]) == ("steps", "budget")
    assert len(written_by["core_sha256"]) == 64
    _, text, _ = noisewise("ledger", "export", path, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["state"] for row in rows] == [entry["state"] for entry in shown["entries"]]
    assert float(rows[0]["noise_multiplier"]) == 3.0
    assert rows[2]["reply_sha256"] == ""


def test_numbers_can_be_made_again_from_the_csv(path: Path, noisewise: Noisewise) -> None:
    """Whoever has only the export can recompute what is spent by training."""
    _, text, _ = noisewise("ledger", "export", path, "--format", "csv")
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["purpose"] == "training"]
    steps = sum(int(row["steps"]) for row in rows)
    alone = epsilon_of(
        float(rows[0]["sample_rate"]), float(rows[0]["noise_multiplier"]), steps, 1e-6
    )
    _, out, _ = noisewise("ledger", "show", path, "--json")
    assert alone <= json.loads(out)["spent"] <= alone + epsilon_of(1.0, 60.0, 1, 1e-6)


class Page(HTMLParser):
    """Text of a page, and everything that it would load from elsewhere."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.loads, self.open = "", [], 0
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img") else []

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        self.text += " " if tag in ("td", "th", "dt", "dd") else ""


def test_the_page_stands_alone_and_says_it_all(
    path: Path, noisewise: Noisewise, tmp_path: Path
) -> None:
    target = tmp_path / "statement.html"
    assert noisewise("ledger", "export", path, "--output", target)[0] == 0
    source = target.read_text()
    page = Page(source)
    assert page.loads == []
    assert "url(" not in source
    assert "prefers-color-scheme: dark" in source
    assert "@media print" in source
    flat = " ".join(page.text.split())
    for words in ("What was promised", "what is spent", "What left the site", "What is not covered",
                  "protects each single record", "What this means as risk", "took part in 5 rounds",
                  "without a name 5", "named by guessing", "(1 in 1,000,000)",
                  "does not prove",
                  "A record is not a person", "Sites must be disjoint", "Rolling back the whole",
                  "How to check this page", DATASET):  # fmt: skip
        assert words in flat
    assert "Ward &lt;7&gt; &amp; co" in source  # escaped
    with Ledger.inspect(path) as ledger:
        assert ledger.statement().head in flat


def test_the_page_shows_the_risk_rounded_up(
    path: Path, noisewise: Noisewise, tmp_path: Path
) -> None:
    target = tmp_path / "statement.html"
    assert noisewise("ledger", "export", path, "--output", target)[0] == 0
    flat = " ".join(Page(target.read_text()).text.split())
    with Ledger.inspect(path) as ledger:
        risks = ledger_risks(ledger.statement())
    for row in risk_rows(risks):
        assert " ".join(row) in flat
    for rate, text in zip(risks.spent.true_positive_rates, risk_rows(risks), strict=True):
        shown = float(text[2].removesuffix(" %")) / 100
        assert rate <= shown < rate + 0.001
        thousandths = math.ceil(1000 * rate)
        assert (f"at most {thousandths} of 1,000" in flat) == text[0].startswith("1 %")
    assert "worst case for ε and δ" in flat
    assert f"{percent_up(risks.whole.advantage)}" in flat
    digits = noisewise("ledger", "software")[1].split()[-1]
    assert f"{digits}" in flat


def test_the_sites_file_gives_the_risk_of_its_plan(noisewise: Noisewise, tmp_path: Path) -> None:
    """All rounds that the file permits; a file of another budget is refused."""
    site = make_site(tmp_path)
    _, text, _ = noisewise("ledger", "export", tmp_path / "site.ledger", "--format", "json")
    alone = json.loads(text)["risk"]["whole"]
    code, text, _ = noisewise(
        "ledger", "export", tmp_path / "site.ledger", "--format", "json", "--site", site
    )
    assert code == 0
    planned = json.loads(text)["risk"]["whole"]
    assert (alone["source"], planned["source"]) == ("budget", "steps")
    assert planned["advantage"] < alone["advantage"]
    loaded = load_site(site)
    plan = loaded.plan
    assert loaded.planned_steps[plan.sample_rate, plan.noise_multiplier] == (
        plan.steps_per_round * loaded.rounds_allowed
    )
    exact = risk_of_steps(loaded.planned_steps, plan.budget.epsilon, plan.budget.delta)
    assert planned["advantage"] == exact.advantage
    Ledger.create(tmp_path / "other.ledger", PrivacyBudget(3.0, 1e-6), "another")
    code, _, err = noisewise(
        "ledger", "export", tmp_path / "other.ledger", "--format", "json", "--site", site
    )
    assert (code, "must be the file of this ledger" in err) == (2, True)


def test_the_page_names_the_federations_of_the_ledger(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "l", BUDGET, DATASET)
    with Ledger.open(tmp_path / "l", dataset_id=DATASET, budget=BUDGET) as ledger:
        for number, name in enumerate(["ward", "lungs", "ward", "ward", ""]):
            ledger.reserve(instruction_hash(bytes([number])), replace(CHARGE, federation=name))
        ledger.reserve(instruction_hash(b"m"), replace(metrics_charge(60.0), federation="lungs"))
        statement = ledger.statement()
    flat = " ".join(Page(statement_html(statement)).text.split())
    day = statement.entries[0].reserved_at[:10]
    for row in ("ward 3", "lungs 1", "without a name 1", "all 5"):
        assert f" {row} {day} {day} " in flat
    assert [use.entries for use in federations(statement.entries)] == [3, 2, 1]
    shown = statement_text(statement)
    assert f"federation ward: 3 rounds, {day} to {day}\n           lungs: 1 round, {day}" in shown
    names = [line.split()[3] for line in shown.splitlines() if " training " in line]
    assert names == ["ward", "lungs", "ward", "ward", "-"]


def test_the_statement_names_the_software_of_every_entry(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "l", BUDGET, DATASET)
    for number, software in enumerate([None, "noisewise 1 core ab", "noisewise 2 core cd"]):
        more = {"dataset_id": DATASET, "budget": BUDGET, "software": software}
        with Ledger.open(tmp_path / "l", **more) as ledger:  # type: ignore[arg-type]
            for part in range(number + 1):
                ledger.reserve(instruction_hash(bytes([number, part])), CHARGE)
            statement = ledger.statement()
    days = [entry.reserved_at[:10] for entry in statement.entries]
    lines = [use.text for use in software_uses(statement.entries)]
    assert lines == [
        f"unknown (an older version): 1 entry, {days[0]} to {days[0]}",
        f"noisewise 1 core ab: 2 entries, {days[1]} to {days[2]}",
        f"noisewise 2 core cd: 3 entries, {days[3]} to {days[5]}",
    ]
    flat = " ".join(Page(statement_html(statement)).text.split())
    for line in lines:
        assert line in flat
        assert line in statement_text(statement)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.001, "0.1 %"), (0.0010001, "0.11 %"), (0.01, "1 %"), (0.010001, "1.1 %"),
     (0.1, "10 %"), (0.12301, "12.4 %"), (0.99901, "100 %"), (1.0, "100 %")],
)  # fmt: skip
def test_percent_is_rounded_up(share: float, text: str) -> None:
    assert percent_up(share) == text


@pytest.mark.parametrize(
    ("epsilon", "spent", "left"),
    [(1.28671, "1.287", "1.286"), (0.5, "0.5", "0.5"), (0.0, "0", "0"),
     (1e-7, "1e-07", "9.999e-08"), (12.3401, "12.35", "12.34")],
)  # fmt: skip
def test_spent_is_rounded_up_and_left_down(epsilon: float, spent: str, left: str) -> None:
    assert epsilon_text(epsilon, 4, up=True) == spent
    assert float(epsilon_text(epsilon, 4, up=True)) >= epsilon
    assert epsilon_text(epsilon, 4, up=False) == left
    assert float(epsilon_text(epsilon, 4, up=False)) <= epsilon


def test_a_page_before_the_first_round(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "l", BUDGET, "new")
    with Ledger.inspect(tmp_path / "l") as ledger:
        statement = ledger.statement()
    page = statement_html(statement)
    assert "Nothing yet" in page
    assert "Nothing has left the site yet" in page
    assert "no round was requested yet" in statement_text(statement)
    assert kinds(statement.entries) == ()


def test_verify_answers_by_exit_code(path: Path, noisewise: Noisewise) -> None:
    code, out, _ = noisewise("ledger", "verify", path)
    assert (code, "valid: 11 events" in out) == (0, True)
    head = out.split()[-1]
    for noted in (head, head[:16], head[:16].upper() + "...", f" {head[:20]} "):
        code, out, _ = noisewise("ledger", "verify", path, "--head", noted)
        assert (code, "event 11 of 11" in out) == (0, True)
    assert noisewise("ledger", "verify", path, "--head", head[:16], "--events", 11)[0] == 0
    code, out, _ = noisewise("ledger", "verify", path, "--head", "0" * 64, "--json")
    assert code == 3
    assert (json.loads(out)["ok"], json.loads(out)["noted"]) == (False, "unknown")
    code, out, _ = noisewise("ledger", "verify", path, "--head", "0" * 16)
    assert (code, "valid: 11 events" in out, "UNKNOWN HEAD" in out) == (3, True, True)
    code, out, _ = noisewise("ledger", "verify", path, "--head", head[:16], "--events", 10)
    assert (code, "not of event 10" in out) == (3, True)
    code, out, _ = noisewise("ledger", "verify", path, "--head", "0" * 16, "--events", 10)
    assert (code, "NOT VALID" in out, "rewritten" in out) == (1, True, True)
    for words in (("--head", head[:15]), ("--head", "x" * 16), ("--events", 3)):
        code, _, err = noisewise("ledger", "verify", path, *words)
        assert (code, words[0].lstrip("-") in err) == (2, True)
    content = bytearray(path.read_bytes())
    place = content.index(instruction_hash(bytes([3])).encode())
    content[place] ^= 1
    path.write_bytes(content)
    code, out, _ = noisewise("ledger", "verify", path)
    assert code == 1
    assert "NOT VALID" in out
    code, out, err = noisewise("ledger", "show", path)
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_why_shows_the_last_refusals(path: Path, noisewise: Noisewise) -> None:
    code, out, _ = noisewise("ledger", "why", path)
    assert (code, out) == (0, f"no refusal is recorded for {path}\n")
    for number in range(3):
        note_refusal(path, BudgetSpentError(f"no {number} \x1b[2Jleft\n"), round_number=number)
    note_refusal(path, "in words")
    path.write_bytes(b"corrupt")
    code, out, _ = noisewise("ledger", "why", path, "--last", 2)
    assert code == 0
    first, remedy, second, other = out.splitlines()
    assert ("in words" in first, "round" in first, "the client's log" in remedy) == (
        True,
        False,
        True,
    )
    assert r"round 2  no 2 \u001b[2Jleft" in second
    assert second.split()[0].endswith("Z")
    assert "nothing" in other.lower()
    path.unlink()
    shown = json.loads(noisewise("ledger", "why", path, "--last", 50, "--json")[1])
    assert [refusal["round"] for refusal in shown] == [None, 2, 1, 0]
    assert shown[1]["kind"] == "BudgetSpentError"


def test_errors_are_one_line(path: Path, noisewise: Noisewise, tmp_path: Path) -> None:
    init = ("ledger", "init", tmp_path / "new", "--dataset", "d", "--delta", 1e-6)
    for words, expected, named in (
        ((*init, "--epsilon", 0), 2, "epsilon"),
        ((*init, "--epsilon", "inf"), 2, "epsilon"),
        ((*init, "--epsilon", 1, "--accountant", "x"), 2, "accountant"),
        (("ledger", "init", path, "--dataset", "d", "--epsilon", 1, "--delta", 1e-6), 1, "exists"),
        (("ledger", "show", tmp_path / "none"), 1, "ledger init"),
        (("ledger", "verify", tmp_path / "none"), 1, ""),
        (("ledger", "export", path), 2, "--format"),
        (("ledger", "export", path, "--output", tmp_path / "a.pdf"), 2, "a.pdf"),
        (("audit", "--delta", 2), 2, "delta"),
    ):
        code, out, err = noisewise(*words)
        assert code == expected, words
        assert "Traceback" not in err
        assert named in err + out
    assert not (tmp_path / "new").exists()


def test_dataset_names_are_printable(tmp_path: Path) -> None:
    for name in ("", "  ", "a\nb", "\x1b[31m"):
        with pytest.raises(InvalidValueError, match="dataset_id"):
            Ledger.create(tmp_path / "l", BUDGET, name)


def test_audit_prints_a_table_and_draws(noisewise: Noisewise, tmp_path: Path) -> None:
    code, out, _ = noisewise("audit", "--canaries", 400, "--runs", 2, "--output", tmp_path)
    assert code == 0
    assert "claimed by the ledger" in out
    assert "consistent" in out
    assert json.loads((tmp_path / "audit.json").read_text())["violated"] is False
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert logging.getLogger("noisewise.privacy.ledger").level == logging.NOTSET
    code, out, _ = noisewise("audit", "--canaries", 200, "--runs", 1, "--json")
    assert json.loads(out)["runs"] == 1
