"""Strict configs and what they run."""
