"""Guarantee 19 of docs/privacy.md: a report claims only what was checked.

A site's declaration is shown as the site's own claim.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

flwr_app = pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import LocalGrid, context, make_site  # noqa: E402
from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402

from noisewise.aggregation.methods import make_method  # noqa: E402
from noisewise.aggregation.noise_floor import noise_floor  # noqa: E402
from noisewise.cli import app  # noqa: E402
from noisewise.data import load_dataset  # noqa: E402
from noisewise.errors import InvalidValueError  # noqa: E402
from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower.client import make_client_app  # noqa: E402
from noisewise.flower.strategy import NoiseAware  # noqa: E402
from noisewise.flower.wire import NOT_TAKING_PART  # noqa: E402
from noisewise.privacy.declaration import Declaration, read_declaration  # noqa: E402
from noisewise.privacy.ledger import Ledger  # noqa: E402
from noisewise.report import page as page_module  # noqa: E402
from noisewise.report.comparison_report import write_report  # noqa: E402
from noisewise.report.run_sets import find_runs  # noqa: E402
from noisewise.site.site_file import load_site  # noqa: E402
from noisewise.training.models import make_model  # noqa: E402

RATE = 0.2
CLAIMS = re.compile(
    r"own budget|budget of its own|own privacy budget|ledger keeps|never exceeded|same budgets|"
    r"charged to|each site's own|keeps a budget|epsilon \d|site \S+ declares|all budgets",
    re.IGNORECASE,
)
"""What a report may not say about updates of which a server knows nothing else."""


def model() -> torch.nn.Module:
    return make_model("softmax", (1, 8, 8), 10, seed=0)


def start_arrays() -> ArrayRecord:
    return ArrayRecord(dict(model().named_parameters()))


def plain_app() -> ClientApp:
    """What a Flower user has: SGD on own records without any privacy, and full arrays back."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        inputs, targets = load_dataset("digits").train.arrays()
        mine = slice(int(context.node_config["part"]), None, 4)
        net = model()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            outputs = net(torch.from_numpy(inputs[mine]))
            torch.nn.functional.cross_entropy(outputs, torch.from_numpy(targets[mine])).backward()
            optimizer.step()
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), reply_to=message)

    return made


def node(client: ClientApp, **config: Any) -> Any:
    return lambda message: client(message, context(**config))


def report_texts(run: Path, output: Path) -> dict[str, str]:
    """Everything that `noisewise report` writes or prints about a run, by file."""
    done = CliRunner().invoke(app, ["report", str(run), "-o", str(output)])
    assert done.exit_code == 0, done.output
    files = {name: (output / name).read_text() for name in ("report.html", "report.md")}
    files |= {name: (output / name).read_text() for name in ("table.csv", "summary.json")}
    files["report.html"] = re.sub(
        r"(?s)<style>.*?</style>|<pre>.*?</pre>", "", files["report.html"]
    )
    return files | {"terminal": done.output}


def check_no_claim(texts: dict[str, str]) -> None:
    claims = {name: CLAIMS.findall(text) for name, text in texts.items()}
    assert not any(claims.values()), claims


def test_a_plain_app_without_privacy_is_reported_without_a_privacy_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the strategy is ours; the clients train by SGD without noise."""
    nodes = {k: node(plain_app(), part=k) for k in range(4)}
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, folder=tmp_path / "run")
    scores = {n: MetricRecord({"accuracy": 0.3 * n}) for n in (1, 2)}
    strategy.start(
        LocalGrid(nodes), start_arrays(), 2, evaluate_fn=lambda number, arrays: scores[number]
    )
    texts = report_texts(tmp_path / "run", tmp_path / "page")
    check_no_claim(texts)
    assert load_run(tmp_path / "run").status == "finished"
    for name in ("report.html", "report.md"):
        assert "not checked: a server sees updates, not how they were made" in texts[name]
        assert "none: this server also accepted updates without noise" in texts[name]
        assert "4 asked; 4 sent at least one update that was used" in texts[name]
    assert "not known to the server" in texts["report.html"]
    old = "each site's own budget, which its ledger keeps and the server is not told"
    monkeypatch.setattr(page_module, "NOT_CHECKED", old)
    with pytest.raises(AssertionError):
        check_no_claim(report_texts(tmp_path / "run", tmp_path / "flawed"))


def publish(site: Path, value: str = "true") -> Path:
    site.write_text(site.read_text() + f"\n[declaration]\npublish = {value}\n")
    return site


def question(**content: Any) -> Message:
    return Message(RecordDict(content), 7, "query.declaration")


def ask(site: Path, asked: Message | None = None) -> Message:
    return make_client_app()(asked or question(), context(site=str(site)))


def refused(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == 451 and reply.error.reason == NOT_TAKING_PART


def charged(site: Path) -> int:
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        return len(ledger.statement().entries)


def test_a_site_that_opted_in_declares_three_fields_of_its_file_and_nothing_else(
    tmp_path: Path,
) -> None:
    site = publish(make_site(tmp_path, records=60, epsilon=3.5))
    reply = ask(site)
    assert list(reply.content) == ["declaration"]
    assert dict(reply.content["declaration"]) == {"unit": "record", "epsilon": 3.5, "delta": 1e-3}
    assert charged(site) == 0
    (tmp_path / "records.npz").unlink()  # neither records nor ledger are read for it
    (tmp_path / "site.ledger").unlink()
    again = ask(site)
    assert again.content["declaration"] == reply.content["declaration"]


def test_without_an_opt_in_nothing_is_declared_in_the_usual_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert refused(ask(make_site(tmp_path / "none", records=60)))
    assert refused(ask(publish(make_site(tmp_path / "no", records=60), "false")))
    assert caplog.text.count("request for this site's declaration was refused") == 2
    assert "not taking part" not in caplog.text  # it does take part in training
    assert refused(ask(tmp_path / "nowhere.toml"))
    assert "no declaration is sent: site = " in caplog.text


@pytest.mark.parametrize(
    "asked",
    [
        question(config=ConfigRecord({"epsilon": 1.0})),
        question(config=ConfigRecord({})),
        question(arrays=start_arrays()),
        Message(RecordDict(), 7, "query"),
        Message(RecordDict({"config": ConfigRecord({"declaration": True})}), 7, "query"),
    ],
)
def test_no_other_question_is_answered(asked: Message, tmp_path: Path) -> None:
    site = publish(make_site(tmp_path, records=60))
    assert refused(ask(site, asked))
    assert charged(site) == 0


def test_publish_must_be_true_or_false(tmp_path: Path) -> None:
    site = publish(make_site(tmp_path, records=60), '"yes"')
    with pytest.raises(InvalidValueError, match=r"declaration\.publish"):
        load_site(site)


GOOD = {"unit": "record", "epsilon": 2.0, "delta": 1e-6}
HOSTILE: list[dict[Any, Any]] = [
    {},
    {"unit": "record", "epsilon": 2.0},
    GOOD | {"signed": "yes"},
    GOOD | {"unit": "person\x1b[2J"},
    GOOD | {"unit": "x" * 10_000_000},
    GOOD | {"unit": "<script>alert(1)</script>"},
    GOOD | {"unit": 1},
    GOOD | {"unit": ["record"]},
    GOOD | {"epsilon": 2},
    GOOD | {"epsilon": True},
    GOOD | {"epsilon": "2.0"},
    GOOD | {"epsilon": [2.0]},
    GOOD | {"epsilon": 0.0},
    GOOD | {"epsilon": -1.0},
    GOOD | {"epsilon": math.inf},
    GOOD | {"epsilon": math.nan},
    GOOD | {"delta": 0.0},
    GOOD | {"delta": 1.0},
    GOOD | {"delta": math.nan},
    {f"k\x1b{n}": 1.0 for n in range(10_000)},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_declaration_is_one_short_printable_error(fields: dict[str, Any]) -> None:
    assert read_declaration(GOOD) == Declaration("record", 2.0, 1e-6)
    with pytest.raises(InvalidValueError) as caught:
        read_declaration(fields)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def lying(site: Path, content: Any) -> Any:
    """A site that trains as it should and declares something else."""
    honest = node(make_client_app(), site=str(site))

    def answer(message: Message) -> Message:
        if message.metadata.message_type == "train":
            return honest(message)  # type: ignore[no-any-return]
        made = content() if callable(content) else content
        return Message(made, reply_to=message)

    return answer


def run_strategy(folder: Path, nodes: dict[int, Any], rounds: int, **more: Any) -> LocalGrid:
    grid = LocalGrid(nodes)
    options = {"poll_seconds": 0.05, "round_seconds": 5.0} | more
    NoiseAware("RobustHDP", learning_rate=RATE, folder=folder, **options).start(
        grid, start_arrays(), rounds
    )
    return grid


def test_the_report_repeats_what_sites_declare_as_their_claim(tmp_path: Path) -> None:
    run = tmp_path / "run"
    client = make_client_app()
    nodes = {
        1: node(client, site=str(publish(make_site(tmp_path / "1", 1, records=60, epsilon=4.0)))),
        2: node(client, site=str(make_site(tmp_path / "2", 2, records=60))),
    }
    lies: list[Any] = [RecordDict({"declaration": ConfigRecord(fields)}) for fields in HOSTILE]
    lies += [
        RecordDict(),
        RecordDict({"declaration": MetricRecord({"epsilon": 2.0})}),
        RecordDict({"declaration": ConfigRecord(GOOD), "more": ConfigRecord({})}),
        RecordDict({"other": ConfigRecord(GOOD)}),
        RecordDict({"declaration": ArrayRecord({"x": Array(np.zeros(3, np.float32))})}),
    ]
    liar = make_site(tmp_path / "liar", 3, records=60)
    nodes |= {10 + k: lying(liar, lie) for k, lie in enumerate(lies)}
    grid = run_strategy(run, nodes, 1)
    assert len(grid.queries) == len(nodes)
    assert all(len(message.content) == 0 for message in grid.queries)
    stored = json.loads((run / "declarations.json").read_text())
    assert stored == {"1": {"unit": "record", "epsilon": 4.0, "delta": 1e-3}}
    assert load_run(run).declarations == {"1": Declaration("record", 4.0, 1e-3)}
    assert len(load_run(run).rounds[0].weights) == len(nodes)  # a lie costs no place in the round
    texts = report_texts(run, tmp_path / "page")
    claim = "unit record, epsilon 4, delta 0.001 (unsigned; this server did not check it)"
    for name in ("report.html", "report.md"):
        assert texts[name].count(claim) == 1
        assert "what sites declare (1 of 27 nodes)" in texts[name]
        assert "not checked: a server sees updates, not how they were made" in texts[name]
        assert "\x1b" not in texts[name]
        assert "<script>alert" not in texts[name]
    assert "unit and budget, from the sites that chose to declare them" in texts["report.html"]


def test_a_site_is_asked_once_and_after_a_restart_not_again(tmp_path: Path) -> None:
    run, client = tmp_path / "run", make_client_app()
    sites = {k: publish(make_site(tmp_path / str(k), k, records=60, rounds=6)) for k in (1, 2, 3)}
    nodes = {k: node(client, site=str(site)) for k, site in sites.items()}
    first = run_strategy(run, {k: nodes[k] for k in (1, 2)}, 2)
    assert [m.metadata.dst_node_id for m in first.queries] == [1, 2]  # before round 1, not after
    assert load_run(run).declarations.keys() == {"1", "2"}
    second = run_strategy(run, nodes, 3)  # a node that is new is asked before its first round
    assert [m.metadata.dst_node_id for m in second.queries] == [3]
    assert load_run(run).declarations.keys() == {"1", "2", "3"}
    (run / "declarations.json").write_text('{"1": {"unit": "record"}')
    third = run_strategy(run, nodes, 3)  # ended: nobody is asked anything
    assert not third.queries
    fourth = run_strategy(run, nodes, 4)  # what was stored is damaged
    assert [m.metadata.dst_node_id for m in fourth.queries] == [1, 2, 3]
    assert load_run(run).declarations.keys() == {"1", "2", "3"}


def test_an_unfinished_run_is_reported_with_its_declarations(tmp_path: Path) -> None:
    client = make_client_app()
    sites = {k: publish(make_site(tmp_path / str(k), k, records=60)) for k in (1, 2)}

    class Dies(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            if self.seen:
                raise KeyboardInterrupt
            return super().push_messages(messages)

    grid = Dies({k: node(client, site=str(site)) for k, site in sites.items()})
    strategy = NoiseAware("RobustHDP", learning_rate=RATE, folder=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        strategy.start(grid, start_arrays(), 3)
    found = load_run(tmp_path / "run")
    assert found.status == "unfinished"
    assert found.declarations.keys() == {"1", "2"}
    assert (
        "this server did not check it"
        in report_texts(tmp_path / "run", tmp_path / "p")["report.md"]
    )


@pytest.mark.parametrize("stage", ["push", "pull", "reply", "silence"])
def test_whatever_goes_wrong_with_the_question_the_run_goes_on_in_time(
    stage: str, tmp_path: Path
) -> None:
    class Broken(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            if stage == "push" and sent[0].metadata.message_type != "train":
                raise RuntimeError("no connection")
            return super().push_messages(sent)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            names = list(message_ids)
            if stage == "pull" and names[0].startswith("q"):
                raise OSError("no connection")
            return super().pull_messages(names)

    def unreadable() -> RecordDict:
        raise ZeroDivisionError

    content = {"reply": unreadable, "silence": None}.get(stage, RecordDict())
    sites = {k: make_site(tmp_path / str(k), k, records=60) for k in (1, 2)}
    nodes = {k: lying(site, content) for k, site in sites.items()}
    if stage == "silence":
        nodes = {
            k: (lambda m, a=answer: a(m) if m.metadata.message_type == "train" else None)
            for k, answer in nodes.items()
        }
    strategy = NoiseAware(
        "RobustHDP", learning_rate=RATE, folder=tmp_path / "run", poll_seconds=0.05,
        declaration_seconds=0.3,
    )  # fmt: skip
    strategy.start(Broken(nodes), start_arrays(), 1)
    run = load_run(tmp_path / "run")
    assert (run.status, len(run.rounds[0].weights)) == ("finished", 2)
    assert not run.declarations
    assert not (tmp_path / "run" / "declarations.json").exists()


def test_a_server_can_leave_the_question_out(tmp_path: Path) -> None:
    client = make_client_app()
    sites = {k: publish(make_site(tmp_path / str(k), k, records=60)) for k in (1, 2)}
    nodes = {k: node(client, site=str(site)) for k, site in sites.items()}
    grid = run_strategy(tmp_path / "run", nodes, 1, declaration_seconds=0)
    assert not grid.queries
    assert not load_run(tmp_path / "run").declarations
    with pytest.raises(InvalidValueError, match="declaration_seconds"):
        NoiseAware("RobustHDP", learning_rate=RATE, declaration_seconds=-1)


def test_an_update_that_the_guard_refused_is_not_counted_as_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client_app()
    sites = {k: make_site(tmp_path / str(k), k, records=60) for k in (1, 2, 3)}
    nodes = {k: node(client, site=str(site)) for k, site in sites.items()}

    def quiet(message: Message) -> Message:
        shapes = {name: array.shape for name, array in message.content["arrays"].items()}
        tiny = {name: Array(np.full(shape, 1e-6, np.float32)) for name, shape in shapes.items()}
        return Message(RecordDict({"delta": ArrayRecord(tiny)}), reply_to=message)

    plans = [load_site(site).plan for site in sites.values()]
    floor = noise_floor(plans, 650, RATE, normalised=False)
    strategy = NoiseAware(
        make_method("RobustHDP").guarded(floor, 1), learning_rate=RATE, folder=tmp_path / "run"
    )
    with caplog.at_level("INFO"):
        strategy.start(LocalGrid(nodes | {4: quiet}), start_arrays(), 1)
    assert "round 1: 3 updates used, 1 not" in caplog.text
    text = report_texts(tmp_path / "run", tmp_path / "page")["report.md"]
    assert "4 asked; 3 sent at least one update that was used" in text
    assert "3 used, 1 not used" in text
    assert f"{floor:.4g}: the guard dropped updates with less noise energy" in text


def test_check_says_what_servers_are_told(tmp_path: Path) -> None:
    site = make_site(tmp_path, records=60)
    silent = CliRunner().invoke(app, ["flower", "check", str(site)]).output
    assert "No declaration: servers that ask for unit and budget are refused." in silent
    publish(site)
    told = CliRunner().invoke(app, ["flower", "check", str(site)]).output
    assert "Declaration: servers that ask receive unit record, epsilon 8 and delta 0.001." in told


def test_a_method_that_believes_epsilons_says_who_entered_them(tmp_path: Path) -> None:
    from noisewise.aggregation.base import Disclosure

    client = make_client_app()
    sites = {k: make_site(tmp_path / str(k), k, records=60) for k in (1, 2)}
    strategy = NoiseAware(
        "WeiAvg", learning_rate=RATE, folder=tmp_path / "run",
        disclosed={Disclosure.EPSILON: {1: 1.0, 2: 2.0}},
    )  # fmt: skip
    strategy.start(
        LocalGrid({k: node(client, site=str(site)) for k, site in sites.items()}), start_arrays(), 1
    )
    write_report(find_runs([tmp_path / "run"]).sets, tmp_path / "page")
    page = (tmp_path / "page" / "report.html").read_text()
    assert "as the server&#39;s operator entered it (not checked)" in page
    assert "as the client reports it" not in page
