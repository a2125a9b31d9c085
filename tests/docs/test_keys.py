"""What the pages say about keys: the statements that callers need, words that promise too much, and the examples, which run."""

from __future__ import annotations

import ast
import asyncio
import copy
import json
import os
import re
import sys
from asyncio.subprocess import PIPE
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from docs import generate
from docs.examples.keys_alone import coffee
from ipn_gateway import idempotency_acts, sources, tenants
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.operations import REPLAYED_HEADER
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web import openapi, problems
from ipn_gateway.web.app import create_app
from ipn_gateway.web.contract import described
from ipn_gateway.web.publication import Limits
from tests.architecture.source import ours
from tests.docs import pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.runtime import Runtime
    from tests.conftest import Server

DOCS = pages.ROOT / "docs"
EXPLANATION, CLIENTS, INGRESS = "explanation/idempotency.md", "howto/idempotency-keys.md", "howto/ingress.md"
CONVENTION = "widely-used Idempotency-Key convention"


def text_of(page: str) -> str:
    """A page without its line breaks."""
    return " ".join((DOCS / page).read_text(encoding="utf-8").replace("*", "").split())


def published() -> str:
    """What callers read: every page, the README and the OpenAPI document; but the table of cases, which names other people's issues."""
    found = [pages.ROOT / "README.md", *sorted(set(DOCS.rglob("*.md")) - {DOCS / "reference/cases.md"})]
    texts = [path.read_text(encoding="utf-8") for path in found]
    return "\n\n".join([*texts, json.dumps(generate.openapi(), ensure_ascii=False)])


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        pytest.param(CLIENTS, "Use a UUIDv4", marks=pytest.mark.case("S10")),
        pytest.param(CLIENTS, "Put nothing personal into a key", marks=pytest.mark.case("S10")),
        pytest.param(CLIENTS, "keys are stored", marks=pytest.mark.case("S10")),
        pytest.param(EXPLANATION, "Put nothing personal into one", marks=pytest.mark.case("S10")),
        pytest.param(EXPLANATION, "Keys are stored as they are", marks=pytest.mark.case("S10")),
        pytest.param(EXPLANATION, "no effect on GET, HEAD, OPTIONS, PUT, PATCH and DELETE", marks=pytest.mark.case("S8")),
        pytest.param(EXPLANATION, "one tenant and one operation", marks=pytest.mark.case("S18")),
        pytest.param(EXPLANATION, "It is per operation because", marks=pytest.mark.case("S18")),
        pytest.param(EXPLANATION, "one database, which is one region", marks=pytest.mark.case("S22")),
        pytest.param(EXPLANATION, "lag is the window in which a repeat executes", marks=pytest.mark.case("S22")),
        pytest.param(EXPLANATION, "reconciliation", marks=pytest.mark.case("S22")),
        pytest.param(EXPLANATION, "This 409 is no failure", marks=pytest.mark.case("S42")),
        pytest.param(EXPLANATION, "Send the same request with the same key again", marks=pytest.mark.case("S42")),
        pytest.param(EXPLANATION, "becomes indeterminate and is never executed again by itself", marks=pytest.mark.case("S63")),
        pytest.param(EXPLANATION, "The client keeps the key", marks=pytest.mark.case("S63")),
        pytest.param(EXPLANATION, "resolve", marks=pytest.mark.case("S63")),
        pytest.param(CLIENTS, "keep the key, never make a new one", marks=pytest.mark.case("S63")),
        pytest.param(EXPLANATION, "A changed request needs a new key", marks=pytest.mark.case("S79")),
        pytest.param(CLIENTS, "A changed request needs a new key", marks=pytest.mark.case("S79")),
        pytest.param(EXPLANATION, "service mesh, which are generators of duplicates", marks=pytest.mark.case("S91")),
        pytest.param(CLIENTS, "Switch off retries that do not know the key", marks=pytest.mark.case("S91")),
        pytest.param(EXPLANATION, "After it is pruned the same key is a new request, and is executed.", marks=pytest.mark.case("S95")),
        pytest.param(CLIENTS, "strictly shorter than its retention", marks=pytest.mark.case("S98")),
        pytest.param(CLIENTS, "retention ≥ attempts × longest wait + time for a person", marks=pytest.mark.case("S98")),
        pytest.param(EXPLANATION, "at least once, and in any order; the senders publish no guarantee", marks=pytest.mark.case("S112")),
        pytest.param(
            "providers/sslcommerz.md", "None is documented, so a lost notification is assumed lost", marks=pytest.mark.case("S112")
        ),
        pytest.param(
            "explanation/guarantees.md", "You get each event at least once, with the same `webhook-id`", marks=pytest.mark.case("S120")
        ),
        pytest.param("howto/receive-events.md", "The same event comes again after your timeout", marks=pytest.mark.case("S120")),
        pytest.param(CLIENTS, "Make the key before the first attempt, and keep it", marks=pytest.mark.case("S131")),
        pytest.param(CLIENTS, "whenever the outcome is unknown", marks=pytest.mark.case("S131")),
        pytest.param(CLIENTS, "Make a new key only after a definite outcome", marks=pytest.mark.case("S131")),
        pytest.param(EXPLANATION, "The outcome is exactly once, because what was applied is written down", marks=pytest.mark.case("S132")),
        pytest.param(EXPLANATION, "the same intended effect, not the same bytes", marks=pytest.mark.case("S136")),
        pytest.param(EXPLANATION, "answers 204 and then 404", marks=pytest.mark.case("S136")),
        pytest.param(INGRESS, "belongs to every release", marks=pytest.mark.case("S12")),
        pytest.param(INGRESS, "post twice through the outer address", marks=pytest.mark.case("S12")),
        pytest.param("reference/idempotency.md", "What streams its answer takes no key", marks=pytest.mark.case("S84")),
        pytest.param("reference/idempotency.md", "A body of more than 64 KiB is kept as", marks=pytest.mark.case("S83")),
    ],
)
def test_the_page_says_it(page: str, sentence: str):
    """What a caller has to know is said where a caller looks."""
    assert sentence in text_of(page)


@pytest.mark.case("S125")
def test_the_header_is_called_a_convention_and_never_a_standard():
    """No page, operation or member says that it conforms to anything; where a standard is named in one sentence, it is denied."""
    text = published()
    sentences = re.split(r"(?<=[.;:!?])\s|\\n\\n|\n\n", text)
    claims = [
        sentence
        for sentence in sentences
        if re.search(r"idempoten", sentence, re.IGNORECASE)
        and re.search(r"\bRFC\b|\bIETF\b|\bstandard|\bconform|\bcompli", sentence, re.IGNORECASE)
        and not re.search(r"[Nn]o standard", sentence)
    ]

    assert "IETF" not in text
    assert claims == []


@pytest.mark.case("S125")
@pytest.mark.parametrize("page", [EXPLANATION, "reference/idempotency.md"])
def test_the_convention_is_named_where_keys_are_explained(page: str):
    """With the words that promise no more than there is, and that what holds is what is written."""
    assert CONVENTION in text_of(page)
    assert CONVENTION in json.dumps(generate.openapi())


@pytest.mark.case("S126")
def test_references_are_to_documents_in_force():
    """What was obsoleted is cited nowhere: structured fields, problem details and UUIDs have newer documents."""
    obsolete = re.compile(rb"RFC[ -]?(%s)\b" % b"|".join(str(number).encode() for number in (7807, 8941, 4122, 7230, 7231, 7235, 2616)))
    citing = [path.relative_to(pages.ROOT).as_posix() for path in ours() if obsolete.search(path.read_bytes())]

    assert citing == []
    assert {"9457"} <= set(re.findall(r"RFC (\d{4})", published()))


def examples() -> list[Any]:
    """Every JSON block of the pages and the README."""
    found = []
    for path in (pages.ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        blocks = pages.blocks(path.read_text(encoding="utf-8"), "json")
        found += [pytest.param(block, id=f"{path.stem}-{number}") for number, block in enumerate(blocks, 1)]
    return found


@pytest.mark.case("S130")
@pytest.mark.parametrize("block", examples())
def test_every_example_is_valid_json(block: str):
    """A problem document that is shown is one that the gateway answers with: type, title and status belong together."""
    shown = json.loads(block)

    if shown.get("type", "").startswith("/problems/"):
        kind = problems.catalogue()[shown["type"].removeprefix("/problems/")]
        assert {"type", "title", "status", "detail"} <= set(shown)
        assert (shown["title"], shown["status"]) == (kind.title, kind.status)


@pytest.mark.case("S130")
def test_problem_documents_are_shown():
    """The two that a caller has to tell apart are there to read."""
    types = {json.loads(example.values[0]).get("type") for example in examples()}

    assert types >= {"/problems/idempotency-in-progress", "/problems/idempotency-key-reused"}


@pytest.mark.case("S22", "S71")
def test_the_contract_is_described_without_a_server(rt: Runtime):
    """Region, downstream keys and the five answers come from the declarations alone."""
    told = described(rt.settings, create_app(rt).routes)["idempotency"]

    assert CONVENTION in told["convention"]
    assert told["downstream"]["key_length_max"] >= 26
    assert {answers["operation"] for answers in told["operations"]} >= {"POST /v1/orders"}


# --- the layer alone, in another application


@pytest.fixture
async def shop(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """The example, on a database in which there is nothing but the shop's own table."""
    with server.database() as url:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            (table,) = pages.blocks((DOCS / "howto/keys-in-your-app.md").read_text(encoding="utf-8"), "sql")
            await connection.execute(table)
        monkeypatch.setenv("SHOP_DATABASE_URL", url)
        transport = httpx.ASGITransport(app=coffee.app)
        async with (
            coffee.app.router.lifespan_context(coffee.app),
            httpx.AsyncClient(transport=transport, base_url="http://shop.test", headers={"X-Customer": "ann"}) as client,
        ):
            yield client, url


async def counted(url: str) -> tuple[int, int]:
    """Coffees, and keys."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        found = await connection.execute("SELECT (SELECT count(*) FROM coffees), (SELECT count(*) FROM idempotency_keys)")
        row = await found.fetchone()
    assert row is not None
    return row[0], row[1]


async def test_the_layer_works_alone_in_another_application(shop: tuple[httpx.AsyncClient, str]):
    """One coffee for each key and customer; a repeat gets the stored answer, another request a 422, no key a 400, nobody a 401."""
    client, url = shop
    key, flat_white = {"Idempotency-Key": "k-1"}, {"kind": "flat white", "price": "3.50"}

    first = await client.post("/coffees", json=flat_white, headers=key)
    repeat = await client.post("/coffees", json={"price": "3.5", "kind": "flat white", "name": "Ann"}, headers=key)
    other = await client.post("/coffees", json=flat_white | {"price": "4.00"}, headers=key)
    missing = await client.post("/coffees", json=flat_white)
    nobody = await client.post("/coffees", json=flat_white, headers=key | {"X-Customer": ""})
    bob = await client.post("/coffees", json=flat_white, headers=key | {"X-Customer": "bob"})

    assert [answer.status_code for answer in (first, repeat, other, missing, nobody, bob)] == [201, 201, 422, 400, 401, 201]
    assert (first.content, first.headers["location"]) == (repeat.content, repeat.headers["location"])
    assert (first.headers.get(REPLAYED_HEADER), repeat.headers[REPLAYED_HEADER]) == (None, "true")
    assert other.json()["type"] == "/problems/idempotency-key-reused"
    assert bob.headers["location"] != first.headers["location"]
    assert await counted(url) == (2, 2)


async def test_many_at_once_make_one_coffee(shop: tuple[httpx.AsyncClient, str]):
    """The database decides who is first; the others are told to wait or get the answer."""
    client, url = shop

    asked = [client.post("/coffees", json={"kind": "mocha", "price": "4.00"}, headers={"Idempotency-Key": "k-1"}) for _ in range(20)]
    answers = await asyncio.gather(*asked)

    assert {answer.status_code for answer in answers} <= {201, 409}
    assert sum(answer.status_code == 201 and REPLAYED_HEADER not in answer.headers for answer in answers) == 1
    assert await counted(url) == (1, 1)


async def test_what_is_past_its_retention_is_pruned_there_too(shop: tuple[httpx.AsyncClient, str]):
    """As the page says; after that the same key is a new request."""
    client, url = shop
    asked: dict[str, Any] = {"json": {"kind": "latte", "price": "4.00"}, "headers": {"Idempotency-Key": "k-1"}}
    first = await client.post("/coffees", **asked)

    async with Database(url, clock=Clock(timedelta(hours=25)), faults=Faults()) as db:
        pruned = [await idempotency_acts.prune(db) for _ in range(2)]
    again = await client.post("/coffees", **asked)

    assert pruned == [1, 0]
    assert again.headers["location"] != first.headers["location"]


def test_its_answers_can_be_published():
    """As the page says, in the OpenAPI document of the application."""
    document = copy.deepcopy(coffee.app.openapi())

    openapi.extend(document, coffee.app.routes, Limits(30, 24))

    told = document["paths"]["/coffees"]["post"]["x-idempotency"]
    assert told["fingerprint"]["body"]["price"]["compared"] == "decimal"
    assert (told["retention"]["hours"], told["concurrency"]["lease_seconds"]) == (24, 30)


def test_the_example_is_short_and_is_what_the_page_shows():
    """Under thirty lines beside imports and docstrings; the page has the file from its first declaration on."""
    source = (DOCS / "examples/keys_alone/coffee.py").read_text(encoding="utf-8")
    (shown,) = pages.blocks((DOCS / "howto/keys-in-your-app.md").read_text(encoding="utf-8"), "python")
    tree = ast.parse(source)
    left_out = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node)]
    skipped = {line for node in left_out if isinstance(node, ast.stmt) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    code = [line for number, line in enumerate(source.splitlines(), 1) if line.strip() and number not in skipped]

    assert source.endswith(shown)
    assert len(code) < 30


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# --- the ingress


class Losing:
    """An ingress that does not know a header: it takes it out of requests, or out of answers."""

    def __init__(self, app: Any, header: str) -> None:
        self._app = app
        self._header = header.lower().encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            await send(self._without(message) if message["type"] == "http.response.start" else message)

        await self._app(self._without(scope) if scope["type"] == "http" else scope, receive, sent)

    def _without(self, given: Any) -> dict[str, Any]:
        return {**given, "headers": [(name, value) for name, value in given["headers"] if name.lower() != self._header]}


@pytest.mark.case("S12")
@pytest.mark.parametrize(
    ("lost", "code", "sentence"),
    [("X-Nothing", 0, ""), ("Idempotency-Key", 1, "lost on the way"), ("Idempotent-Replayed", 1, "lost on the way")],
)
async def test_the_release_step_sees_an_ingress_that_loses_the_header(rt: Runtime, lost: str, code: int, sentence: str):
    """The script of the page, as a process of its own: it ends with 0 through an honest ingress, with a sentence through any other."""
    key = (await tenants.create_key(rt.db, "acme")).key
    config = {"store_id": "testbox", "store_passwd": "qwerty", "mode": "sandbox"}
    await sources.create(rt.db, rt.vault, "acme", "shop", provider="sslcommerz", given=config, actor="test")

    async with serving(Losing(create_app(rt), lost)) as url:
        script = await asyncio.create_subprocess_exec(
            *(sys.executable, str(DOCS / "examples/ingress.py"), url, "shop"), env=os.environ | {"API_KEY": key}, stderr=PIPE
        )
        _, said = await script.communicate()

    assert (script.returncode, sentence in said.decode()) == (code, True), said.decode()


# --- a repeated DELETE


@pytest.mark.case("S136")
async def test_a_repeated_delete_is_204_and_then_404(rt: Runtime):
    """The intended effect is the same, the answer is not; the header changes nothing about it."""
    key = (await tenants.create_key(rt.db, "acme")).key
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "k-1"}
    app = create_app(rt)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test", headers=headers) as client:
        endpoint = (await client.post("/v1/endpoints", json={"url": "https://subscriber.example/events"})).json()["id"]
        answers = [await client.delete(f"/v1/endpoints/{endpoint}") for _ in range(2)]
    await app.state.slots.drained()

    assert [answer.status_code for answer in answers] == [204, 404]
    assert not any(REPLAYED_HEADER in answer.headers for answer in answers)
