"""Sealed secrets, and the key that an embedded installation makes for itself."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import settings, vault
from ipn_gateway.errors import ConfigurationError
from ipn_gateway.vault import Vault

if TYPE_CHECKING:
    from pathlib import Path


def key() -> SecretStr:
    return SecretStr(Fernet.generate_key().decode())


def test_what_is_sealed_is_opened_and_cannot_be_read() -> None:
    """And no two seals of one secret are alike."""
    box = Vault([key()])

    sealed = box.seal(b"secret")

    assert box.unseal(sealed) == b"secret"
    assert b"secret" not in sealed
    assert box.seal(b"secret") != sealed


def test_a_key_list_rotates() -> None:
    """The first key seals; the others still open."""
    old, new = key(), key()
    sealed_before = Vault([old]).seal(b"secret")
    both = Vault([new, old])

    assert both.unseal(sealed_before) == b"secret"
    assert Vault([new]).unseal(both.seal(b"secret")) == b"secret"


def test_without_its_key_a_secret_is_a_sentence() -> None:
    """That names the setting and shows nothing."""
    sealed = Vault([key()]).seal(b"secret")

    with pytest.raises(ConfigurationError, match="IPN_SECRET_KEY") as refused:
        Vault([key()]).unseal(sealed)
    assert "secret" not in str(refused.value).replace("stored secret", "")


@pytest.mark.parametrize("keys", [[], [SecretStr("short")], [SecretStr("")]])
def test_a_key_that_is_none_is_refused(keys: list[SecretStr]) -> None:
    """Before anything is sealed with it."""
    with pytest.raises(ConfigurationError, match="IPN_SECRET_KEY"):
        Vault(keys)


def test_a_vault_shows_no_key() -> None:
    """Not even when it is printed."""
    given = key()

    assert given.get_secret_value() not in repr(Vault([given]))


def test_an_embedded_installation_keeps_a_key_of_its_own(tmp_path: Path) -> None:
    """Made once, readable by its owner alone, and the same at the next start."""
    data_dir = tmp_path / "new" / "data"
    chosen = settings.load(data_dir=data_dir)

    sealed = vault.load_or_make(data_dir, chosen).seal(b"secret")

    assert vault.load_or_make(data_dir, chosen).unseal(sealed) == b"secret"
    assert stat.S_IMODE((data_dir / vault.KEY_FILE).stat().st_mode) == 0o600
    assert [file.name for file in data_dir.iterdir()] == [vault.KEY_FILE]


def test_processes_that_start_together_use_one_key(tmp_path: Path) -> None:
    """Whoever is first makes it."""
    chosen = settings.load(data_dir=tmp_path)
    with ThreadPoolExecutor(16) as threads:
        boxes = list(threads.map(lambda _: vault.load_or_make(tmp_path, chosen), range(64)))

    sealed = boxes[0].seal(b"secret")
    assert all(box.unseal(sealed) == b"secret" for box in boxes)
    assert [file.name for file in tmp_path.iterdir()] == [vault.KEY_FILE]


def test_a_given_key_is_used_and_none_is_made(tmp_path: Path) -> None:
    """Also beside an embedded server."""
    given = key()
    chosen = settings.load(data_dir=tmp_path, secret_key=given.get_secret_value())

    assert Vault([given]).unseal(vault.load_or_make(tmp_path, chosen).seal(b"a")) == b"a"
    assert list(tmp_path.iterdir()) == []


def test_a_given_database_needs_a_given_key(tmp_path: Path) -> None:
    """A key made on one host would be missing on the others."""
    chosen = settings.load(data_dir=tmp_path, database_url=SecretStr("postgresql://db.example/ipn"))

    with pytest.raises(ConfigurationError, match="IPN_SECRET_KEY is required"):
        vault.load_or_make(tmp_path, chosen)
    assert list(tmp_path.iterdir()) == []
