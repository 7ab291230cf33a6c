"""`new_config`: the text of a config for a dataset, with defaults that need no tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from noisewise.checks import known_name, matching_name, positive_int, positive_number
from noisewise.data.catalogue import CATALOGUE
from noisewise.data.datasets import dataset_names
from noisewise.data.federations import FEDERATIONS

__all__ = ["has_own_clients", "new_config"]


def has_own_clients(data: str) -> bool:
    """Whether a dataset has clients of its own, so that no number of clients is needed."""
    return Path(data).is_dir() or matching_name(data, FEDERATIONS) in FEDERATIONS


def new_config(
    data: str,
    *,
    clients: int = 10,
    epsilons: Sequence[float] = (1.0,),
    delta: float = 1e-4,
    rounds: int = 40,
    target: str = "target",
    classes: Sequence[str] | None = None,
) -> str:
    """Write a config: a private linear head on public features, with an automatic learning rate.

    Args:
        data: a name from `dataset_names`, or a folder with one CSV file for each client.
        clients: number of clients, if the dataset has none of its own.
        epsilons: one for all clients, or one for each.
        delta: of every client.
        rounds: number of rounds.
        target: for a folder: the column with the class.
        classes: for a folder: all classes, which are declared and not read from the files.

    Returns:
        TOML text with comments. `load_config` accepts it.

    Raises:
        InvalidValueError: the dataset is unknown, or a number is not positive.

    Example:
        >>> print(new_config("digits", clients=4, epsilons=[2.0]).splitlines()[0])
        # noisewise compare THIS_FILE
    """
    positive_int("clients", clients)
    positive_int("rounds", rounds)
    for value in (*epsilons, delta):
        positive_number("epsilon", value)
    if Path(data).is_dir():
        lines = ['name = "csv" # each .csv file of the folder is a client']
        lines += [f"folder = {_quoted(data)}", f"target = {_quoted(target)}"]
        if classes is not None:
            lines.append(f"classes = [{', '.join(_quoted(name) for name in classes)}]")
    else:
        data = known_name("data", data, dataset_names())
        lines = [f'name = "{data}"']
    if has_own_clients(data):
        lines += ['partition = "natural" # the real clients of the data']
    else:
        lines += [
            f"clients = {clients}",
            'partition = "iid" # or "shards", "dirichlet", "quantity"',
        ]
    lines.append("test_fraction = 0.2")
    epsilon = f"{epsilons[0]!r}" if len(epsilons) == 1 else f"[{', '.join(map(repr, epsilons))}]"
    feature = 'name = "scattering" # fixed wavelets; uses no data, so it costs no privacy'
    if data not in CATALOGUE:
        feature = 'name = "identity" # each record divided by its own norm'
    return _TEXT.format(
        data="\n".join(lines), feature=feature, epsilon=epsilon, delta=delta, rounds=rounds,
        every=max(1, rounds // 10),
    )  # fmt: skip


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_TEXT = """\
# noisewise compare THIS_FILE
# noisewise population THIS_FILE   shows the noise that each client's budget requires
# docs/config.md explains every field.
seed = 0

[data]
{data}

[features] # a public map of each record; only the head behind it is trained
{feature}

[population] # each client's own privacy budget
epsilon = {epsilon}
delta = {delta!r}
batch_share = 1.0 # one step a round with all records

[model]
name = "head"

[training]
rounds = {rounds}
learning_rate = "auto" # the server chooses its steps; nothing to tune
clip_norm = 0.25
evaluate_every = {every}

[compare]
seeds = 3
methods = ["NoiseWise", "RobustHDP", "DPFedAvg"] # `noisewise methods` lists all
"""
