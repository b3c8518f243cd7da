"""Users, passwords, tokens, and what a token permits."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.master.fakes import Sandbox
from tests.master.world import USER_TOKEN, World, allocation
from zero_trial.master.core import accounts as auth
from zero_trial.master.core.accounts import digest
from zero_trial.master.records import Conflict, PermissionDenied, ServiceError


def test_a_password_is_hashed_as_the_genuine_client_hashes_it() -> None:
    api = pytest.importorskip("determined.common.api")
    for password in ("", "a", "Correct1horse", "ü" * 100):
        assert auth.client_hash(password) == api.salt_and_hash(password)


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_COST", 16)


def test_what_is_stored_tells_nothing_and_checks_only_the_right_password() -> None:
    stored = auth.store_password("hash")
    assert "hash" not in stored
    assert stored != auth.store_password("hash")
    assert auth.check_password(stored, "hash")
    for wrong in ("", "hash2", stored):
        assert not auth.check_password(stored, wrong)
    for none in ("", "scrypt$$", "scrypt$00$", "plain$00$hash", "hash"):  # an account without a password has none
        assert not auth.check_password(none, "hash") and not auth.check_password(none, "")


def test_a_login_gives_a_token_that_works_and_expires(world: World) -> None:
    world.accounts.add_user("someone", auth.client_hash("word"), admin=False)
    user, token = world.accounts.login("someone", "word", is_hashed=False)
    assert world.accounts.identify(token, None) == auth.Principal(user=user)
    with world.state.database.reading() as connection:
        assert token not in [row[0] for row in connection.execute("SELECT digest FROM tokens")]
    with pytest.raises(PermissionDenied):
        world.accounts.login("someone", "word", is_hashed=True)
    world.clock.now += 30 * 24 * 3600.0 - 1
    assert world.accounts.identify(token, None) is not None
    world.clock.now += 1
    assert world.accounts.identify(token, None) is None


def test_a_user_who_is_not_active_any_more_is_let_in_nowhere(world: World) -> None:
    world.accounts.add_user("someone", auth.client_hash("word"), admin=False)
    before, token = world.accounts.login("someone", "word", is_hashed=False)
    world.accounts.change_user(before.id, USER_TOKEN, active=False)
    assert world.accounts.identify(token, None) is None
    with pytest.raises(PermissionDenied, match="invalid credentials"):
        world.accounts.login("someone", "word", is_hashed=False)
    with pytest.raises(PermissionDenied, match="invalid credentials"):
        world.accounts.grant(before, lasts=None)  # a login that began before


def test_of_two_users_of_one_name_that_come_at_once_one_is_refused(world: World) -> None:
    together = Barrier(4)

    def add(_: int) -> str:
        together.wait()
        try:
            return world.accounts.add_user("ada", "hash", admin=False).name
        except ServiceError as error:
            return error.what

    with ThreadPoolExecutor(4) as threads:
        said = sorted(threads.map(add, range(4)))
    assert said == ["ada", *["user 'ada' already exists"] * 3]
    other = world.accounts.add_user("eve", "hash", admin=False)
    with pytest.raises(Conflict, match="already exists"):
        world.accounts.change_user(other.id, USER_TOKEN, name="ada")


def test_an_allocation_owns_its_own_and_nothing_else() -> None:
    own = {"allocation_id": "task-1.1", "task_id": "task-1", "trial_id": 1, "experiment_id": 3}
    own |= {"resources_id": "resources-1"}
    auth.require_own(allocation(1, 3), **own)
    for name in own:
        for wrong in (None, "", 2, "2", True if own[name] != 1 else "1"):
            with pytest.raises(PermissionDenied):
                auth.require_own(allocation(1, 3), **{name: wrong})
    with pytest.raises(PermissionDenied):
        auth.require_own(allocation(1, 3), user="determined")


def test_the_local_users_credentials_are_made_once_and_kept_private(world: World, tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    made = world.accounts.ensure_local_user(file)
    assert world.accounts.login("determined", made.password, is_hashed=False)[0].admin
    before = file.stat()
    assert world.accounts.ensure_local_user(file) == made
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["credentials.json"]
    world.accounts.drop_token(digest(made.token))
    again = world.accounts.ensure_local_user(file)
    assert again.password == made.password and again.token != made.token
    authentication = pytest.importorskip("determined.common.api.authentication")
    authentication.check_password_complexity(again.password)
    for text in ("", "[]", '{"user": "determined", "password": "x", "token": "y"}'):  # of no use
        file.write_text(text)
        file.chmod(0o644)
        made = world.accounts.ensure_local_user(file)
        assert json.loads(file.read_text())["token"] == made.token
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert world.accounts.identify(made.token, None) is not None


def test_a_password_that_the_user_has_changed_stays(world: World, tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    first = world.accounts.ensure_local_user(file)
    world.set_user(1, password=auth.store_password(auth.client_hash("Mine-123")))
    for _ in range(2):
        again = world.accounts.ensure_local_user(file)
        assert (again.password, again.token) == ("", first.token)
        assert world.accounts.login("determined", "Mine-123", is_hashed=False)[0].id == 1
    file.unlink()
    fresh = world.accounts.ensure_local_user(file)
    assert world.accounts.login("determined", fresh.password, is_hashed=False)[0].id == 1


def test_expired_tokens_are_deleted(world: World) -> None:
    user = world.accounts.users()[0]
    world.accounts.grant(user, lasts=5)
    world.clock.now += 10
    fresh = world.accounts.grant(user, lasts=5)
    with world.state.database.reading() as connection:
        kept = {row[0] for row in connection.execute("SELECT digest FROM tokens WHERE expires IS NOT NULL")}
    assert kept == {digest(fresh)}


def test_an_allocations_token_is_good_until_it_ends(master: Sandbox) -> None:
    master.create()
    order = master.run_of(1)
    owner = master.accounts.token_owner(digest(order.token))
    assert owner is not None and owner.user is None and owner.name == f"allocation {order.allocation.id}"
    master.exit(1, code=1)
    assert master.accounts.token_owner(digest(order.token)) is None
    with master.state.database.reading() as connection:
        assert list(connection.execute("SELECT * FROM tokens WHERE allocation_id = ?", (order.allocation.id,))) == []
    token = master.run_of(1).token
    assert master.accounts.token_owner(digest(token)) is not None
    files = [path for path in master.directory.root.rglob("*") if path.is_file()]
    assert not any(token.encode() in path.read_bytes() for path in files)
