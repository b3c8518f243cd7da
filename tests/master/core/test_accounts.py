"""Users and tokens."""

from __future__ import annotations

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.auth import digest
from zero_trial.master.errors import NotFound
from zero_trial.master.records import User


def test_a_users_token(master: Sandbox) -> None:
    accounts = master.accounts
    ada = accounts.put_user(User(0, "ada", True, True, "x"))
    assert ada.id and accounts.user("ada") == ada and accounts.users() == [ada]
    accounts.add_token("d", ada.id, expires=master.clock.now + 10)
    owner = accounts.token_owner("d")
    assert owner is not None and owner.user == ada and owner.allocation is None
    master.clock.now += 11
    assert accounts.token_owner("d") is None
    accounts.add_token("e", ada.id)
    accounts.drop_token("e")
    assert accounts.token_owner("e") is None
    with pytest.raises(NotFound):
        accounts.put_user(User(99, "bob", True, True, "x"))


def test_an_allocations_token_is_good_until_it_ends(master: Sandbox) -> None:
    master.create()
    order = master.run_of(1)
    owner = master.accounts.token_owner(digest(order.token))
    assert (
        owner is not None
        and owner.user is None
        and owner.allocation is not None
        and owner.allocation.id == order.allocation.id
    )
    master.exit(1, code=1)
    assert master.accounts.token_owner(digest(order.token)) is None
    assert master.accounts.token_owner(digest(master.run_of(1).token)) is not None


def test_tokens_are_not_in_the_store_in_the_clear(master: Sandbox) -> None:
    master.create()
    token = master.run_of(1).token.encode()
    assert not any(token in path.read_bytes() for path in master.directory.root.rglob("*") if path.is_file())
