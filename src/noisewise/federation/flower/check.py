"""What `noisewise flower check` tells a site's people. Nothing is charged; needs no Flower."""

from __future__ import annotations

from noisewise.federation.flower.site import Site
from noisewise.privacy.ledger import metrics_charge, training_charge

__all__ = ["FAR", "check_site"]

FAR = 0.1
"""Share by which a number of records may differ from the planned one without a warning."""


def check_site(site: Site) -> str:
    """Read records and ledger, and say what a round costs and how long the budget lasts.

    Raises:
        NoisewiseError: a file is missing, damaged or does not fit the others.
    """
    plan, part = site.plan, site.config.metrics
    lines = [
        _records(len(site.data()), site.config.data.records, "records"),
        f"A round: {plan.steps_per_round} steps at q = {plan.sample_rate:.4g}, "
        f"z = {plan.noise_multiplier:.4g}, clipping norm {plan.clip_norm:g}; the budget is planned "
        f"for {plan.rounds} rounds.",
    ]
    charges = {training_charge(plan): site.rounds_allowed}
    if part is not None:
        charges[metrics_charge(part.noise_multiplier)] = part.releases
        share = 100 * part.noise_multiplier / part.records
        lines += [
            _records(len(site.held_out()), part.records, "held-out records"),
            f"Metrics: at most {part.releases} noised accuracies, each with noise of {share:.2g} % "
            "(one standard deviation). Training has so much more noise that both fit.",
        ]
    else:
        lines.append("No metrics: requests to evaluate are refused.")
    with site.open_ledger() as ledger:
        statement = ledger.statement()
        left = {charge: ledger.room(charge, at_most=most) for charge, most in charges.items()}
    lines.append(
        f"Promised epsilon {statement.epsilon:g} at delta {statement.delta:g}; "
        f"spent {statement.spent:.4g}."
    )
    words = {"training": "rounds", "metrics": "noised accuracies"}
    lines += [f"Left: {left[c]} of {most} {words[c.purpose]}." for c, most in charges.items()]
    return "\n".join(lines)


def _records(found: int, planned: int, what: str) -> str:
    """A plan for another number of records keeps its promise, but trains or tells it badly."""
    if abs(found - planned) <= FAR * planned:
        return f"{found} {what}, {planned} planned: sound."
    return f"WARNING: {found} {what} that can be used, {planned} planned: correct one of them."
