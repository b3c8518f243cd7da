"""Tokens: random words that say who asks; only their digests are ever stored."""

from __future__ import annotations

import hashlib
import secrets


def new_token() -> str:
    """A fresh token of 256 random bits, safe in a header, a URL and a shell."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """What the store keeps of a token: its SHA-256 in hexadecimal. A random token needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()
