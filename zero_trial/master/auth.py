"""Passwords, tokens, and what an allocation's token permits.

There are two kinds of token. A user's (``Authorization: Bearer``) permits everything. An allocation's (``Grpc-Metadata-x-allocation-token: Bearer``)
is handed to one run of one trial and permits only requests about that allocation, its task, trial and experiment. The store keeps SHA-256 digests of
tokens and salted scrypt hashes of passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from zero_trial.master.errors import PermissionDenied
from zero_trial.master.records import Allocation, User

USER_HEADER = "authorization"
TASK_HEADER = "grpc-metadata-x-allocation-token"

_CLIENT_SALT = "GubPEmmotfiK9TMD6Zdw"  # part of Determined's protocol: every client puts it before the password
_COST = 2**14  # of scrypt: 16 MiB and some 40 ms a try (RFC 7914, section 2)


@dataclass(frozen=True)
class Principal:
    """The sender of a request: a user or an allocation; both are None where no token is asked for."""

    user: User | None = None
    allocation: Allocation | None = None

    @property
    def name(self) -> str:
        if self.user is not None:
            return self.user.name
        return f"allocation {self.allocation.id}" if self.allocation is not None else "nobody"


def new_token() -> str:
    """Make a token of 256 random bits, safe in a header, a URL and a shell."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """Return what the store keeps of a token: its SHA-256 in hexadecimal. A random token needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def client_hash(password: str) -> str:
    """Hash a password as clients do before they send it (``isHashed``): salted SHA-512 in hexadecimal; an empty one stays empty."""
    return hashlib.sha512((_CLIENT_SALT + password).encode()).hexdigest() if password else ""


def store_password(sent: str) -> str:
    """Return what the store keeps of a password that was sent: ``scrypt$salt$hash``."""
    salt = secrets.token_bytes(16)
    return f"scrypt${salt.hex()}${_scrypt(sent, salt).hex()}"


def check_password(stored: str, sent: str) -> bool:
    """Tell whether ``sent`` is the password that was stored. Takes as long for no password as for a wrong one."""
    kind, _, rest = stored.partition("$")
    salt, _, kept = rest.partition("$")
    known = kind == "scrypt" and bool(kept)
    tried = _scrypt(sent, bytes.fromhex(salt) if known else bytes(16)).hex()
    return hmac.compare_digest(tried, kept) and known


def _scrypt(text: str, salt: bytes) -> bytes:
    return hashlib.scrypt(text.encode(), salt=salt, n=_COST, r=8, p=1)


def require_own(allocation: Allocation, **asked: object) -> None:
    """Raise PermissionDenied unless everything asked for is the allocation's own.

    Names: allocation_id, task_id, trial_id, experiment_id, resources_id.
    """
    own: dict[str, object] = {
        "allocation_id": allocation.id,
        "task_id": allocation.task_id,
        "trial_id": allocation.trial_id,
        "experiment_id": allocation.experiment_id,
        "resources_id": allocation.resources_id,
    }
    for name, value in asked.items():
        if name not in own or own[name] != value:
            raise PermissionDenied(
                f"the token of allocation {allocation.id} is not good for {name.replace('_', ' ')} {value!r}"
            )
