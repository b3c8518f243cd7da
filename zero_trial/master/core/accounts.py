"""Users, passwords and tokens, and the permissions of an allocation's token.

There are two kinds of token. A user's token (``Authorization: Bearer``) permits everything. An
allocation's token (``Grpc-Metadata-x-allocation-token: Bearer``) belongs to one run of one trial
and permits only requests about that allocation, its task, trial and experiment. The store contains
only SHA-256 digests of tokens and salted scrypt hashes of passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zero_trial.master.core.state import MasterState
from zero_trial.master.records import Allocation, AllocationState, Conflict, Invalid, PermissionDenied, User, existing
from zero_trial.master.store import trial_rows, user_rows
from zero_trial.master.store.database import drop
from zero_trial.util.files import write_atomic

USER_HEADER = "authorization"
TASK_HEADER = "grpc-metadata-x-allocation-token"
LOCAL_USER = "determined"  # the default user of Determined's clients
_LOGIN_LASTS = 30 * 24 * 3600.0  # seconds until a login must be repeated

# part of Determined's protocol: every client prepends this salt to the password
_CLIENT_SALT = "GubPEmmotfiK9TMD6Zdw"
_COST = 2**14  # of scrypt: 16 MiB and about 40 ms per attempt (RFC 7914, section 2)


@dataclass(frozen=True)
class Principal:
    """The sender of a request: a user or an allocation; both are None if no token is needed."""

    user: User | None = None
    allocation: Allocation | None = None

    @property
    def name(self) -> str:
        if self.user is not None:
            return self.user.name
        return f"allocation {self.allocation.id}" if self.allocation is not None else "anonymous"


def new_token() -> str:
    """Return a token of 256 random bits, safe in a header, a URL and a shell."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """Return the stored form of a token: its SHA-256. A random token needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def client_hash(password: str) -> str:
    """Hash a password as clients do (``isHashed``): salted SHA-512; "" stays ""."""
    return hashlib.sha512((_CLIENT_SALT + password).encode()).hexdigest() if password else ""


def store_password(sent: str) -> str:
    """Return the stored form of a password as sent by a client: ``scrypt$salt$hash``."""
    salt = secrets.token_bytes(16)
    return f"scrypt${salt.hex()}${_scrypt(sent, salt).hex()}"


def check_password(stored: str, sent: str) -> bool:
    """Return whether ``sent`` is the stored password. Runs equally long if none is stored."""
    kind, _, rest = stored.partition("$")
    salt, _, kept = rest.partition("$")
    known = kind == "scrypt" and bool(kept)
    tried = _scrypt(sent, bytes.fromhex(salt) if known else bytes(16)).hex()
    return hmac.compare_digest(tried, kept) and known


def _scrypt(text: str, salt: bytes) -> bytes:
    return hashlib.scrypt(text.encode(), salt=salt, n=_COST, r=8, p=1)


def require_owner(user: User, owner: str, name: str) -> None:
    """Raise PermissionDenied unless the user is an administrator or the owner of ``name``."""
    if user.name != owner and not user.admin:
        raise PermissionDenied(f"only the owner of {name} and administrators may do this")


def require_own(allocation: Allocation, **asked: object) -> None:
    """Raise PermissionDenied unless every id in ``asked`` is the allocation's own.

    Keywords: allocation_id, task_id, trial_id, experiment_id, resources_id.
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
                f"the token of allocation {allocation.id} does not permit access to {name.replace('_', ' ')} {value!r}"
            )


@dataclass(frozen=True)
class Credentials:
    """The local user's password, for ``det user login``, and token, for ``DET_USER_TOKEN``. The
    password is empty if the user has changed it."""

    user: str
    password: str
    token: str


class AccountService:
    """Reads and changes users and tokens."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- users

    def user(self, name: str) -> User | None:
        """Return the user with this name; None if there is none."""
        return self._state.read(user_rows.user, name)

    def users(self) -> list[User]:
        """List all users, oldest first."""
        return self._state.read(user_rows.users)

    def add_user(
        self, name: str, sent_password: str, *, admin: bool, active: bool = True, display_name: str = ""
    ) -> User:
        """Create a user; the client hashed the password. Raises Invalid for a bad or taken name."""
        if not name or name != name.strip() or len(name) > 128 or not name.isprintable():
            raise Invalid("a username must be 1 to 128 printable characters, without leading or trailing spaces")
        stored = store_password(sent_password)
        made = User(id=0, name=name, admin=admin, active=active, password=stored, display_name=display_name)
        with self._state.database.transaction() as connection:
            if user_rows.user(connection, name) is not None:
                raise Invalid(f"user {name!r} already exists")
            return replace(made, id=user_rows.add_user(connection, made))

    def change_user(self, number: int, token: str, **columns: Any) -> User:
        """Set columns of a user, with the permissions of the owner of ``token``. A new password
        revokes all other tokens of the user.

        Raises NotFound, PermissionDenied (only administrators can change more than their own
        password and display name), or Conflict for a change that would lock administrators out.
        """
        with self._state.database.transaction() as connection:
            user = existing(user_rows.user(connection, number), f"user {number}")
            # read the token again: another request may have revoked it or demoted its owner
            sender = user_rows.token(connection, digest(token), self._state.clock())
            if not isinstance(sender, User) or not sender.active:
                raise PermissionDenied("this needs a user's token")
            own = sender.id == number
            if not sender.admin and (not own or not columns.keys() <= {"password", "display_name"}):
                raise PermissionDenied("only an administrator may do this")
            name = columns.get("name", user.name)
            if name != user.name and user.name == LOCAL_USER:
                raise Conflict(f"{LOCAL_USER!r} cannot be renamed: Determined's clients log in as this user by default")
            if name != user.name and user_rows.user(connection, name) is not None:
                raise Conflict(f"user {name!r} already exists")
            if own and user.admin and not (columns.get("active", True) and columns.get("admin", True)):
                raise Conflict("an administrator cannot deactivate or demote their own account")
            user_rows.change_user(connection, number, **columns)
            if "password" in columns:
                sent = digest(token)
                connection.execute("DELETE FROM tokens WHERE user_id = ? AND digest != ?", (number, sent))
            after = existing(user_rows.user(connection, number), f"user {number}")
        file = self._state.directory.account
        if "password" in columns and user.name == LOCAL_USER and file.exists():
            self.ensure_local_user(file)  # writes a valid token to the file
        return after

    # -- tokens

    def drop_token(self, token_digest: str) -> None:
        """Delete a token; no effect if the token is unknown."""
        with self._state.database.transaction() as connection:
            drop(connection, "tokens", "digest", token_digest)

    def token_owner(self, token_digest: str) -> Principal | None:
        """Return the owner of a token; None if it is unknown or expired, or its run ended."""
        with self._state.database.reading() as connection:
            found = user_rows.token(connection, token_digest, self._state.clock())
            run = trial_rows.allocation(connection, found) if isinstance(found, str) else None
        if isinstance(found, User):
            return Principal(user=found)
        if run is None or run.state is AllocationState.TERMINATED:
            return None
        return Principal(allocation=run)

    def identify(self, user_token: str | None, task_token: str | None) -> Principal | None:
        """Return the sender of a request by its tokens; the user's token takes precedence.

        An allocation may send its token in the user's header, as the SDK does with
        ``DET_USER_TOKEN``. A user's token in the allocation header is ignored.
        """
        if user_token is not None:
            owner = self.token_owner(digest(user_token))
            if owner is not None and (owner.user is None or owner.user.active):
                return owner
        if task_token is not None:
            owner = self.token_owner(digest(task_token))
            if owner is not None and owner.allocation is not None:
                return owner
        return None

    def login(self, name: str, password: str, *, is_hashed: bool) -> tuple[User, str]:
        """Return the user and a new token.

        Raises PermissionDenied for a wrong name, a wrong password, or an inactive user, with the
        same message in all cases.
        """
        sent = password if is_hashed else client_hash(password)
        user = self.user(name)
        if not check_password(user.password if user is not None else "", sent) or user is None or not user.active:
            raise PermissionDenied("invalid credentials")
        return user, self.grant(user, lasts=_LOGIN_LASTS)

    def grant(self, user: User, *, lasts: float | None) -> str:
        """Create a token for a user, valid for ``lasts`` seconds (None: until it is deleted).

        Raises PermissionDenied if the password of ``user`` is no longer the stored password, or if
        the user is no longer active.
        """
        token, now = new_token(), self._state.clock()
        with self._state.database.transaction() as connection:
            stored = user_rows.user(connection, user.id)
            if stored is None or not stored.active or stored.password != user.password:
                raise PermissionDenied("invalid credentials")
            connection.execute("DELETE FROM tokens WHERE expires <= ?", (now,))
            expires = None if lasts is None else now + lasts
            user_rows.add_token(connection, digest(token), user_id=user.id, expires=expires)
        return token

    # -- the local user

    def ensure_local_user(self, file: Path) -> Credentials:
        """Return the credentials of the local user, which ``file`` (mode 0600) preserves across
        restarts of the master.

        Password and token are random. Create a token if there is no valid one, and a password if
        there is none. A password set by the user is kept, and is not in the file. If the file is
        missing, create both again. Anyone who can read the file can act as that user.
        """
        kept = _read(file)
        user = self.user(LOCAL_USER)
        if user is None:
            user = User(id=0, name=LOCAL_USER, admin=True, active=True, password="")
            with self._state.database.transaction() as connection:
                user = replace(user, id=user_rows.add_user(connection, user))
        password = (
            kept.password if kept is not None and check_password(user.password, client_hash(kept.password)) else ""
        )
        if kept is None or not user.password:
            # Determined's command requires 8 characters, including an upper-case letter, a
            # lower-case letter and a digit.
            password = f"Zt1{secrets.token_urlsafe(15)}"
            user = replace(user, password=store_password(client_hash(password)), active=True)
            with self._state.database.transaction() as connection:
                user_rows.change_user(connection, user.id, password=user.password, active=1)
        token = kept.token if kept is not None else ""
        owner = self.token_owner(digest(token)) if token else None
        if owner is None or owner.user is None or owner.user.id != user.id:
            token = self.grant(user, lasts=None)
        credentials = Credentials(LOCAL_USER, password, token)
        if credentials != kept:
            write_atomic(file, json.dumps(asdict(credentials)), private=True)
        return credentials


def _read(file: Path) -> Credentials | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Credentials(str(found["user"]), str(found["password"]), str(found["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
