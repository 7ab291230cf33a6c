"""The goals of the study of docs/utility.md beside what was reached."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from utility import DISTS, FEDERATIONS, IMAGES, METHODS, ORDERS, REFERENCES, ROOT
from utility_cells import accuracies, default_differences, leads, standard_error, table

from noisewise.aggregation.methods import make_method

ORDER_TITLES = ("random order", "small sites stricter", "large sites stricter")  # of `ORDERS`
LEVELS = [  # data, part, populations, accuracy in percent
    ("MNIST, scattering", "mnist", "all nine", DISTS, 93.5),
    ("MNIST, scattering", "mnist", "Dist1 to Dist3", DISTS[:3], 96.0),
    ("Fashion-MNIST, scattering", "fashion", "all nine", DISTS, 80.0),
    ("CIFAR-10, scattering", "cifar10", "Dist1 to Dist3", DISTS[:3], 45.0),
    ("CIFAR-10, scattering", "cifar10", "Dist6 to Dist9", DISTS[5:], 38.0),
    ("CIFAR-10, public encoder", "encoder", "all nine", DISTS, 72.0),
    ("CIFAR-10, public encoder", "encoder", "Dist1 to Dist3", DISTS[:3], 77.0),
]
SPEED = ROOT / "docs" / "speed_heads.md"
Row = tuple[str, str, str, str]


def goals() -> list[str]:
    """The table of goals, and which methods are ahead of NoiseWise."""
    rows = [*_levels(), *_federations(), *_defaults(), *_times()]
    lines = table(["data", "goal", "outcome (NoiseWise)", "met"], rows)
    ahead = "; ".join(_ahead()) or "nowhere"
    return [
        *lines,
        "- The goal for real federations compares NoiseWise with methods that disclose nothing: "
        "Robust-HDP. `Alone` discloses nothing either, but it is not a common model: its accuracy "
        "is that of each client's own model on this client's own records.",
        "- Methods that need epsilons or numbers of records are ahead of NoiseWise by more than "
        f"0.5 points and two standard errors here: {ahead}.",
        "- heart: FLamby publishes accuracies with differential privacy for the same hospitals "
        "(0.712 without it). They hold for FLamby's own preprocessing and split, with fewer "
        "records, so they are not compared with ours.",
        "- CIFAR-100 was not run: our machines could not download its images, and we found no "
        "package that has them. With the official archive, `python studies/utility.py cifar100 "
        "cifar100_encoder` runs `configs/cifar100_head.toml` and `configs/cifar100_encoder.toml`.",
        "",
    ]


def _levels() -> list[Row]:
    rows: list[Row] = []
    for data, part, populations, dists, goal in LEVELS:
        means = {d: float(np.mean(list(accuracies(part, d, "NoiseWise").values()))) for d in dists}
        worst = min(means, key=lambda dist: means[dist])
        outcome = f"{means[worst]:.1f} % in the worst ({worst})"
        wanted = f"at least {goal:g} % in {populations} populations"
        if populations != "all nine":
            wanted = f"at least {goal:g} % in {populations}"
        rows.append((data, wanted, outcome, _met(means[worst] >= goal)))
    return rows


def _federations() -> list[Row]:
    rows: list[Row] = []
    [rival] = [m for m in METHODS + REFERENCES if m != "NoiseWise" and _silent(m)]
    for part, dist in FEDERATIONS.items():
        found = [leads(part, dist + order, rival) for order in ORDERS]
        worst = int(np.argmax([np.mean(values) for values in found]))
        mean, error = float(np.mean(found[worst])), standard_error(found[worst])
        outcome = f"{rival} minus NoiseWise: {mean:+.2f} ± {error:.2f} ({ORDER_TITLES[worst]})"
        wanted = f"at most 0.5 points or two standard errors below {rival}, 10 seeds"
        met = all(np.mean(v) <= _allowed(v) for v in found) and all(len(v) >= 10 for v in found)
        rows.append((part, wanted, outcome, _met(met)))
    return rows


def _defaults() -> list[Row]:
    places = [(part, dist) for part in IMAGES for dist in DISTS]
    places += [(part, dist + order) for part, dist in FEDERATIONS.items() for order in ORDERS]
    cells = [default_differences(part, population) for part, population in places]
    means = [float(np.mean(values)) for values in cells]
    everywhere = all(mean >= -max(1.0, 2 * standard_error(v)) if len(v) > 1 else mean >= -1.0
                     for mean, v in zip(means, cells, strict=True))  # fmt: skip
    what = "automatic rate"
    return [
        (what, "at most 1 point or two paired standard errors below the best rate of a grid in all "
         f"{len(means)} cells", f"{min(means):+.2f} in the worst cell", _met(everywhere)),
        (what, "at most 0.3 points below on average", f"{np.mean(means):+.2f}",
         _met(float(np.mean(means)) >= -0.3)),
    ]  # fmt: skip


def _times() -> list[Row]:
    """The goals of docs/speed_heads.md, which has the measurements."""
    lines = SPEED.read_text().partition("\n| goal |")[2].partition("\n\n")[0].splitlines()[2:]
    rows: list[Row] = []
    for line in lines:
        goal, measured, met = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append(("[time](speed_heads.md)", goal, measured, met))
    return rows


def _ahead() -> list[str]:
    """Private methods with disclosures that NoiseWise is below, with the difference."""
    found = []
    for part, dist in FEDERATIONS.items():
        for order, title in zip(ORDERS, ORDER_TITLES, strict=True):
            for name in METHODS + REFERENCES:
                method = make_method(name)
                if not method.private or name in ("Alone", "Oracle") or _silent(name):
                    continue
                values = leads(part, dist + order, name)
                if np.mean(values) > _allowed(values):
                    shown = f"{np.mean(values):+.1f} ± {standard_error(values):.1f} points"
                    found.append(f"{name} on {part}, {title} ({shown})")
    return found


def _silent(name: str) -> bool:
    """Whether a method has a common model and needs no disclosure."""
    method = make_method(name)
    return method.shares_model and not method.needs


def _allowed(values: Sequence[float]) -> float:
    return max(0.5, 2 * standard_error(values))


def _met(value: bool) -> str:
    return "yes" if value else "**no**"
