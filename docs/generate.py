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

from ipn_gateway import cli, models
from ipn_gateway.settings import Settings
from ipn_gateway.web import problems
from ipn_gateway.web.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo

    from ipn_gateway.runtime import Runtime

REFERENCE: Final = Path(__file__).parent / "reference"
WIDTH: Final = 130
NOTICE: Final = "<!-- Written by `make docs` from {source}; changes here are lost. -->"
DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy has no types there


def pages() -> dict[str, str]:
    """The generated pages: file name and text."""
    made = {
        "settings.md": ("Settings", "`ipn_gateway/settings.py`", _settings()),
        "http-api.md": ("HTTP API", "the OpenAPI document", _http_api()),
        "commands.md": ("Commands", "the command line", _commands()),
        "errors.md": ("Errors", "`ipn_gateway/errors.py`", _errors()),
        "schema.md": ("Schema", "`ipn_gateway/models.py`", _schema()),
    }
    return {
        name: "\n".join([NOTICE.format(source=source), f"# {title}", "", *lines]).rstrip() + "\n"
        for name, (title, source, lines) in made.items()
    }


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
    """The OpenAPI document; the application reads nothing but settings for it."""
    app = create_app(cast("Runtime", SimpleNamespace(settings=Settings())))
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
            what = " ".join(operation.get("description", operation.get("summary", "")).split())
            answers = " ".join(sorted(operation["responses"]))
            found.setdefault(operation.get("tags", ["other"])[0], []).append((f"`{method.upper()} {path}`", query, what, answers))
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


def main() -> None:
    """Write the pages that differ."""
    for name, text in pages().items():
        path = REFERENCE / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(json.dumps({"written": f"docs/reference/{name}"}))


if __name__ == "__main__":
    main()
