"""Users, tokens and single values in the store."""

from __future__ import annotations

from pathlib import Path

from zero_trial.master.records import User
from zero_trial.master.store import Database, accounts


def test_accounts(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        number = accounts.put_user(connection, User(0, "ada", True, True, "hash"))
        assert (
            accounts.user(connection, "ada")
            == accounts.user_by_id(connection, number)
            == User(number, "ada", True, True, "hash")
        )
        accounts.put_user(connection, User(number, "ada", False, True, "other", "Ada"))
        assert accounts.users(connection) == [User(number, "ada", False, True, "other", "Ada")]
        assert accounts.user(connection, "nobody") is None

        accounts.add_token(connection, "d1", user_id=number, expires=100.0)
        accounts.add_token(connection, "d2", allocation_id="a.1")
        assert accounts.token(connection, "d1", 99.0) == (number, None)
        assert accounts.token(connection, "d1", 100.0) is None
        assert accounts.token(connection, "d2", 1e12) == (None, "a.1")
        accounts.drop_tokens_of(connection, "a.1")
        accounts.drop_token(connection, "d1")
        assert accounts.token(connection, "d1", 0.0) is accounts.token(connection, "d2", 0.0) is None

        assert accounts.value(connection, "k") is None
        accounts.set_value(connection, "k", "1")
        accounts.set_value(connection, "k", "2")
        assert accounts.value(connection, "k") == "2"

        accounts.enable_slot(connection, 3, False)
        assert accounts.disabled_slots(connection) == {3}
        accounts.enable_slot(connection, 3, True)
        assert accounts.disabled_slots(connection) == set()
    database.close()
