"""Strict tables of TOML files: the base of their pydantic models, and the types of their fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "OpenShare", "Positive", "Share", "Strict"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number > 0."""

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""A number in (0, 1]."""

OpenShare = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
"""A number in (0, 1)."""

Count = Annotated[int, Field(ge=1)]
"""A whole number >= 1."""


class Strict(BaseModel):
    """A frozen table that converts no types and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
