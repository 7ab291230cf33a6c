"""The base class and the field types of the pydantic models of our TOML files."""

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
    """A frozen table that does not convert types and rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
