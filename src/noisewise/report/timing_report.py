"""The time of each part of a run's rounds, as text and as ``timing.json``."""

from __future__ import annotations

from pathlib import Path

from noisewise.federation.stopwatch import Stopwatch
from noisewise.storage import to_json, write_atomic
from noisewise.text import align_columns

__all__ = ["report_timing", "timing_text"]


def timing_text(clock: Stopwatch) -> str:
    """Return a table with a line for each part of the rounds."""
    if clock.rounds == 0:
        return "no round was run, so there are no times: the run was already finished"
    table = [("part of a round", "seconds", "per round", "share")]
    for row in clock.rows():
        seconds, share = f"{row['seconds']:.3f}", f"{100 * row['share']:.1f} %"
        table.append((row["part"], seconds, f"{row['seconds_per_round']:.4f}", share))
    lines = align_columns(table, right=range(1, 4))
    summary = clock.summary()
    lines.append(
        f"{clock.rounds} rounds in {clock.total:.1f} s, {summary['rounds_per_minute']:.3g} per "
        f"minute; time outside local training: {100 * clock.overhead:.1f} %"
    )
    return "\n".join(lines)


def report_timing(clock: Stopwatch, folder: Path) -> str:
    """Write ``timing.json`` into the folder of a run, if it ran rounds, and return the table."""
    if clock.rounds:
        content = to_json(clock.summary(), indent=1) + "\n"
        write_atomic(folder / "timing.json", content.encode())
    return timing_text(clock)
