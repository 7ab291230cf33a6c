"""Real SuperLink and SuperNode processes on loopback, started as the app's README says.

Slow: Flower starts a new Python process for every message, so a round takes half a minute.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = pytest.mark.extras

from flower_cases import METRICS  # noqa: E402
from flower_processes import ROOT, Deployment  # noqa: E402
from wire import Recorder  # noqa: E402

from noisewise.aggregation.noise_floor import noise_floor  # noqa: E402
from noisewise.federation.results import RunResult, load_run  # noqa: E402
from noisewise.flower.new_app import write_app  # noqa: E402
from noisewise.privacy.budget import PrivacyBudget  # noqa: E402
from noisewise.privacy.ledger import Ledger, Statement  # noqa: E402
from noisewise.site.site_file import load_site  # noqa: E402

RATE = 0.5

LIARS = '''
"""The app's client, and two that lie."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def honest(message, context):
    from noisewise.flower import show_log  # only here, because it takes seconds
    from noisewise.flower.client import make_client_app

    show_log()
    return make_client_app()(message, context)


@app.train()
def train(message, context):
    lie = context.node_config.get("lie")
    if lie is None:
        return honest(message, context)
    value = np.nan if lie == "nan" else 1e-3
    shapes = {name: array.shape for name, array in message.content["arrays"].items()}
    lies = {name: Array(np.full(shape, value, np.float32)) for name, shape in shapes.items()}
    return Message(RecordDict({"delta": ArrayRecord(lies)}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    return honest(message, context)
'''


def environment() -> dict[str, str]:
    """With the cache of the test run: sites then find the calibrations of the app's demo there."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def make_app(folder: Path, sites: int, rounds: int) -> Path:
    """The app of `noisewise flower new` with the demo's sites."""
    app = folder / "app"
    write_app(app)
    made = subprocess.run(
        [sys.executable, "demo.py", "demo", str(sites), str(rounds)],
        cwd=app, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return app


def site_file(app: Path, number: int) -> Path:
    return app / "demo" / f"site-{number}" / "site.toml"


def shorten_budget(site: Path, rounds: int) -> None:
    """A site whose budget lasts for a part of the run only: less epsilon for the same noise."""
    from noisewise.privacy.accounting import epsilon_of

    plan = load_site(site).plan
    steps = rounds * plan.steps_per_round
    epsilon = epsilon_of(plan.sample_rate, plan.noise_multiplier, steps, 1e-4, "pld")
    text = site.read_text()
    before = next(line for line in text.splitlines() if line.startswith("epsilon"))
    text = text.replace(before, f"epsilon = {epsilon * 1.001}")
    site.write_text(text.replace("planned_rounds = 3", f"planned_rounds = {rounds}"))
    for old in site.parent.glob("site.ledger*"):
        old.unlink()
    dataset = load_site(site).config.ledger.dataset
    Ledger.create(site.parent / "site.ledger", PrivacyBudget(epsilon * 1.001, 1e-4), dataset)


def opt_in(site: Path) -> None:
    """A site that tells a noised accuracy."""
    text = site.read_text().replace("# held_out", 'held_out = "../public.npz"\n# held_out')
    site.write_text(text + METRICS.format(noise=20.0, records=300, releases=1))


def publish(site: Path) -> None:
    """A site that declares its unit and budget."""
    site.write_text(site.read_text() + "\n[declaration]\npublish = true\n")


def statement(site: Path) -> Statement:
    with Ledger.inspect(site.parent / "site.ledger") as ledger:
        return ledger.statement()


def config(app: Path, output: Path, **more: object) -> str:
    told = {
        "output": f'"{output}"',
        "public-records": f'"{app}/demo/public.npz"',
        "learning-rate": RATE,
        "min-clients": 3,
        "round-seconds": 900.0,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return " ".join(f"{name}={value}" for name, value in told.items())


def wait_for_round(output: Path, number: int, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        file = output / "rounds.jsonl"
        if file.exists() and len(file.read_text().splitlines()) >= number:
            return
        time.sleep(0.5)
    raise AssertionError(f"round {number} did not end within {seconds} s")


def accuracies(run: RunResult) -> list[float]:
    return [record.mean_accuracy for record in run.rounds]


def test_a_federation_learns_while_one_site_runs_dry_and_two_lie(tmp_path: Path) -> None:
    app = make_app(tmp_path, 5, 3)
    shorten_budget(site_file(app, 0), 1)
    opt_in(site_file(app, 1))
    (app / "noisewise_app" / "client_app.py").write_text(LIARS)
    plans = [load_site(site_file(app, k)).plan for k in range(3)]
    floor = noise_floor(plans, 650, RATE, normalised=False)
    output = tmp_path / "output"
    with Deployment(tmp_path / "processes") as there:
        there.superlink()
        for k in range(5):
            lie = {3: ' lie="nan"', 4: ' lie="quiet"'}.get(k, "")
            there.supernode(f"node-{k}", f'site="{site_file(app, k)}"{lie}')
        there.wait_for_nodes(5)
        there.run(
            "run", app,
            config(app, output, num_rounds=2, noise_floor=floor, evaluate_every=2, min_clients=2),
        )  # fmt: skip
        assert there.wait("run", 1200) == 0, there.log("run")
        told, logs = there.log("run"), [there.log(f"node-{k}") for k in range(5)]
    run = load_run(output)
    assert run.status == "finished"
    assert len(run.rounds) == 2
    scores = accuracies(run)
    assert scores[-1] > scores[0] > 0.2
    assert scores[-1] > 0.5
    (nan,) = {c for r in run.rounds for c, why in r.dropped.items() if "NaN or infinite" in why}
    (quiet,) = {c for r in run.rounds for c, why in r.dropped.items() if "too little noise" in why}
    assert all({nan, quiet} <= set(r.dropped) for r in run.rounds)
    assert all(r.weights.get(nan, 0) == 0 == r.weights.get(quiet, 0) for r in run.rounds)
    (dry,) = set(run.rounds[1].dropped) - {nan, quiet}
    assert dry in run.rounds[0].weights
    assert run.rounds[1].dropped[dry] == "gave no update (code 451)"
    # The reason is the site's own, in its log and ledger; the server has no word of it.
    assert "the budget does not allow" in logs[0]
    assert "budget" not in told
    spent = statement(site_file(app, 0))
    assert len(spent.entries) == 1
    assert spent.spent <= spent.epsilon
    assert [len(statement(site_file(app, k)).entries) for k in (1, 2)] == [3, 2]
    # One site of three told a noised accuracy, at a price; the others refused.
    assert [record.noised_accuracy is None for record in run.rounds] == [True, False]
    (noised,) = (run.rounds[1].noised_accuracy or {}).values()
    assert abs(noised - scores[-1] * 256 / 300) < 0.45  # about 256 records, six deviations
    assert [e.purpose for e in statement(site_file(app, 1)).entries].count("metrics") == 1
    assert "[metrics]" in logs[2]
    page = tmp_path / "page"
    report = subprocess.run(
        [sys.executable, "-m", "noisewise.cli", "report", str(output), "-o", str(page)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
    assert (page / "report.html").exists()


def noisewise(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "noisewise.cli", *words],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_declarations_a_second_run_and_a_run_without_any_update(tmp_path: Path) -> None:
    """Budgets for one round: the second run gets stored replies, the third gets refusals."""
    app = make_app(tmp_path, 3, 1)
    for k in (0, 1):
        publish(site_file(app, k))
    outputs = {name: tmp_path / name for name in ("first", "second", "third")}
    codes: list[int] = []
    with Deployment(tmp_path / "processes") as there:
        there.superlink()
        for k in range(3):
            there.supernode(f"node-{k}", f'site="{site_file(app, k)}"')
        there.wait_for_nodes(3)
        for name, output in outputs.items():
            rate = 0.25 if name == "third" else RATE
            there.run(name, app, config(app, output, num_rounds=1, learning_rate=rate))
            codes.append(there.wait(name, 1200))
        runs = json.loads(there.flwr("list", "dep", "--format", "json"))["runs"]
        third, site_log = there.log("third"), there.log("node-0")
    # Two of three sites declare; the report repeats it as their claim.
    first = load_run(outputs["first"])
    budgets = [load_site(site_file(app, k)).budget for k in (0, 1)]
    assert sorted((d.unit, d.epsilon, d.delta) for d in first.declarations.values()) == sorted(
        ("record", budget.epsilon, budget.delta) for budget in budgets
    )
    shown = noisewise("flower", "status", str(outputs["first"]))
    assert shown.returncode == 0, shown.stderr
    assert "what sites declare (2 of 3 nodes)" in shown.stdout
    lines = " ".join(shown.stdout.split())
    assert lines.count("(unsigned; this server did not check it)") == 2
    # The same instruction again: the same bytes, nothing charged.
    models = [(outputs[name] / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert models[0] == models[1]
    assert [len(statement(site_file(app, k)).entries) for k in range(3)] == [1, 1, 1]
    assert "answered before" in site_log
    # Another learning rate is another instruction, for which no budget is left.
    run = load_run(outputs["third"])
    assert (run.status, run.rounds_changed) == ("no_updates", 0)
    assert len(run.declarations) == 2
    assert not (outputs["third"] / "model.safetensors").exists()
    assert "no round changed the model" in third
    assert "3 sites (3 updates): gave no update (code 451)" in third
    assert "budget does not allow" not in third  # the reason is in the site's log only
    assert "budget does not allow" in site_log
    print("exit codes of flwr run:", codes)
    assert codes[:2] == [0, 0]
    # Flower 1.41 ends the third with 0, too: what tells is the run's status.
    assert sorted(entry["status"] for entry in runs) == [
        "finished:completed", "finished:completed", "finished:failed",
    ]  # fmt: skip
    failed = noisewise("flower", "status", str(outputs["third"]))
    assert failed.returncode == 1
    assert "no updates" in failed.stdout


def supervise(there: Deployment, app: Path, sites: range) -> None:
    """What a site's supervisor does: start a SuperNode again that has ended."""
    for k in sites:
        process = there.processes.get(f"node-{k}")
        if process is None or process.poll() is not None:
            there.supernode(f"node-{k}", f'site="{site_file(app, k)}"', key=f"site-{k}")


@pytest.mark.slow
def test_tls_node_keys_a_killed_site_and_a_killed_server(tmp_path: Path) -> None:
    app = make_app(tmp_path, 4, 6)
    words = "localhost 127.0.0.1 site-0 site-1 site-2 site-3 stranger"
    made = subprocess.run(
        ["sh", "certificates.sh", "keys", *words.split()],
        cwd=app, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    output, sites = tmp_path / "output", range(4)
    with Deployment(tmp_path / "processes", keys=app / "keys") as there:
        there.superlink()
        for k in sites:
            there.flwr("supernode", "register", str(app / "keys" / f"site-{k}.pub"), "dep")
            there.supernode(f"node-{k}", f'site="{site_file(app, k)}"', key=f"site-{k}")
        there.supernode("stranger", 'site="x"', key="stranger")
        there.supernode("keyless", 'site="x"')
        assert there.wait("stranger", 300) != 0
        assert there.wait("keyless", 300) != 0
        there.wait_for_nodes(4)
        there.run("run", app, config(app, output, round_seconds=150.0))
        wait_for_round(output, 1, 600)
        time.sleep(6)
        there.kill("node-1")  # in the middle of round 2
        wait_for_round(output, 2, 600)
        there.kill("superlink")  # the server's process goes with it
        there.processes.pop("run").kill()
        there.superlink()
        ends = time.monotonic() + 1200
        again = 0
        while not (output / "result.json").exists():
            assert time.monotonic() < ends, there.log("run-again") if again else ""
            supervise(there, app, sites)
            if not again:
                there.run("run-again", app, config(app, output, round_seconds=150.0))
                again = 1
            time.sleep(10)
        assert there.wait("run-again", 300) == 0
        assert "resuming after round 2" in there.log("run-again")
    run = load_run(output)
    assert run.status == "finished"
    assert [record.round for record in run.rounds] == [1, 2, 3]
    assert len(run.rounds[0].weights) == 4
    assert len(run.rounds[1].weights) == 3
    assert accuracies(run)[-1] > 0.5
    for k in sites:
        spent = statement(site_file(app, k))
        assert spent.spent <= spent.epsilon
        assert len(spent.entries) <= (4 if k == 1 else 3)


HELPERS = ROOT / "tests" / "helpers"


@pytest.mark.slow
def test_eleven_million_parameters_of_twenty_clients_fit_the_stated_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HELPERS / "flower_large.py"), str(tmp_path)],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    used = float(done.stdout.split()[0])
    assert used < (4 * 20 + 4 * 16) * 11.2e6 / 2**20


ALLOWED_PATHS = {
    "register-node", "activate-node", "heartbeat", "pull-messages", "pull-object", "get-run",
    "get-fab", "confirm-message-received", "push-messages", "push-object", "deactivate-node",
    "unregister-node",
}  # fmt: skip
OBJECT = re.compile(rb"[0-9a-f]{64}\"[\x00-\xff]{1,4}?([A-Z][A-Za-z]+) ")

IDS = re.compile(rb"[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def pushed(recorder: Recorder) -> dict[str, list[bytes]]:
    """The objects of a site's replies by kind, without ids, values and times."""
    found: dict[str, list[bytes]] = {}
    for request in recorder.requests():
        if not request.path.endswith("push-object"):
            continue
        match = OBJECT.search(request.body)
        assert match is not None, request.body[:200]
        kind, rest = match.group(1).decode(), request.body[match.end() :]
        if kind == "ArrayChunk":
            rest = rest[: rest.index(b"NUMPY") + 125] + b"%d" % len(rest)  # a header of 128 bytes
        if kind == "Message":  # ids and a time
            rest = b""
        found.setdefault(kind, []).append(IDS.sub(b"ID", rest))
    return {kind: sorted(bodies) for kind, bodies in found.items()}


@pytest.mark.slow
def test_what_the_server_sees_on_the_wire(tmp_path: Path) -> None:
    """Promise 1: other records, other epsilon, the same bytes but for the noised values."""
    app = make_app(tmp_path, 4, 3)
    with np.load(site_file(app, 1).parent / "records.npz") as file:
        kept = {key: file[key][:-1] for key in ("inputs", "targets")}
    np.savez(site_file(app, 1).parent / "records.npz", **kept)  # one record less
    for old in site_file(app, 3).parent.glob("site.ledger*"):
        old.unlink()
    publish(site_file(app, 2))
    with Deployment(tmp_path / "processes") as there:
        there.superlink()
        recorders = [Recorder(there.port) for _ in range(4)]
        for k, recorder in enumerate(recorders):
            there.supernode(f"node-{k}", f'site="{site_file(app, k)}"', through=recorder.port)
        there.wait_for_nodes(4)
        there.run("run", app, config(app, tmp_path / "output", num_rounds=1))
        assert there.wait("run", 1200) == 0, there.log("run")
        refusal = there.log("node-3")
    for recorder in recorders:
        recorder.close()
    first, second, declaring, refused = [pushed(recorder) for recorder in recorders]
    assert {kind: len(bodies) for kind, bodies in first.items()} == {
        "Message": 2, "RecordDict": 1, "ArrayRecord": 1, "Array": 2, "ArrayChunk": 2,
    }  # fmt: skip
    assert second == first  # the refused question for a declaration, and the update
    assert len(declaring.pop("ConfigRecord")) == 1
    assert len(declaring.pop("RecordDict")) == 2
    assert declaring == {kind: bodies for kind, bodies in first.items() if kind != "RecordDict"}
    assert b"ArrayChunk" not in recorders[3].sent
    assert set(refused) <= {"Message"}
    assert b"not taking part" in recorders[3].sent
    assert "site.ledger" in refusal  # the reason, at the site
    for k, recorder in enumerate(recorders):
        site = load_site(site_file(app, k))
        numbers = (site.budget.epsilon, site.plan.noise_multiplier, site.plan.sample_rate)
        secrets = [struct.pack("<d", x) for x in numbers] + [repr(x).encode() for x in numbers[1:]]
        secrets += [b"epsilon", b"ledger", b"digits-", b"site-", b"site.toml", b"num-examples"]
        if k == 2:  # it declares its epsilon, and no other number of its own
            assert secrets[0] in recorder.sent
            secrets = [one for one in secrets[1:] if one != b"epsilon"]
        assert not [secret for secret in secrets if secret in recorder.sent], k
        used = {request.path.rsplit("/", 1)[-1] for request in recorder.requests()}
        assert used <= ALLOWED_PATHS | {p for p in used if "heartbeat" in p}


@pytest.mark.slow
def test_flowers_own_simulation_runs_the_same_app_with_twenty_clients(tmp_path: Path) -> None:
    app = make_app(tmp_path, 20, 3)
    there = Deployment(tmp_path / "processes")
    (tmp_path / "processes" / "home" / "config.toml").unlink()  # Flower writes its own: "local"
    there.environment["NOISEWISE_SITE"] = f"{app}/demo/site-{{partition-id}}/site.toml"
    there.environment["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short paths
    settings = "num-supernodes=20 client-resources-num-cpus=1 init-args-num-cpus=2"
    try:
        told = there.flwr(
            "run", str(app), "local", "--stream", "--federation-config", settings, "--run-config",
            config(app, tmp_path / "output", min_clients=10, num_rounds=2), seconds=1200,
        )  # fmt: skip
    finally:
        there.end_strays()
        shutil.rmtree(there.environment["RAY_TMPDIR"], ignore_errors=True)
    run = load_run(tmp_path / "output")
    assert run.status == "finished", told
    assert [len(record.weights) for record in run.rounds] == [20, 20]
    assert accuracies(run)[1] > accuracies(run)[0]
