"""Text and figure of a privacy audit."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import norm

from noisewise.federation.canary_audit import AuditResult
from noisewise.federation.hostile_audit import HostileResult
from noisewise.palette import BLUE, INK, ORANGE
from noisewise.report.chart import new_axes
from noisewise.text import align_columns

__all__ = ["audit_figure", "audit_text", "hostile_text"]


def audit_text(result: AuditResult) -> str:
    """Return the claimed epsilon, the epsilon that the guesses prove, and the verdict."""
    bound = result.bound
    lines = [
        f"claimed by the ledger     epsilon {result.claimed:.4g} at delta {bound.delta:g} "
        f"(z = {result.noise_multiplier:g}, one step on all {result.unit}s, {result.accountant})",
        f"proven by guessing        epsilon at least {bound.epsilon:.4g} (mu {bound.mu:.4g})",
        "",
    ]
    limit_heading = f"rate at most ({bound.confidence:.0%})"
    table = [("canaries", "number", "wrong guesses", "rate", limit_heading)]
    for name, number, errors, limit in (
        ("present", bound.present, bound.misses, bound.miss_bound),
        ("absent", bound.absent, bound.false_alarms, bound.alarm_bound),
    ):
        table.append((name, str(number), str(errors), f"{errors / number:.4f}", f"{limit:.4f}"))
    lines += align_columns(table, right=range(1, 5))
    verdict = (
        "VIOLATED: the guesses prove a larger epsilon than claimed"
        if result.violated
        else "consistent: the guesses prove no larger epsilon than claimed"
    )
    kind = "canaries"
    if result.unit == "person":
        kind = f"persons with {result.records_per_person} records each"
    return "\n".join([*lines, "", f"{verdict} ({result.runs} runs of {result.canaries} {kind})"])


def hostile_text(model: str, deployed: HostileResult, simulator: HostileResult) -> str:
    """Return how much one record changed sums of clipped gradients under hostile parameters."""
    lines = [
        f"parameters chosen by a hostile server, model {model}, synthetic records",
        "",
    ]
    table = [("engine", "pairs of sums", "largest change / c", "above c")]
    for name, result in (("deployed client", deployed), ("simulator", simulator)):
        table.append((name, str(result.trials), f"{result.ratio:.7f}", str(result.above)))
    lines += align_columns(table, right=range(1, 4))
    verdict = (
        "VIOLATED: one record changed a sum by more than the clipping norm c"
        if deployed.violated
        else "holds: no record changed a deployed client's sum by more than the clipping norm c"
    )
    note = "The simulator has no adversary, so its engine does not isolate records."
    return "\n".join([*lines, "", verdict, note])


def audit_figure(result: AuditResult) -> Figure:
    """Return a figure of the scores of present and absent canaries and their expected densities."""
    figure, axes = new_axes(8.0, 4.2)
    z = result.noise_multiplier
    present, absent = np.array(result.present), np.array(result.absent)
    low = min(absent.min(), -3.5 * z)
    high = max(present.max(), 1 + 3.5 * z)
    edges = np.linspace(low, high, 70).tolist()
    for values, centre, colour, name in (
        (absent, 0.0, BLUE, "absent"),
        (present, 1.0, ORANGE, "present"),
    ):
        axes.hist(
            values, bins=edges, density=True, color=colour, alpha=0.35, label=f"{name}: scores"
        )
        grid = np.linspace(low, high, 400)
        density = norm.pdf(grid, centre, z)
        axes.plot(grid, density, color=colour, lw=1.6, label=f"{name}: expected by the plan")
    axes.axvline(
        result.bound.threshold,
        color=INK,
        ls="--",
        lw=1,
        label="right of this line: guessed present",
    )
    axes.set_xlabel("score of a canary, computed from the client's reply")
    axes.set_ylabel("density")
    axes.set_title(
        f"claimed epsilon {result.claimed:.3f}, proven at least {result.bound.epsilon:.3f}: "
        + ("VIOLATED" if result.violated else "consistent"),
        fontsize=10,
        loc="left",
    )
    axes.legend(fontsize=8.5, framealpha=0.9, edgecolor="none")
    return figure
