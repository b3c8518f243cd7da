"""Tokens and their digests."""

from __future__ import annotations

import hashlib

from zero_trial.master.auth import digest, new_token


def test_tokens_are_long_random_and_safe_in_a_shell() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100 and all(
        len(token) >= 43 and token.replace("-", "").replace("_", "").isalnum() for token in made
    )


def test_a_digest_does_not_show_its_token() -> None:
    assert digest("abc") == hashlib.sha256(b"abc").hexdigest()
