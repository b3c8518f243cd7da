"""The verbs of users and tokens."""

from __future__ import annotations

from zero_trial.master.core.state import MasterState
from zero_trial.master.errors import NotFound
from zero_trial.master.records import AllocationState, TokenOwner, User
from zero_trial.master.store import accounts, trials


class AccountService:
    """See verbs.AccountVerbs."""

    def __init__(self, hub: MasterState) -> None:
        self._hub = hub

    def user(self, name: str) -> User | None:
        """See verbs."""
        with self._hub.database.reading() as connection:
            return accounts.user(connection, name)

    def users(self) -> list[User]:
        """See verbs."""
        with self._hub.database.reading() as connection:
            return accounts.users(connection)

    def put_user(self, user: User) -> User:
        """See verbs."""
        with self._hub.database.transaction() as connection:
            number = accounts.put_user(connection, user)
            stored = accounts.user_by_id(connection, number)
        if stored is None:
            raise NotFound(f"user {user.id} not found")
        return stored

    def add_token(self, token_digest: str, user_id: int, expires: float | None = None) -> None:
        """See verbs."""
        with self._hub.database.transaction() as connection:
            accounts.add_token(connection, token_digest, user_id=user_id, expires=expires)

    def drop_token(self, token_digest: str) -> None:
        """See verbs."""
        with self._hub.database.transaction() as connection:
            accounts.drop_token(connection, token_digest)

    def token_owner(self, token_digest: str) -> TokenOwner | None:
        """See verbs."""
        with self._hub.database.reading() as connection:
            found = accounts.token(connection, token_digest, self._hub.clock())
            if found is None:
                return None
            user_id, allocation_id = found
            if user_id is not None:
                user = accounts.user_by_id(connection, user_id)
                return None if user is None else TokenOwner(user=user)
            run = trials.allocation(connection, allocation_id) if allocation_id is not None else None
        if run is None or run.state is AllocationState.TERMINATED:
            return None
        return TokenOwner(allocation=run)
