"""Writes the generated pages of `docs/reference/` from the code: `make docs`. A test compares what is there with what this would write."""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import typer
from pydantic_core import PydanticUndefined
from sqlalchemy import CheckConstraint, ForeignKeyConstraint, PrimaryKeyConstraint, Table, UniqueConstraint
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex
from sqlmodel import SQLModel

from docs import acceptance, vectors
from ipn_gateway import cli, errors, models, pruning, pull, retention, workers
from ipn_gateway.clock import Clock
from ipn_gateway.fingerprints import KINDS
from ipn_gateway.operations import REPLAYED_HEADER
from ipn_gateway.settings import Settings
from ipn_gateway.web import metrics, problems, publication
from ipn_gateway.web.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo

    from ipn_gateway.retention import Kept
    from ipn_gateway.runtime import Runtime

REFERENCE: Final = Path(__file__).parent / "reference"
WIDTH: Final = 130
NOTICE: Final = "<!-- Written by `make docs` from {source}; changes here are lost. -->"
DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy has no types there


def pages() -> dict[str, str]:
    """The generated pages: file name and text. One is no page: messages for receivers to try their hand at."""
    made = {
        "settings.md": ("Settings", "`ipn_gateway/settings.py`", _settings()),
        "http-api.md": ("HTTP API", "the OpenAPI document", _http_api()),
        "commands.md": ("Commands", "the command line", _commands()),
        "errors.md": ("Errors", "`ipn_gateway/errors.py`", _errors()),
        "metrics.md": ("Metrics", "`ipn_gateway/web/metrics.py` and `ipn_gateway/gauges.py`", _metrics()),
        "schema.md": ("Schema", "`ipn_gateway/models.py`", _schema()),
        "idempotency.md": ("Idempotency keys", "what the operations declare", _idempotency()),
        "retention.md": ("Retention", "`ipn_gateway/retention.py`", _retention()),
        "cases.md": ("Cases", "`docs/acceptance.py` and the marks of the tests", _cases()),
        "acceptance.md": ("Acceptance", "`docs/acceptance.py` and the marks of the tests", _acceptance()),
    }
    written = {
        name: "\n".join([NOTICE.format(source=source), f"# {title}", "", *lines]).rstrip() + "\n"
        for name, (title, source, lines) in made.items()
    }
    return written | {"signature-vectors.json": vectors.text()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; a `|` inside a cell is escaped."""
    lines = [list(head), ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines] + [""]


# --- settings


def _settings() -> list[str]:
    rows = [(f"`IPN_{name.upper()}`", _default(field), _meaning(field)) for name, field in Settings.model_fields.items()]
    return [
        "Read once at the start from environment variables. Units are in the names; seconds may have decimals. A schedule is a list of",
        "waits in seconds, `N*K` is N, K times. A wrong value, and a lease that is not at least 1.5 × the timeout under it, stop the start",
        "with a sentence; an unknown `IPN_…` name is warned about.",
        "",
        *table(("setting", "default", "meaning"), rows),
    ]


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "a per-user data directory"
    value = field.default
    assert value is not PydanticUndefined
    if value in (None, ()):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{_waits(value)}`" if isinstance(value, tuple) else f"`{value}`"


def _waits(values: tuple[Any, ...]) -> str:
    """A schedule as it is written: equal neighbours together."""
    parts: list[tuple[Any, int]] = []
    for value in values:
        if parts and parts[-1][0] == value:
            parts[-1] = (value, parts[-1][1] + 1)
        else:
            parts.append((value, 1))
    return ",".join(f"{value}*{times}" if times > 1 else f"{value}" for value, times in parts)


def _meaning(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{sign} {getattr(part, name):g}" for part in field.metadata for name, sign in signs.items() if hasattr(part, name)]
    return f"{field.description} ({', '.join(limits)})" if limits else str(field.description)


# --- HTTP API


def openapi() -> dict[str, Any]:
    """The OpenAPI document; the application reads nothing but its settings for it."""
    app = create_app(cast("Runtime", SimpleNamespace(settings=Settings(), clock=Clock(), db=None)))
    return app.openapi()


def _http_api() -> list[str]:
    document = openapi()
    lines = [
        *textwrap.wrap(document["info"]["description"], WIDTH),
        "",
        "This is an overview; `/docs` and `/openapi.json` of a running gateway have every member of every body.",
        "",
    ]
    for tag, calls in _by_tag(document["paths"]).items():
        lines += [f"## {tag.capitalize()}", "", *table(("call", "query", "what it does", "answers"), calls)]
    events = [(f"`{name}`", _schema_name(call["post"])) for name, call in document["webhooks"].items()]
    return [*lines, "## Webhooks", "", "What is sent to endpoints, after Standard Webhooks 1.0.0.", "", *table(("event", "body"), events)]


def _by_tag(paths: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for path, operations in paths.items():
        for method, operation in operations.items():
            query = ", ".join(f"`{part['name']}`" for part in operation.get("parameters", []) if part["in"] == "query")
            what = operation.get("description", operation.get("summary", "")).partition(f"\n\n{publication.PROSE}")[0]
            answers = " ".join(sorted(operation["responses"]))
            call = (f"`{method.upper()} {path}`", query, " ".join(what.split()), answers)
            found.setdefault(operation.get("tags", ["other"])[0], []).append(call)
    return found


def _schema_name(operation: Mapping[str, Any]) -> str:
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return f"`{reference.rpartition('/')[2]}`"


# --- commands


def _commands() -> list[str]:
    root = typer.main.get_command(cli.app)
    lines = [
        "With `--json` the last line on standard output is one JSON object. Data goes to standard output, the rest to standard error.",
        "Commands work beside a running `serve` and without one, on the same [settings](settings.md).",
        "`ipn-gateway --install-completion` teaches your shell the commands; `--show-completion` prints what that would add.",
        "",
        "## Exit codes",
        "",
        *table(("code", "meaning"), [(str(code), meaning) for code, meaning in cli.EXIT_CODES.items()]),
    ]
    for name, command in _leaves(root, "ipn-gateway"):
        lines += _command(name, command)
    return lines


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The commands below one, each with its whole name."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in command.commands:
        yield from _leaves(command.commands[name], f"{path} {name}")


def _command(path: str, command: Any) -> list[str]:
    context = typer.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    rows = [_option(option, context) for option in command.params if option.param_type_name == "option" and option.name != "help"]
    help_text = "\n".join(line.strip() for line in (command.help or "").splitlines())
    return [
        f"## {path.removeprefix('ipn-gateway ')}",
        "",
        f"`{usage}`",
        "",
        help_text.strip(),
        "",
        *(table(("option", "meaning"), rows) if rows else []),
        *_examples(command.epilog),
    ]


def _option(option: Any, context: typer.Context) -> tuple[str, str]:
    written, meaning = option.get_help_record(context)
    return f"`{written}`", " ".join(meaning.split())


def _examples(epilog: str | None) -> list[str]:
    lines = [line.strip().removeprefix("Example: ") for line in (epilog or "").splitlines()]
    shown = [
        f"  {line}" if before.endswith("\\") else line
        for before, line in itertools.pairwise(["", *lines])
        if line.startswith("ipn-gateway") or before.endswith("\\")
    ]
    return ["```sh", *shown, "```", ""] if shown else []


# --- errors


def _errors() -> list[str]:
    rows = [
        (f"`{kind.slug}`", str(kind.status), kind.title, (kind.__doc__ or "").strip().splitlines()[0])
        for kind in sorted(problems.catalogue().values(), key=lambda kind: (kind.status, kind.slug))
    ]
    return [
        "Every refusal is a problem document after RFC 9457, `application/problem+json`. Its `type` is `/problems/<slug>`, a page that the",
        "gateway serves. `errors` point at the members that are wrong; messages hold no secret and no stored value.",
        "",
        *table(("slug", "status", "title", "what it says"), rows),
    ]


# --- metrics

ALERTS: Final = (
    ("absent(database_up) or database_up == 0", "the database is away, or nobody is asked: no data is an alert of its own"),
    (
        'past_due_oldest_seconds{work!="inbox_unproved"} > 300',
        "work is late by its due time: workers are down, or a provider or an endpoint is; what waits for its next attempt is not late",
    ),
    ("absent(past_due_oldest_seconds)", "it is not known whether work is late"),
    ('notifications_open{state=~"held|conflict|dead"} > 0', "notifications wait for a person"),
    ("idempotency_keys_indeterminate_oldest_seconds > 3600", "an unknown outcome at a provider is not cleared up by itself"),
    ("idempotency_keys_abandoned > 0", "calls ended without an answer, and nobody repeats them (for longer than ten minutes)"),
    ("increase(idempotency_slow_total[1h]) > 0", "calls come near the end of their lease"),
    ("retention_overdue_seconds > 86400", "the maintenance role does not drop or delete what is past its time"),
    (
        "retention_kept_partitions > 0",
        "a month is kept only because something in it has waited for a person since then",
    ),
    ("partitions_ahead_days < 14", "the maintenance role makes no partitions; readiness fails below seven"),
    ("increase(requests_failed_total[15m]) > 0", "incidents, which the log describes"),
)
"""What to be woken by: the expression and what it tells."""


def _metrics() -> list[str]:
    gauges = [(f"`{name}`", f"`{gauge.label}`" if gauge.label else "", gauge.meaning) for name, gauge in metrics.GAUGES.items()]
    counters = [(f"`{metric}`", f"`{label}`" if label else "", meaning) for metric, label, meaning in metrics.described()]
    return [
        "`GET /metrics` answers in the text format of Prometheus, without a key; let your proxy keep it inside. Nothing is told by tenant.",
        "The gauges are read from the database when somebody asks: at most every five seconds, within two seconds, one at a time. What",
        "could not be read is missing. They say the same in every process on one database; connections and counters are the process's own.",
        "",
        "## Gauges",
        "",
        *table(("metric", "label", "meaning"), gauges),
        "## Counters",
        "",
        "Since the start of the process. `<…>` stands for a word; such a counter appears with its first count, the others begin with 0.",
        "",
        *table(("metric", "label", "meaning"), counters),
        "## Alerts",
        "",
        "What to be woken by.",
        "",
        *table(("expression", "what it tells"), [(f"`{expression}`", what) for expression, what in ALERTS]),
    ]


# --- schema


def _schema() -> list[str]:
    described = {str(model.__tablename__): model.__doc__ or "" for model in vars(models).values() if _is_table(model)}
    lines = [*(models.__doc__ or "").strip().splitlines()[2:], ""]
    for name, text in described.items():
        lines += _table(SQLModel.metadata.tables[name], text)
    return lines


def _is_table(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, SQLModel) and hasattr(model, "__table__")


def _table(described: Table, text: str) -> list[str]:
    columns = [
        (f"`{column.name}`", f"`{column.type.compile(DIALECT).lower()}`", "yes" if column.nullable else "", _server_default(column))
        for column in described.columns
    ]
    rules = sorted(filter(None, map(_rule, described.constraints)))
    indexes = sorted(_index(str(CreateIndex(index).compile(dialect=DIALECT))) for index in described.indexes)
    return [
        f"## {described.name}",
        "",
        text.strip(),
        "",
        *table(("column", "type", "null", "default"), columns),
        *[f"- {line}" for line in [*rules, *indexes]],
        "",
    ]


def _server_default(column: Any) -> str:
    return f"`{column.server_default.arg}`" if column.server_default is not None else ""


def _rule(constraint: Any) -> str:
    columns = ", ".join(column.name for column in constraint.columns)
    match constraint:
        case PrimaryKeyConstraint():
            return f"primary key `({columns})`"
        case UniqueConstraint():
            return f"unique `({columns})`"
        case ForeignKeyConstraint():
            return f"foreign key `({columns})` → `{constraint.elements[0].target_fullname.partition('.')[0]}`"
        case CheckConstraint():
            return f"check `{constraint.sqltext}`"
    return ""


def _index(statement: str) -> str:
    return f"`{' '.join(statement.split()).removeprefix('CREATE ').lower()}`"


# --- keys


def _idempotency() -> list[str]:
    blocks = [
        operation[publication.EXTENSION]
        for operations in openapi()["paths"].values()
        for operation in operations.values()
        if publication.EXTENSION in operation
    ]
    answered = [(f"`{kind.slug}`", str(kind.status), kind.__doc__ or "") for kind in publication.OF_THE_KEY]
    return [
        f"What a key means for each operation, after {publication.CONVENTION}; no standard defines the header. The same stands beside each",
        "operation in `/openapi.json`, as `x-idempotency` and in words, and in `/v1/contract`. [Why](../explanation/idempotency.md), and",
        "[how to use keys](../howto/idempotency-keys.md).",
        "",
        *table(("operation", "key", "hours", "compared, beside path and query", "class", "stored"), map(_keyed, blocks)),
        "## Alike for all",
        "",
        *_alike(blocks[0]),
        "",
        "## What the key itself answers",
        "",
        *table(("slug", "status", "what it says"), answered),
    ]


def _alike(block: Mapping[str, Any]) -> Iterator[str]:
    key, kept, waiting, recovery = block["key"], block["retention"], block["concurrency"], block["recovery"]
    repeat, unknown, kinds = recovery["repeat"], errors.IdempotencyIndeterminate, "; ".join(f"*{kind}* {KINDS[kind]}" for kind in KINDS)
    never, refused = (", ".join(map(str, block["statuses"][name])) for name in ("never_stored", "refused_before_the_key"))
    said = {
        "Key": f"`{key['header']}`: {key['length_min']} to {key['length_max']} characters of {key['alphabet']}, as in `{key['pattern']}`; "
        f"{key['quotes']}. Recommended is {key['recommended']}.",
        "Scope": f"One {' and one '.join(block['scope']['unique_per'])}: {block['scope']['elsewhere']}.",
        "Region": block["scope"]["region"],
        "Retention": f"From the {kept['starts']}. Afterwards {kept['afterwards']}. Never pruned is {kept['never_pruned']}.",
        "Fingerprint": f"Members are compared {kinds}. Ignored are {block['fingerprint']['ignored']}.",
        "Concurrency": f"Claimed {waiting['claimed']}. Meanwhile 409 with `Retry-After`: {waiting['in_progress']['then']}. "
        f"A tenant has at most {waiting['open_keys_max']} open keys.",
        "Recovery": f"After a crash, {recovery['after_a_crash']}; {recovery['disconnect']}. Where an outcome cannot be known, "
        f"{unknown.status} `{unknown.slug}` with a `reconciliation_id`.",
        "Repeats": f"They get {repeat['gets']}; they are marked `{REPLAYED_HEADER}: true`. A body of more than "
        f"{repeat['body_bytes_max'] // 1024} KiB is kept as `{repeat['larger_body']}`. What streams its answer takes no key.",
        "Stored": f"What the table names, where the operation decided it: {block['statuses']['stored_when']}.",
        "Never stored": f"{never}, and what the key itself answers.",
        "Refused before the key is claimed": f"{refused}, for what they find in the request: nothing is stored, and the mended request may "
        "use the same key.",
    }
    for title, text in said.items():
        yield from textwrap.wrap(f"- **{title}.** {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _keyed(block: Mapping[str, Any]) -> tuple[str, ...]:
    members = ", ".join(
        f"`{name}`" + ("" if given["compared"] == "json" else f" ({given['compared']})")
        for name, given in block["fingerprint"]["body"].items()
    )
    left_out = "".join(f", without `{name}`" for name in block["recovery"]["repeat"]["left_out"])
    return (
        f"`{block['operation']}`",
        "required" if block["key"]["required"] else "optional",
        f"{block['retention']['hours']:g}",
        members,
        block["recovery"]["class"] + (", may stay unknown" if block["recovery"]["indeterminate"] else ""),
        ", ".join(map(str, block["statuses"]["stored"])) + left_out,
    )


# --- acceptance


def _acceptance() -> list[str]:
    tests, excused = acceptance.by_statement(), acceptance.excused()
    rows = [
        (number, statement, "<br>".join(tests.get(number, [f"none: {excused.get(number, '?')}"])))
        for number, statement in acceptance.STATEMENTS.items()
    ]
    return [
        "What has to hold, each as a statement that a test can refute, and the tests that would. A test carries the numbers of its",
        'statements in a mark, `@pytest.mark.case("S24")`.',
        "",
        *table(("", "statement", "tests"), rows),
    ]


def _cases() -> list[str]:
    tests = acceptance.by_case()
    rows = [(number, source, statement, "<br>".join(tests.get(number, []))) for number, (source, statement) in acceptance.CASES.items()]
    return [
        *_prose(
            """Faults that others had in public, and what must hold here instead, with the tests that would refute it. Each was
            looked for in all its kind, not only where it was seen. A test carries the numbers of its cases in a mark,
            `@pytest.mark.case("B05")`. What SSLCOMMERZ, the API or a subscriber can show is tested on those; the rest on providers
            that exist in tests only (`tests/adapters.py`). Sources are `owner/repository#issue` or `owner/repository PR #number` on
            github.com, else an address."""
        ),
        *table(("", "seen in", "what must hold", "tests"), rows),
    ]


# --- retention

FORGOTTEN: Final = f"""
- That a payment was applied, and what was refunded, is known **for ever**: a copy of the oldest notification is still a
  duplicate, whatever the provider says about it by then.
- The bytes of a notification, and what the provider answered about it, are gone with its month: it is not found any more, nor
  replayed. That a person dismissed a notification is known as long as that notification is: a copy that comes later waits for a
  person again.
- An order's timeline keeps the order, effects, payments and refunds.
- `GET /v1/events`: {pull.PRUNED}.
- An idempotency key that was pruned is a new request; order ids and refund references stop a second effect.
"""


def _retention() -> list[str]:
    settings = Settings()
    in_order = sorted(retention.KEPT.items(), key=lambda entry: (entry[1].setting is None, entry[1].until is None, entry[0]))
    rows = [(f"`{name}`", _kept(kept, settings), kept.starts or "", kept.note or "") for name, kept in in_order]
    return [
        *_prose(
            """How long each table is kept. A window is the least: what is past it goes soon after, where nothing waits for it any
            more, and what still waits is never deleted, however old. The same is in `/v1/contract`, with the numbers of the running
            gateway."""
        ),
        *_prose(
            f"""The maintenance role enforces it every {workers.RETENTION_SECONDS / 60:g} minutes, without a lock that a notification
            waits for: months are detached concurrently, then dropped; events are deleted at most {pruning.EVENTS_AT_ONCE} at a
            time, with a pause after each batch. It follows the database's clock. `ipn-gateway retention --dry-run` shows what is
            past its time, and `retention_overdue_seconds` how late the role is. To keep a month elsewhere, detach its partition by
            hand before its time: what a person detached is never dropped."""
        ),
        *table(("table", "kept", "from", "notes"), rows),
        "## What is forgotten",
        "",
        *FORGOTTEN.strip().splitlines(),
    ]


def _prose(text: str) -> list[str]:
    return [*textwrap.wrap(" ".join(text.split()), WIDTH, break_on_hyphens=False, break_long_words=False), ""]


def _kept(kept: Kept, settings: Settings) -> str:
    return f"{kept.told(settings)['kept']} (`IPN_{kept.setting.upper()}`)" if kept.setting else kept.told(settings)["kept"]


def main() -> None:
    """Write the pages that differ."""
    for name, text in pages().items():
        path = REFERENCE / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(json.dumps({"written": f"docs/reference/{name}"}))


if __name__ == "__main__":
    main()
