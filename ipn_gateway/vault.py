"""Secrets at rest: encrypted with Fernet (AES-128-CBC and HMAC-SHA256); several keys are read, the first one writes."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from pydantic import SecretStr

from ipn_gateway.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ipn_gateway.settings import Settings

KEY_FILE: Final = "secret.key"


class Vault:
    """Seals and opens what must not be readable in the database."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        """`keys` are url-safe base64 of 32 bytes each. Raises `ConfigurationError` when there is none or one is malformed."""
        try:
            self._fernet = MultiFernet([Fernet(key.get_secret_value()) for key in keys])
        except ValueError:
            raise ConfigurationError("IPN_SECRET_KEY must be url-safe base64 of 32 bytes, or a comma list of such keys.") from None

    def __repr__(self) -> str:
        return "Vault()"

    def seal(self, data: bytes) -> bytes:
        """`data`, encrypted with the first key."""
        return self._fernet.encrypt(data)

    def unseal(self, sealed: bytes) -> bytes:
        """What was sealed. Raises `ConfigurationError` when none of the keys fits."""
        try:
            return self._fernet.decrypt(sealed)
        except InvalidToken:
            raise ConfigurationError("A stored secret cannot be decrypted: IPN_SECRET_KEY lacks the key that sealed it.") from None


def load_or_make(data_dir: Path, settings: Settings) -> Vault:
    """The vault of this installation; blocks on one small file.

    IPN_SECRET_KEY where it is set; with the embedded server a key of its own, made once and kept in `data_dir` with mode 0600.
    Raises `ConfigurationError` when neither is to be had.
    """
    if settings.secret_key:
        return Vault(settings.secret_key)
    if settings.database_url is not None:
        raise ConfigurationError("IPN_SECRET_KEY is required with IPN_DATABASE_URL: give url-safe base64 of 32 random bytes.")
    return Vault([SecretStr(_kept_key(data_dir / KEY_FILE))])


def _kept_key(file: Path) -> str:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        _make_key(file)
    return file.read_text(encoding="ascii").strip()


def _make_key(file: Path) -> None:
    """Whole or not at all, and only one of several processes: the key gets its name when it is on disk."""
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(Fernet.generate_key() + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
        os.link(draft, file)
    except FileExistsError:
        return  # another process was first: its key is the one
    finally:
        draft.unlink()
    _sync_directory(file.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
