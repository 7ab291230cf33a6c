"""The output of `noisewise flower check`. Nothing is charged; Flower is not required."""

from __future__ import annotations

import numpy as np

from noisewise.errors import InvalidValueError
from noisewise.privacy.budget import budget_warnings
from noisewise.privacy.ledger import metrics_charge, training_charge
from noisewise.privacy.plan import LocalPlan
from noisewise.site.site_file import Site
from noisewise.site.training_round import RECORDS_TOLERANCE
from noisewise.training.engine import IsolatedGradients
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout

__all__ = ["check_site"]


def check_site(site: Site) -> str:
    """Read records and ledger, and describe a round's cost and the remaining budget.

    Raises:
        NoisewiseError: a file is missing, damaged or does not fit the others.
    """
    plan, part, data = site.plan, site.config.metrics, site.data()
    declared, unit = site.config.declared_units, plan.unit
    if len(data) == 0:
        source = site.config.data.file or site.config.data.function
        persons = ", and whether data.person names each record's person" * (unit == "person")
        allowed = (
            "has no usable record, so replies would contain only noise: compare shape, type and "
            f"classes of the records with [model] and [task] of the site's file{persons}"
        )
        raise InvalidValueError("data", source, allowed)
    lines = [
        *(f"WARNING: {text}" for text in budget_warnings(site.budget, declared, unit)),
        _records(data.count(unit), declared, f"data.{unit}s", f"{unit}s"),
        _unit(plan, data),
        f"A round: {plan.steps_per_round} steps at q = {plan.sample_rate:.4g}, "
        f"z = {plan.noise_multiplier:.4g}, clipping norm {plan.clip_norm:g}; the budget is planned "
        f"for {plan.rounds} rounds.",
        _isolation(site),
        *_features(site),
    ]
    charges = {training_charge(plan): site.rounds_allowed}
    if part is not None:
        charges[metrics_charge(part.noise_multiplier)] = part.releases
        share = 100 * part.noise_multiplier / part.records
        lines += [
            _records(
                site.held_out().count(unit), part.records, "metrics.records", f"held-out {unit}s"
            ),
            f"Metrics: at most {part.releases} noised scores, each with noise of {share:.2g} % "
            "(one standard deviation). Training has so much more noise that both fit.",
        ]
    else:
        lines.append("No metrics: requests to evaluate are refused.")
    declaration = site.config.declaration
    lines.append(
        f"Declaration: servers that ask receive unit {unit}, epsilon {site.budget.epsilon:g} and "
        f"delta {site.budget.delta:g}."
        if declaration is not None and declaration.publish
        else "No declaration: servers that ask for unit and budget are refused."
    )
    with site.open_ledger() as ledger:
        statement = ledger.statement()
        left = {charge: ledger.remaining(charge, at_most=most) for charge, most in charges.items()}
    lines.append(
        f"Promised epsilon {statement.epsilon:g} at delta {statement.delta:g}; "
        f"spent {statement.spent:.4g}."
    )
    words = {"training": "rounds", "metrics": "noised scores"}
    lines += [f"Left: {left[c]} of {most} {words[c.purpose]}." for c, most in charges.items()]
    return "\n".join(lines)


def _unit(plan: LocalPlan, data: TensorData) -> str:
    """What the budget protects, and how many persons have more records than a step uses."""
    if data.persons is None or plan.max_records is None:
        return "Unit: the budget protects each record."
    sizes = np.diff(data.persons.starts)
    more = int((sizes > plan.max_records).sum())
    return (
        f"Unit: the budget protects each person with all of their records ({len(data)} records). A "
        f"step uses at most {plan.max_records} of a person, chosen at random; {more} of "
        f"{len(sizes)} persons have more."
    )


def _isolation(site: Site) -> str:
    """Whether records can be trained in batches without changing each other's rounding."""
    theta = ParameterLayout.of(site.model).flatten(site.model)
    check = IsolatedGradients(site.model, site.loss).prepare(theta, site.record_form)
    if check.sizes == (1,):
        return f"WARNING: records are trained one by one, which is slow: {check.reason}."
    return (
        f"Self-check: records do not change each other's rounding in {len(check.sizes)} batch "
        f"sizes from {check.sizes[0]} to {check.sizes[-1]}; no other size is used."
    )


def _features(site: Site) -> list[str]:
    """The feature map, with the hashes that an operator compares between sites."""
    features = site.features
    if features is None:
        return []
    shape = list(features.input_shape)
    return [
        f"Features: {features.name}, {shape} -> {features.width}; stored in {site.feature_folder}.",
        f"Features as declared: {features.declared_sha256}; the same at every site.",
        f"Features as computed: {features.identity}; the same at every site with the same "
        "processor, libraries and code.",
    ]


_FOLLOWS = {
    "data.persons": "Sampling rate, number of steps and noise follow from it, and a server can "
    "estimate the noise of a reply",
    "data.records": "Sampling rate, number of steps and noise follow from it, and a server can "
    "estimate the noise of a reply",
    "metrics.records": "The noised score is divided by it",
}


def _records(n_usable: int, declared: int, field: str, noun: str) -> str:
    """Compare a declared number of records with the true one.

    A plan for another number keeps its guarantee, but the model or the score is less accurate. A
    plan for exactly the true number suggests that the number was counted: arXiv 2605.15648 attacks
    libraries whose mechanism depends on the true number.
    """
    if n_usable == declared:
        many = noun.removeprefix("held-out ")
        one = many.removesuffix("s")
        return (
            f"WARNING: {field} = {declared} is exactly the number of usable {noun}. "
            f"{_FOLLOWS[field]}. A counted number reveals how many {many} there are. If it "
            f"changes when a {one} is added or removed, one {one} changes the mechanism itself, "
            "and no noise hides that. Declare a rounded number, for example "
            f"{_rounded(declared)}, and keep it."
        )
    if abs(n_usable - declared) <= RECORDS_TOLERANCE * declared:
        return f"{n_usable} usable {noun}, {field} = {declared}: matches the plan."
    words = f"{n_usable} usable {noun}, but {field} = {declared}"
    return f"WARNING: {words}: change one of the two."


def _rounded(number: int) -> int:
    """The next larger round number: two digits and zeros, or a multiple of 5."""
    step = max(5, int(10 ** (len(str(number)) - 2)))
    return (number // step + 1) * step
