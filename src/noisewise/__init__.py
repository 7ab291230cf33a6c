"""Federated learning where each client has its own privacy budget and nobody trusts the server."""

__version__ = "0.1.0"
