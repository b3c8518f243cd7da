"""Passwords, tokens and what they are good for."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.master.http.fake_cluster import TASK_TOKEN, USER_TOKEN, FakeCluster, allocation
from zero_trial.master import auth
from zero_trial.master.auth import digest
from zero_trial.master.errors import Invalid, PermissionDenied


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def test_a_password_is_hashed_as_the_genuine_client_hashes_it() -> None:
    api = pytest.importorskip("determined.common.api")
    for password in ("", "a", "Correct1horse", "ü" * 100):
        assert auth.client_hash(password) == api.salt_and_hash(password)


def test_what_is_stored_tells_nothing_and_checks_only_the_right_password() -> None:
    stored = auth.store_password("hash")
    assert "hash" not in stored
    assert stored != auth.store_password("hash")
    assert auth.check_password(stored, "hash")
    for wrong in ("", "hash2", stored):
        assert not auth.check_password(stored, wrong)


@pytest.mark.parametrize("stored", ["", "scrypt$$", "scrypt$00$", "plain$00$hash", "hash"])
def test_an_account_without_a_password_has_none(stored: str) -> None:
    assert not auth.check_password(stored, "hash")
    assert not auth.check_password(stored, "")


def test_each_token_speaks_for_one(cluster: FakeCluster) -> None:
    user = auth.identify(cluster.accounts, USER_TOKEN, None)
    task = auth.identify(cluster.accounts, None, TASK_TOKEN)
    assert user is not None
    assert task is not None
    assert (user.name, task.name) == ("determined", "allocation task-1.1")
    assert auth.identify(cluster.accounts, TASK_TOKEN, USER_TOKEN) is None
    assert auth.identify(cluster.accounts, None, None) is None
    assert auth.identify(cluster.accounts, "", "x" * 1000) is None


def test_a_login_gives_a_token_that_works_and_expires(cluster: FakeCluster) -> None:
    kept: list[float | None] = []
    add = cluster.accounts.add_token
    cluster.accounts.add_token = lambda token, user, expires=None: (kept.append(expires), add(token, user, expires))[1]  # type: ignore[method-assign]
    auth.add_user(cluster.accounts, "somebody", auth.client_hash("word"), admin=False)
    user, token = auth.login(cluster.accounts, "somebody", "word", is_hashed=False)
    assert auth.identify(cluster.accounts, token, None) == auth.Principal(user=user)
    assert token not in cluster.token_owners
    assert kept[0] is not None
    with pytest.raises(PermissionDenied):
        auth.login(cluster.accounts, "somebody", "word", is_hashed=True)


def test_who_was_switched_off_cannot_log_in(cluster: FakeCluster) -> None:
    made = auth.add_user(cluster.accounts, "somebody", "hash", admin=False)
    cluster.accounts.put_user(replace(made, active=False))
    with pytest.raises(PermissionDenied, match="invalid credentials"):
        auth.login(cluster.accounts, "somebody", "hash", is_hashed=True)


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 200, "determined"])
def test_names_that_cannot_be(cluster: FakeCluster, name: str) -> None:
    with pytest.raises(Invalid):
        auth.add_user(cluster.accounts, name, "hash", admin=False)


def test_an_allocation_owns_its_own_and_nothing_else() -> None:
    own = {
        "allocation_id": "task-1.1",
        "task_id": "task-1",
        "trial_id": 1,
        "experiment_id": 3,
        "resources_id": "resources-1",
    }
    auth.require_own(allocation(1, 3), **own)
    for name in own:
        for wrong in (None, "", 2, "2", True if own[name] != 1 else "1"):
            with pytest.raises(PermissionDenied):
                auth.require_own(allocation(1, 3), **{name: wrong})
    with pytest.raises(PermissionDenied):
        auth.require_own(allocation(1, 3), user="determined")


def test_the_local_users_credentials_are_made_once_and_kept_private(cluster: FakeCluster, tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    made = auth.ensure_local_user(cluster.accounts, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert auth.identify(cluster.accounts, made.token, None) is not None
    assert auth.login(cluster.accounts, "determined", made.password, is_hashed=False)[0].admin
    before = file.stat()
    assert auth.ensure_local_user(cluster.accounts, file) == made
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["credentials.json"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"user": "determined", "password": "x", "token": "y"}'])
def test_a_file_that_is_of_no_use_is_made_anew(cluster: FakeCluster, tmp_path: Path, text: str) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(text)
    file.chmod(0o644)
    made = auth.ensure_local_user(cluster.accounts, file)
    assert json.loads(file.read_text())["token"] == made.token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert auth.identify(cluster.accounts, made.token, None) is not None


def test_a_token_that_was_dropped_is_replaced_and_the_password_stays(cluster: FakeCluster, tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    first = auth.ensure_local_user(cluster.accounts, file)
    cluster.accounts.drop_token(digest(first.token))
    second = auth.ensure_local_user(cluster.accounts, file)
    assert second.password == first.password
    assert second.token != first.token


def test_the_password_pleases_the_genuine_client(cluster: FakeCluster, tmp_path: Path) -> None:
    authentication = pytest.importorskip("determined.common.api.authentication")
    authentication.check_password_complexity(auth.ensure_local_user(cluster.accounts, tmp_path / "c.json").password)
