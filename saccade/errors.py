"""Errors a user can cause. Each message names the value, the allowed range and the way out."""

from __future__ import annotations


class SaccadeError(ValueError):
    """Base of every error that bad input can cause; the command line prints it as one line and exits with code 2."""


class ModelError(SaccadeError):
    """A checkpoint that is missing, broken, or of a family this engine cannot run correctly."""


class PolicyError(SaccadeError):
    """A policy text, method name or method option that is unknown or out of range."""


class RequestError(SaccadeError):
    """A request that cannot be served: empty or over-long prompt, bad sampling parameter, unreadable prompt file."""


class CapacityError(SaccadeError):
    """A request that can never fit the KV pool."""
