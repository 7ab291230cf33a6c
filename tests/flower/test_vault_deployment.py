"""Real SuperNodes under the relay's account, vaults under another, and a hostile app in a run.

Needs root and Flower. The app that the run ships tries to steal the records before it answers. One
site has no vault: there the theft succeeds, which shows that the app can steal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("flwr.app", reason="needs requirements-extras.lock")
pytestmark = [pytest.mark.extras, pytest.mark.accounts]

from flower_processes import Deployment  # noqa: E402
from vault_accounts import ROOT, Account, VaultSite, reaching, two_accounts, vault_site  # noqa: E402

from noisewise.federation.results import load_run  # noqa: E402
from noisewise.flower.new_app import write_app  # noqa: E402
from noisewise.privacy.ledger import verify_ledger  # noqa: E402

HOSTILE = '''
"""An app that steals what it can, and then answers as an honest one."""

import json
import os
import sys
from pathlib import Path

from flwr.clientapp import ClientApp

from noisewise.flower import show_log
from noisewise.flower.client import make_client_app

show_log()
honest = make_client_app()
app = ClientApp()


def steal(context):
    found = {"uid": os.getuid(), "torch": "torch" in sys.modules, "stolen": []}
    folder, pid = context.node_config["victim"], context.node_config["pid"]
    targets = [f"{folder}/records.npz", f"{folder}/site.ledger", f"/proc/{pid}/environ",
               f"/proc/{pid}/mem", f"/proc/{pid}/root{folder}/records.npz"]
    for target in targets:
        try:
            open(target, "rb").close()
            found["stolen"].append(target)
        except OSError:
            pass
    Path(context.node_config["loot"]).write_text(json.dumps(found))


@app.train()
def train(message, context):
    steal(context)
    return honest(message, context)


@app.query("declaration")
def declare(message, context):
    return honest(message, context)
'''


@pytest.fixture(scope="module")
def accounts() -> Iterator[tuple[Account, Account]]:
    with two_accounts() as made:
        yield made


def node_config(site: VaultSite, base: Path, how: str, pid: int, number: int) -> str:
    loot = base / "relay" / f"loot-{number}.json"
    return f'{how} victim="{site.file.parent}" pid="{pid}" loot="{loot}"'


def test_a_run_with_vaults_and_a_hostile_app(accounts: tuple[Account, Account]) -> None:
    relay, vault = accounts
    base = Path(tempfile.mkdtemp(prefix="nwf-", dir="/tmp"))
    base.chmod(0o755)
    app = base / "app"
    write_app(app)
    (app / "noisewise_app" / "client_app.py").write_text(HOSTILE)
    home = base / "relay"
    home.mkdir()
    os.chown(home, relay.uid, relay.gid)
    with ExitStack() as made, Deployment(base / "processes") as there:
        made.callback(shutil.rmtree, base, ignore_errors=True)
        sites = [
            made.enter_context(vault_site(relay, vault, start=k < 2, number=k, records=80))
            for k in range(3)
        ]
        (base / "processes").chmod(0o755)
        there.superlink()
        for k, site in enumerate(sites):
            with_vault = k < 2
            pid = site.pid if with_vault else os.getpid()
            how = f'vault="{site.socket}"' if with_vault else f'site="{site.file}"'
            there.supernode(
                f"node-{k}",
                node_config(site, base, how, pid, k),
                under=relay.command() if with_vault else (),
                environment={"HOME": str(home), "FLWR_HOME": str(home / f"flwr-{k}")}
                if with_vault
                else {},
            )
        there.wait_for_nodes(3)
        settings = {
            "num-rounds": 2, "min-clients": 3, "noise-floor": 0.0, "learning-rate": 0.2,
            "round-seconds": 900.0,
        }  # fmt: skip
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        there.run("run", app, f'{words} output="{base / "output"}"')
        assert there.wait("run", 1200) == 0, there.log("run")
        run = load_run(base / "output")
        logs = "\n".join(there.log(f"node-{k}")[-3000:] for k in range(3))
        assert run.status == "finished", logs
        assert [len(record.weights) for record in run.rounds] == [3, 3], logs
        loot = [json.loads((home / f"loot-{k}.json").read_text()) for k in range(3)]
        for k, site in enumerate(sites):
            statement = site.statement()
            assert len(statement.entries) == 2
            assert verify_ledger(site.ledger).problems == ()
            assert {entry.federation for entry in statement.entries} == {"ward" if k < 2 else ""}
        for found in loot[:2]:
            assert found == {"uid": relay.uid, "torch": False, "stolen": []}
        assert len(loot[2]["stolen"]) == 5  # without a vault


def test_a_site_whose_vault_is_down_does_not_take_part_and_pays_nothing(
    accounts: tuple[Account, Account], tmp_path: Path
) -> None:
    """The client itself, without a SuperNode: one code for the server, a clear line at the site."""
    program = """
        import json, logging, sys
        sys.path.insert(0, sys.argv[1])
        from flower_cases import context, start_arrays
        from flwr.app import ConfigRecord, Message, RecordDict
        from noisewise.flower.client import make_client_app
        lines = []
        class Keep(logging.Handler):
            def emit(self, record):
                lines.append(record.getMessage())
        logging.getLogger("noisewise").addHandler(Keep())
        config = ConfigRecord({"server-round": 1, "learning-rate": 0.2})
        message = Message(RecordDict({"arrays": start_arrays(), "config": config}), 7, "train")
        message.metadata.__dict__["_message_id"] = "1"
        reply = make_client_app()(message, context(vault=sys.argv[2]))
        print(json.dumps([reply.error.code, reply.error.reason, lines]))
    """
    import textwrap

    relay, vault = accounts
    with vault_site(relay, vault, start=False) as site:
        done = subprocess.run(
            [*reaching(), sys.executable, "-c", textwrap.dedent(program),
             str(ROOT / "tests" / "helpers"), str(site.socket)],
            capture_output=True, text=True, timeout=600, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        code, reason, lines = json.loads(done.stdout.splitlines()[-1])
        assert (code, reason) == (451, "not taking part")
        assert "the vault does not run, or the path is wrong" in lines[0]
        assert site.statement().entries == ()
