"""A site whose records and engine stay in memory between requests."""

from __future__ import annotations

from dataclasses import dataclass, fields

from noisewise.site.site_file import Site
from noisewise.training.engine import IsolatedGradients
from noisewise.training.local import TensorData
from noisewise.training.parameters import ParameterLayout

__all__ = ["LoadedSite", "keep_loaded"]


@dataclass(frozen=True)
class LoadedSite(Site):
    """A site that reads no records after its start. Changed files need a restart of the vault."""

    records: TensorData | None = None
    held_out_records: TensorData | None = None
    gradients: IsolatedGradients | None = None

    def data(self) -> TensorData:
        """See `Site.data`."""
        return super().data() if self.records is None else self.records

    def held_out(self) -> TensorData:
        """See `Site.held_out`."""
        return super().held_out() if self.held_out_records is None else self.held_out_records

    def engine(self) -> IsolatedGradients:
        """See `Site.engine`."""
        return super().engine() if self.gradients is None else self.gradients


def keep_loaded(site: Site) -> LoadedSite:
    """Check the engine on synthetic records, then read the records; both once.

    Raises:
        NoisewiseError: a file is missing or damaged, or the model cannot be trained.
    """
    engine = site.engine()
    engine.prepare(ParameterLayout.of(site.model).flatten(site.model), site.record_form)
    return LoadedSite(
        **{field.name: getattr(site, field.name) for field in fields(Site)},
        records=site.data(),
        held_out_records=None if site.config.metrics is None else site.held_out(),
        gradients=engine,
    )
