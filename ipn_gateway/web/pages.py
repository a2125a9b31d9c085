"""Pages for people: `/docs` from the OpenAPI document, `/problems/…` from the error tree. No script, and nothing from another host."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from inspect import cleandoc
from typing import Any, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from ipn_gateway.errors import NotFound
from ipn_gateway.web import problems
from ipn_gateway.web.deps import open_to_all

router = APIRouter(include_in_schema=False, dependencies=[Depends(open_to_all)])

POLICY: Final = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
code,pre{font:14px/1.45 ui-monospace,monospace;background:#f3f4f6;border-radius:4px}code{padding:0 .25em}pre{padding:.75rem;overflow:auto}
h2{margin-top:2.5rem;border-bottom:1px solid #d0d7de}
details{border:1px solid #d0d7de;border-radius:6px;margin:.5rem 0;padding:.25rem .75rem}
summary{cursor:pointer}table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0}
b.method{display:inline-block;min-width:4.5rem}small{color:#57606a}a{color:#0550ae}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}code,pre{background:#161b22}a{color:#79c0ff}small{color:#9198a1}}
"""


def page(title: str, body: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """A whole page; `body` is HTML, `title` is text."""
    return HTMLResponse(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>",
        status_code=status,
        headers={**POLICY, **(headers or {})},
    )


# --- problems


@router.get("/problems")
async def list_problems() -> Response:
    """Every kind of problem."""
    rows = [
        (f'<a href="problems/{slug}">{slug}</a>', str(kind.status), escape(kind.title))
        for slug, kind in sorted(problems.catalogue().items())
    ]
    return page("Problems", _table(("type", "status", "title"), rows))


@router.get("/problems/{slug}")
async def show_problem(request: Request, slug: str) -> Response:
    """What a problem means and what to do about it; as JSON when that is asked for."""
    kind = problems.catalogue().get(slug)
    if kind is None:
        raise NotFound
    meaning = cleandoc(kind.__doc__ or "")
    if _prefers_json(request):
        return JSONResponse({"type": f"/problems/{slug}", "title": kind.title, "status": kind.status, "detail": meaning})
    return page(kind.title, f"<p>HTTP status <code>{kind.status}</code>, type <code>/problems/{slug}</code></p><p>{_prose(meaning)}</p>")


def _prefers_json(request: Request) -> bool:
    accepted = request.headers.get("accept", "").lower()
    return "json" in accepted and "text/html" not in accepted


# --- the API


@router.get("/openapi.json")
async def openapi_document(request: Request) -> Response:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The OpenAPI document as a page."""
    document = request.app.openapi()
    links = '<a href="openapi.json">openapi.json</a> · <a href="v1/contract">contract</a> · <a href="problems">problems</a>'
    parts = [f"<p>{_prose(document['info']['description'])}</p><p>{links}</p>"]
    for tag, operations in _by_tag(document["paths"]).items():
        parts.append(f"<h2>{escape(tag)}</h2>{''.join(operations)}")
    sent = [_operation("POST", name, item["post"]) for name, item in document.get("webhooks", {}).items()]
    parts.append(f"<h2>events that we send</h2>{''.join(sent)}<h2>objects</h2>")
    parts += [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return page(document["info"]["title"], "".join(parts))


def _by_tag(paths: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, operations in paths.items():
        for method, operation in operations.items():
            found.setdefault(operation.get("tags", ["other"])[0], []).append(_operation(method.upper(), path, operation))
    return found


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    summary = operation.get("description") or operation.get("summary", "")
    parts = [f'<details><summary><b class="method">{method}</b> <code>{escape(path)}</code></summary><p>{_prose(summary)}</p>']
    if parameters := operation.get("parameters"):
        rows = [(f"<code>{escape(part['name'])}</code>", part["in"], _prose(part.get("description", ""))) for part in parameters]
        parts.append(_table(("parameter", "in", ""), rows))
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body</p>{_json(body['content']['application/json']['schema'])}")
    rows = [(f"<code>{status}</code>", _prose(answer["description"]), _named(answer)) for status, answer in operation["responses"].items()]
    return "".join([*parts, _table(("answer", "", ""), rows), "</details>"])


def _named(answer: Mapping[str, Any]) -> str:
    """A link to the object that is answered with."""
    schemas = [content.get("schema", {}) for content in answer.get("content", {}).values()]
    names = [schema["$ref"].rpartition("/")[2] for schema in schemas if "$ref" in schema]
    return ", ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    return f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'


def _json(schema: Mapping[str, Any]) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _prose(text: str) -> str:
    """Text with `code` in it."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces))
