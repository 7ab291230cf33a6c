"""Datasets, partitions and populations: who the clients are and what they hold."""

from noisewise.data.specs import ClientSpec

__all__ = ["ClientSpec"]
