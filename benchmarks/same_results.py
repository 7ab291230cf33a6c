"""Compare the final parameters of seeded runs with those of another commit, bit for bit.

    python benchmarks/same_results.py --base main [--only CASE ...] [--without-heads]

Each case runs twice: with the source of the base commit, in a temporary git worktree, and with the
source of this folder. Both use this interpreter on this machine, because the bits depend on the
processor. The table shows the SHA-256 of the result in both trees; the exit code is 1 if a case
differs or fails.

The closed form of heads (`noisewise.training.heads`) changed the last bits of models with one
linear layer. With `--without-heads`, this folder trains these models like any others, so that a
comparison with an older commit shows all other changes.

The cases "flower", "instruction" and "ledger" need `requirements-extras.lock`. MNIST is stored in
the folder `NOISEWISE_CACHE`, or else in the system's folder for temporary files. Everything else
that the package caches is separate for each tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from flower_processes import Deployment  # noqa: E402

LINE = "{:<12}  {:<16}  {:<16}  {}"
SECONDS = 300  # limit of one command
CLI = ("-m", "noisewise.cli")
CLI_WITHOUT_HEADS = (
    "-c",
    "from noisewise.federation import executors; executors.head_of = lambda model, loss: None; "
    "from noisewise.cli import main; main()",
)
DEMO = ("demo.toml", "training.rounds=10")
FIRST_SITE = Path("demo", "site-0")

KEYED_CLIENT = '''"""The client of the app, with keyed numbers in place of random ones."""

import hashlib
import os

import numpy as np

from noisewise.randomness import SecureRandom


def keyed(purpose, step):
    words = f"{os.environ['SAME_RESULTS_SITE']} {purpose} {step}"
    key = int.from_bytes(hashlib.sha256(words.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def poisson_sample(self, step, size, rate):
    return np.flatnonzero(keyed("sampling", step).random(size) < rate)


def normal(self, step, size):
    return keyed("noise", step).standard_normal(size)


# The methods of the class, not its name: modules that have imported the class use them too.
SecureRandom.poisson_sample = poisson_sample
SecureRandom.normal = normal
SecureRandom.model_seed = lambda self: 0

from noisewise_app import own_client  # noqa: E402

app = own_client.app
'''

EQUAL_MEAN = '''"""An aggregator whose result does not depend on the order of two sites."""

import numpy as np

from noisewise.aggregation import Aggregation, weighted_sum


class EqualMean:
    needs = frozenset()
    reads_all_coordinates = True

    def aggregate(self, view, state):
        n = len(view.updates.ids)
        if n != 2:
            raise RuntimeError(f"{n} updates: this comparison needs those of both sites")
        weights = np.full(n, 1 / n)
        return Aggregation(weighted_sum(view.updates.values, weights), weights, None, state)
'''


class CaseError(RuntimeError):
    """A case has no result, for example because a command failed."""


@dataclass(frozen=True)
class Tree:
    """A source tree, and the folder for the files of its runs."""

    source: Path
    work: Path
    cli: tuple[str, ...] = CLI

    def variables(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(self.source / "src"),
            "NOISEWISE_CACHE": str(self.work / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables()}

    def python(self, *words: str, cwd: Path | None = None) -> str:
        """Run Python with this source; return what it prints."""
        result = subprocess.run(
            [sys.executable, *words], env=self.environment(), cwd=cwd or self.work,
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        if result.returncode:
            end = (result.stdout + result.stderr).strip()[-1500:]
            raise CaseError(f"exit code {result.returncode} of python {' '.join(words)}:\n{end}")
        return result.stdout

    def noisewise(self, *words: str, cwd: Path | None = None) -> str:
        return self.python(*self.cli, *words, cwd=cwd)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function once for the same arguments; a failure is raised again."""
    outcomes: dict[tuple[Any, ...], Any] = {}

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if arguments not in outcomes:
            try:
                outcomes[arguments] = function(*arguments)
            except Exception as error:
                outcomes[arguments] = error
        if isinstance(outcomes[arguments], Exception):
            raise outcomes[arguments]
        return outcomes[arguments]

    return call


@contextmanager
def two_trees(commit: str, cli: tuple[str, ...]) -> Iterator[tuple[Tree, Tree]]:
    """A temporary worktree of the commit, and this folder with its own command line."""
    stored = os.environ.get("NOISEWISE_CACHE") or Path(tempfile.gettempdir(), "noisewise-datasets")
    datasets = Path(stored).resolve() / "datasets"
    datasets.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="same-results-") as temporary:
        folder = Path(temporary)
        source = folder / "source"
        subprocess.run([*git, "add", "--quiet", "--detach", str(source), commit], check=True)
        try:
            trees = Tree(source, folder / "base"), Tree(ROOT, folder / "here", cli)
            for tree in trees:
                (tree.work / "cache").mkdir(parents=True)
                (tree.work / "cache" / "datasets").symlink_to(datasets)
                file = tree.python("-c", "import noisewise; print(noisewise.__file__)").strip()
                if not Path(file).is_relative_to(tree.source):
                    raise SystemExit(f"{file} is imported in place of {tree.source}/src")
            yield trees
        finally:
            subprocess.run([*git, "remove", "--force", str(source)], check=True)


def parameters_hash(run: Path) -> str:
    """SHA-256 of the values of the trained model; names and metadata of the file do not count."""
    file = run / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, framework="np") as opened:
        header = (opened.metadata() or {}).get("noisewise")
    # In the order of the parameter vector; older files hold the vector itself.
    names = sorted(tensors) if header is None else json.loads(header)["trained"]
    digest = hashlib.sha256()
    for name in names:
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def run_words(tree: Tree, output: Path, method: str, config: str, *settings: str) -> list[str]:
    """Words of `noisewise run`."""
    changes = [word for setting in settings for word in ("--set", setting)]
    path = str(tree.source / "configs" / config)
    return ["run", path, "--method", method, "--seed", "0", "--output", str(output), *changes]


@once
def trained(tree: Tree, method: str, config: str, *settings: str) -> str:
    """Hash of a run from its beginning to its end in one process."""
    output = Path(tempfile.mkdtemp(dir=tree.work))
    tree.noisewise(*run_words(tree, output, method, config, *settings), "--workers", "1")
    return parameters_hash(output / f"{method}-seed0")


# ------------------------------------------------------------ killed and resumed


@once
def killed(tree: Tree) -> Path:
    """The folder of a run whose processes were all killed after its second round."""
    output = tree.work / "killed"
    words = [*tree.cli, *run_words(tree, output, "NoiseWise", *DEMO)]
    run = output / "NoiseWise-seed0"
    rounds, ends = run / "rounds.jsonl", time.monotonic() + SECONDS
    with open(tree.work / "killed.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words, "--workers", "2"], env=tree.environment(), cwd=tree.work,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        while process.poll() is None and time.monotonic() < ends:
            if rounds.exists() and rounds.read_bytes().count(b"\n") >= 2:
                break
            time.sleep(0.005)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != -signal.SIGKILL or (run / "result.json").exists():
        raise CaseError(f"the run was not killed: {(tree.work / 'killed.log').read_text()[-1500:]}")
    return output


@once
def resumed(begun_by: Tree, tree: Tree) -> str:
    """Hash of a run that was killed in one tree and resumed by another."""
    output = Path(tempfile.mkdtemp(dir=tree.work))
    shutil.copytree(killed(begun_by), output, dirs_exist_ok=True)
    tree.noisewise(*run_words(tree, output, "NoiseWise", *DEMO), "--workers", "1")
    result = parameters_hash(output / "NoiseWise-seed0")
    whole = trained(tree, "NoiseWise", *DEMO)
    if result != whole:
        raise CaseError(f"resumed {result[:16]}, but {whole[:16]} without an interruption")
    return result


# ------------------------------------------------------------ Flower on loopback


@once
def flower_round(tree: Tree) -> Path:
    """The app's folder after one round of a SuperLink and two SuperNodes."""
    app = tree.work / "app"
    tree.noisewise("flower", "new", str(app))
    tree.python("demo.py", "demo", "2", "1", cwd=app)
    package = app / "noisewise_app"
    (package / "client_app.py").rename(package / "own_client.py")
    (package / "client_app.py").write_text(KEYED_CLIENT)
    (package / "equal_mean.py").write_text(EQUAL_MEAN)
    config = {
        "method": '"noisewise_app.equal_mean:EqualMean"',
        "noise-floor": 0.0,
        "min-clients": 2,
        "num-rounds": 1,
        "round-seconds": float(SECONDS),
        "output": f'"{app / "run"}"',
    }
    with Deployment(tree.work / "processes") as there:
        there.environment.update(tree.variables())
        there.superlink()
        for number in range(2):
            there.environment["SAME_RESULTS_SITE"] = str(number)
            there.supernode(f"site-{number}", f'site="{app}/demo/site-{number}/site.toml"')
        there.run("run", app, " ".join(f"{name}={value}" for name, value in config.items()))
        there.wait("run", SECONDS)
        if not (app / "run" / "model.safetensors").exists():
            logs = "\n".join(there.log(name)[-1500:] for name in ("run", "site-0", "site-1"))
            raise CaseError(f"no round on loopback:\n{logs}")
    return app


def flower_parameters(base: Tree, tree: Tree) -> str:
    return parameters_hash(flower_round(tree) / "run")


@once
def statement(written_by: Tree, tree: Tree) -> dict[str, Any]:
    """The ledger of one tree's first site as a tree reads it."""
    path = flower_round(written_by) / FIRST_SITE / "site.ledger"
    content: dict[str, Any] = json.loads(tree.noisewise("ledger", "show", "--json", str(path)))
    return content


def instructions(base: Tree, tree: Tree) -> str:
    """The instruction's hash in the ledger: by this a site recognises a repeated instruction."""
    (entry,) = statement(tree, tree)["entries"]
    return str(entry["instruction"])


def ledger_of_base(base: Tree, tree: Tree) -> str:
    """Hash of what a tree reads from a ledger of the base.

    Fails if the tree finds the ledger or the site file invalid. The ledger's last hash covers all
    entries.
    """
    fields = ("ledger_id", "dataset_id", "epsilon", "delta", "accountant", "spent", "left",
              "rounds_left", "head", "events")  # fmt: skip
    site = flower_round(base) / FIRST_SITE
    tree.noisewise("ledger", "verify", str(site / "site.ledger"))
    tree.noisewise("flower", "check", str(site / "site.toml"))
    content = {name: statement(base, tree)[name] for name in fields}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# ------------------------------------------------------------ the table

Case = Callable[[Tree, Tree], str]
"""(base, tree) -> SHA-256 of the tree's result."""


def simulation(method: str, *config: str) -> Case:
    return lambda base, tree: trained(tree, method, *config)


GUARD = "policy.tolerated_attackers=1"
ATTACK = 'attacks=[{kind="sign_flip",clients=["client-00"]}]'

CASES: dict[str, tuple[str, Case]] = {
    "noisewise": ("demo, NoiseWise", simulation("NoiseWise", *DEMO)),
    "robust-hdp": ("demo, RobustHDP", simulation("RobustHDP", *DEMO)),
    "pfa": ("demo, PFA", simulation("PFA", *DEMO)),
    "dpfedavg": ("demo, DPFedAvg", simulation("DPFedAvg", *DEMO)),
    "guard": ("demo, RobustHDP with a guard", simulation("RobustHDP", *DEMO, GUARD)),
    "attack": (
        "demo, NoiseWise with a guard, one attacker flips signs",
        simulation("NoiseWise", *DEMO, GUARD, ATTACK),
    ),
    "cnn": (
        "one round of the CNN on 3,200 records of MNIST",
        simulation("RobustHDP", "mnist.toml", "training.rounds=1", "data.limit=3200"),
    ),
    "killed": (
        "demo, NoiseWise, killed and resumed; equals the run without interruption",
        lambda base, tree: resumed(tree, tree),
    ),
    "resume-base": (
        "the same, begun and killed with the base and resumed by both trees",
        lambda base, tree: resumed(base, tree),
    ),
    "flower": ("one Flower round on loopback, two sites, keyed randomness", flower_parameters),
    "instruction": ("hash of that round's instruction in a site's ledger", instructions),
    "ledger": (
        "a ledger and a site file of the base's Flower round, read by both trees",
        ledger_of_base,
    ),
}


def attempt(case: Case, base: Tree, tree: Tree) -> tuple[str | None, str]:
    """The case's hash, or None and the error message."""
    try:
        return case(base, tree), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def main() -> int:
    about = "\n".join(f"  {name:<12}  {words}" for name, (words, _) in CASES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"cases:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", default=CASES)
    parser.add_argument(
        "--without-heads", action="store_const", dest="cli", const=CLI_WITHOUT_HEADS, default=CLI,
        help="train a model of one linear layer like any other in this folder",
    )  # fmt: skip
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that Flower's processes end, too
    began, equal, problems = time.monotonic(), True, set[str]()
    with two_trees(options.base, options.cli) as (base, here):
        print(LINE.format("case", options.base[:16], "here", "result"), flush=True)
        for name in options.only:
            case = CASES[name][1]
            outcomes = [attempt(case, base, tree) for tree in (base, here)]
            hashes = [found for found, _ in outcomes]
            same = hashes[0] == hashes[1] and None not in hashes
            equal = equal and same
            shown = [(found or "failed")[:16] for found in hashes]
            print(LINE.format(name, *shown, "same" if same else "DIFFERS"), flush=True)
            for where, (_, problem) in zip(("base", "here"), outcomes, strict=True):
                if problem and problem not in problems:  # cases share runs
                    print(f"{name}, {where}: {problem}", file=sys.stderr, flush=True)
                problems.add(problem)
    print(f"{'all same' if equal else 'NOT all same'}; {time.monotonic() - began:.0f} s")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
