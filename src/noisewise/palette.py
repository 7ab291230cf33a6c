"""The colours of figures, pages and notebooks."""

from __future__ import annotations

__all__ = [
    "AMBER",
    "BLUE",
    "BROWN",
    "DARK_PALETTE",
    "GREEN",
    "GRID",
    "INK",
    "MUTED",
    "ORANGE",
    "PALETTE",
    "PINK",
    "SKY",
    "VIOLET",
]

INK, MUTED, GRID = "#1b1f24", "#6a7077", "#e2e5e9"

PALETTE = (
    ("#0072b2", "#005b8f"),
    ("#e69f00", "#8f6300"),
    ("#009e73", "#00704f"),
    ("#cc79a7", "#a0487a"),
    ("#d55e00", "#a84a00"),
    ("#56b4e9", "#1f78ab"),
    ("#8c6d31", "#6b5222"),
    ("#7d6bb3", "#5f4f94"),  # of Alone only
)
"""Okabe and Ito's palette for colour-blind readers: (colour of marks, darker colour of text)."""

BLUE, AMBER, GREEN, PINK, ORANGE, SKY, BROWN, VIOLET = (mark for mark, _ in PALETTE)

DARK_PALETTE = (
    "#4aa8e0",
    "#f0b93c",
    "#2fc49a",
    "#e6a1c8",
    "#f58a42",
    "#9ad6f7",
    "#c9aa68",
    "#b9a9ec",
)
"""The colours of marks on a dark page, in the order of `PALETTE`."""
