"""Errors."""

from __future__ import annotations

from zero_trial.errors import ZeroTrialError


class ServiceError(ZeroTrialError):
    """A verb was refused; nothing has changed."""


class NotFound(ServiceError):
    """There is no such thing (404)."""


class Conflict(ServiceError):
    """It exists, but not in a state in which this can be done (409; Determined answers 400 to some, see the routes)."""


class Invalid(ServiceError):
    """The request itself is wrong: a configuration, a field, a stale run id (400)."""


class PermissionDenied(ServiceError):
    """This token may not ask for this (403)."""


class Unsupported(ServiceError):
    """Determined can do this, this master cannot (501); the message says what to do instead."""
