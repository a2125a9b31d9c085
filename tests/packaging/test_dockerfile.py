"""What the Dockerfile promises, read from it: two stages, no root, a health check, and nothing but what is locked."""

from __future__ import annotations

import re

from tests.architecture.source import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
STAGES = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]


def test_two_stages_and_only_the_result_is_taken_over():
    """The second stage copies the environment from the first, and runs no installer."""
    assert len(STAGES) == 2
    assert re.findall(r"^COPY .*", STAGES[1], re.MULTILINE) == ["COPY --from=build /opt/ipn-gateway /opt/ipn-gateway"]
    assert "pip" not in STAGES[1]


def test_it_does_not_run_as_root():
    """A user of its own, before the command, and the data lies where it may write."""
    (user,) = re.findall(r"^USER (.*)", TEXT, re.MULTILINE)

    assert user not in {"root", "0"}
    assert f" {user}\n" in re.findall(r"^RUN useradd .*\n", STAGES[1], re.MULTILINE)[0]
    assert STAGES[1].index("\nUSER ") < STAGES[1].index("\nENTRYPOINT ")


def test_the_health_check_needs_python_alone():
    """No curl is installed for it."""
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n    CMD (\[.*\])$", TEXT, re.MULTILINE)

    assert check.startswith('["python", "-c", ')
    assert "/healthz" in check


def test_everything_installed_comes_from_the_lock():
    """With hashes when it is fetched, and from nothing but those files afterwards."""
    fetched, *others = re.findall(r"pip (?:install|download) [^\n&]*", TEXT)

    assert "--require-hashes" in fetched
    assert "--requirement requirements.lock" in fetched
    assert all("--no-index" in other and "--find-links wheels" in other for other in others)


def test_the_context_is_a_list_of_what_is_needed():
    """Everything is left out but what is copied, so that no secret of a checkout reaches an image."""
    first, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", STAGES[0], re.MULTILINE) for name in line.split()}

    assert first == "*"
    assert {line.removeprefix("!") for line in kept if line.startswith("!")} == copied
