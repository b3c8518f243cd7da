"""Tokens: random words that say who asks; only their digests are ever stored."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zero_trial.master.errors import Invalid, PermissionDenied
from zero_trial.master.records import Allocation, User
from zero_trial.master.verbs import AccountVerbs
from zero_trial.util.files import write_atomic


def new_token() -> str:
    """A fresh token of 256 random bits, safe in a header, a URL and a shell."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """What the store keeps of a token: its SHA-256 in hexadecimal. A random token needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


# Who asks: passwords as Determined's clients send them, tokens, and what an allocation's token is good for.
#
# Two kinds of token. A user's (``Authorization: Bearer``) asks for anything. An allocation's (``Grpc-Metadata-x-allocation-token: Bearer``) is
# handed to one run of one trial and asks only for that allocation, its task, trial and experiment. The store keeps
# digests of tokens and salted scrypt
# hashes of passwords, never the words themselves.


USER_HEADER = "authorization"


TASK_HEADER = "grpc-metadata-x-allocation-token"


LOCAL_USER = "determined"  # whom Determined's clients are if nobody says otherwise


LOGIN_LASTS = 30 * 24 * 3600.0  # seconds until a login must be repeated


_CLIENT_SALT = "GubPEmmotfiK9TMD6Zdw"  # part of Determined's protocol: every client puts it before the password


_COST = 2**14  # of scrypt: 16 MiB and some 40 ms a try (RFC 7914, section 2)


@dataclass(frozen=True)
class Principal:
    """Whoever sent a request; exactly one of the two is set."""

    user: User | None = None
    allocation: Allocation | None = None

    @property
    def name(self) -> str:
        if self.user is not None:
            return self.user.name
        return f"allocation {self.allocation.id}" if self.allocation is not None else "nobody"


@dataclass(frozen=True)
class Credentials:
    """What the local user needs for ``det``: the token for ``DET_USER_TOKEN``, the password for ``det user login``."""

    user: str
    password: str
    token: str


def client_hash(password: str) -> str:
    """A password as clients send it (``isHashed``): salted SHA-512 in hexadecimal; an empty one stays empty."""
    return hashlib.sha512((_CLIENT_SALT + password).encode()).hexdigest() if password else ""


def store_password(sent: str) -> str:
    """What the store keeps of a password as it was sent: ``scrypt$salt$hash``."""
    salt = secrets.token_bytes(16)
    return f"scrypt${salt.hex()}${_scrypt(sent, salt).hex()}"


def check_password(stored: str, sent: str) -> bool:
    """Whether ``sent`` is the password that was stored. Takes as long for no password as for a wrong one."""
    kind, _, rest = stored.partition("$")
    salt, _, kept = rest.partition("$")
    known = kind == "scrypt" and bool(kept)
    tried = _scrypt(sent, bytes.fromhex(salt) if known else bytes(16)).hex()
    return hmac.compare_digest(tried, kept) and known


def _scrypt(text: str, salt: bytes) -> bytes:
    return hashlib.scrypt(text.encode(), salt=salt, n=_COST, r=8, p=1)


def identify(accounts: AccountVerbs, user_token: str | None, task_token: str | None) -> Principal | None:
    """Whom a request's tokens speak for. A token in the header of the other kind is not looked at; the user's comes first."""
    if user_token is not None:
        owner = accounts.token_owner(digest(user_token))
        if owner is not None and owner.user is not None and owner.user.active:
            return Principal(user=owner.user)
    if task_token is not None:
        owner = accounts.token_owner(digest(task_token))
        if owner is not None and owner.allocation is not None:
            return Principal(allocation=owner.allocation)
    return None


def login(accounts: AccountVerbs, name: str, password: str, *, is_hashed: bool) -> tuple[User, str]:
    """The user and a fresh token. Forbidden, always with the same words, for a wrong name, password, or a user who is not active."""
    sent = password if is_hashed else client_hash(password)
    user = accounts.user(name)
    if not check_password(user.password if user is not None else "", sent) or user is None or not user.active:
        raise PermissionDenied("invalid credentials")
    return user, grant(accounts, user, lasts=LOGIN_LASTS)


def grant(accounts: AccountVerbs, user: User, *, lasts: float | None) -> str:
    """A fresh token of a user, good for ``lasts`` seconds (None: until it is dropped)."""
    token = new_token()
    accounts.add_token(digest(token), user.id, None if lasts is None else time.time() + lasts)
    return token


def require_own(allocation: Allocation, **asked: object) -> None:
    """Forbidden unless everything asked for is the allocation's own. Names: allocation_id, task_id, trial_id, experiment_id, resources_id."""
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


def add_user(
    accounts: AccountVerbs, name: str, sent_password: str, *, admin: bool, active: bool = True, display_name: str = ""
) -> User:
    """A new user. Invalid if the name is taken or empty."""
    if not name or name != name.strip() or len(name) > 128 or not name.isprintable():
        raise Invalid("a user's name is 1 to 128 printable characters without spaces around them")
    if accounts.user(name) is not None:
        raise Invalid(f"there is a user {name!r} already")
    stored = store_password(sent_password)
    return accounts.put_user(
        User(id=0, name=name, admin=admin, active=active, password=stored, display_name=display_name)
    )


def ensure_local_user(accounts: AccountVerbs, file: Path) -> Credentials:
    """The credentials of the local user, kept in ``file`` (mode 0600) from one start of the master to the next.

    Made with a random password and token where there are none or where they are no longer good; whoever can read the file is that user.
    """
    kept = _read(file)
    user = accounts.user(LOCAL_USER)
    if user is None:
        user = accounts.put_user(User(id=0, name=LOCAL_USER, admin=True, active=True, password=""))
    password = kept.password if kept is not None else ""
    if not password or not check_password(user.password, client_hash(password)):
        # Determined's command asks for 8 characters with an upper-case letter, a lower-case one and a digit.
        password = f"Zt1{secrets.token_urlsafe(15)}"
        user = accounts.put_user(replace(user, password=store_password(client_hash(password)), active=True))
    token = kept.token if kept is not None else ""
    owner = accounts.token_owner(digest(token)) if token else None
    if owner is None or owner.user is None or owner.user.id != user.id:
        token = grant(accounts, user, lasts=None)
    credentials = Credentials(LOCAL_USER, password, token)
    if credentials != kept:
        _write(file, credentials)
    return credentials


def _read(file: Path) -> Credentials | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Credentials(str(found["user"]), str(found["password"]), str(found["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, credentials: Credentials) -> None:
    write_atomic(file, json.dumps(asdict(credentials)), private=True)
