"""What `noisewise flower check` tells a site's people. Nothing is charged; needs no Flower."""

from __future__ import annotations

from noisewise.privacy.budget import budget_warnings
from noisewise.privacy.ledger import metrics_charge, training_charge
from noisewise.site.site_file import Site
from noisewise.site.training_round import RECORDS_TOLERANCE
from noisewise.training.engine import IsolatedGradients
from noisewise.training.parameters import ParameterLayout

__all__ = ["check_site"]


def check_site(site: Site) -> str:
    """Read records and ledger, and say what a round costs and how long the budget lasts.

    Raises:
        NoisewiseError: a file is missing, damaged or does not fit the others.
    """
    plan, part = site.plan, site.config.metrics
    lines = [
        *(f"WARNING: {text}" for text in budget_warnings(site.budget, site.config.data.records)),
        _records(len(site.data()), site.config.data.records, "data.records", "records"),
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
            _records(len(site.held_out()), part.records, "metrics.records", "held-out records"),
            f"Metrics: at most {part.releases} noised accuracies, each with noise of {share:.2g} % "
            "(one standard deviation). Training has so much more noise that both fit.",
        ]
    else:
        lines.append("No metrics: requests to evaluate are refused.")
    declared = site.config.declaration
    lines.append(
        f"Declaration: servers that ask receive unit record, epsilon {site.budget.epsilon:g} and "
        f"delta {site.budget.delta:g}."
        if declared is not None and declared.publish
        else "No declaration: servers that ask for unit and budget are refused."
    )
    with site.open_ledger() as ledger:
        statement = ledger.statement()
        left = {charge: ledger.remaining(charge, at_most=most) for charge, most in charges.items()}
    lines.append(
        f"Promised epsilon {statement.epsilon:g} at delta {statement.delta:g}; "
        f"spent {statement.spent:.4g}."
    )
    words = {"training": "rounds", "metrics": "noised accuracies"}
    lines += [f"Left: {left[c]} of {most} {words[c.purpose]}." for c, most in charges.items()]
    return "\n".join(lines)


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
    "data.records": "Sampling rate, number of steps and noise follow from it, and a server can "
    "estimate the noise of a reply",
    "metrics.records": "The noised accuracy is divided by it",
}


def _records(found: int, declared: int, field: str, what: str) -> str:
    """Compare a declared number of records with the true one.

    A plan for another number keeps its promise, but trains or tells it badly. A plan for exactly
    the true number looks as if the number had been counted: arXiv 2605.15648 breaks libraries whose
    mechanism depends on the true number.
    """
    if found == declared:
        return (
            f"WARNING: {field} = {declared} is exactly the number of {what} that can be used. "
            f"{_FOLLOWS[field]}. If the number is counted, it tells how many records there are; if "
            "it is changed whenever a record comes or goes, one record changes the mechanism "
            f"itself, and no noise hides that. Declare a rounded number, for example "
            f"{_rounded(declared)}, and keep it."
        )
    if abs(found - declared) <= RECORDS_TOLERANCE * declared:
        return f"{found} {what} that can be used, {field} = {declared}: matches the plan."
    words = f"{found} {what} that can be used, but {field} = {declared}"
    return f"WARNING: {words}: change one of the two."


def _rounded(number: int) -> int:
    """The next larger round number: two digits and zeros, or a multiple of 5."""
    step = max(5, int(10 ** (len(str(number)) - 2)))
    return (number // step + 1) * step
