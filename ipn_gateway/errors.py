"""The error tree. A class's docstring is its message; `web/problems.py` is the one place that turns it into HTTP.

GatewayError
├── Unauthorized 401                ├── IdempotencyKeyMissing 400
├── Forbidden 403                   ├── IdempotencyKeyInvalid 400
├── NotFound 404                    ├── IdempotencyKeyReused 422
├── MethodNotAllowed 405            ├── IdempotencyInProgress 409
├── PayloadTooLarge 413             ├── IdempotencyIndeterminate 409
├── UnsupportedMediaType 415        ├── IdempotencyUnavailable 503
├── RequestTimeout 408              ├── Overloaded 503
├── ValidationFailed 422            │   └── PoolExhausted
├── UnknownParameter 400            ├── ConfigurationError (stops a start)
├── MalformedNotification 400       └── (never answered to a client)
├── SignatureInvalid 401                ├── LeaseLost
├── OrderExists 409                     └── CommitUnknown
├── StateConflict 409
└── RateLimited 429

Context goes to the log, never into the message: messages hold no secret and no stored value.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

MEDIA_TYPE: Final = "application/problem+json"


class GatewayError(Exception):
    """Something went wrong in the gateway."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal-error"
    title: ClassVar[str] = "Internal error"

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        errors: list[dict[str, str]] | None = None,
        members: dict[str, Any] | None = None,
        retry_after_seconds: int | None = None,
        **context: Any,
    ) -> None:
        """`detail` is for people and replaces the docstring; `errors` point at fields; `members` are added to the problem document.

        `retry_after_seconds` becomes the header; `context` is logged only.
        """
        super().__init__(detail or (type(self).__doc__ or "").strip().splitlines()[0])
        self.errors = errors or []
        self.members = members or {}
        self.retry_after_seconds = retry_after_seconds
        self.context = context

    def document(self) -> dict[str, Any]:
        """The problem document (RFC 9457)."""
        made: dict[str, Any] = {"type": f"/problems/{self.slug}", "title": self.title, "status": self.status, "detail": str(self)}
        return made | ({"errors": self.errors} if self.errors else {}) | self.members


class Unauthorized(GatewayError):
    """Send a valid API key as `Authorization: Bearer <api key>`."""

    status, slug, title = 401, "unauthorized", "Authentication is required"


class Forbidden(GatewayError):
    """This API key lacks the scope that the call needs."""

    status, slug, title = 403, "forbidden", "The API key lacks a scope"


class NotFound(GatewayError):
    """There is nothing here under this name, or it belongs to somebody else."""

    status, slug, title = 404, "not-found", "Not found"


class MethodNotAllowed(GatewayError):
    """This address does not take this method; the Allow header lists those that it takes."""

    status, slug, title = 405, "method-not-allowed", "Method not allowed"


class RequestTimeout(GatewayError):
    """The request body did not arrive in time; send it again."""

    status, slug, title = 408, "request-timeout", "The body did not arrive in time"


class PayloadTooLarge(GatewayError):
    """The body is larger than this address takes (64 KiB)."""

    status, slug, title = 413, "payload-too-large", "Payload too large"


class UnsupportedMediaType(GatewayError):
    """This address cannot read this Content-Type or Content-Encoding."""

    status, slug, title = 415, "unsupported-media-type", "Unsupported media type"


class ValidationFailed(GatewayError):
    """A field of the request has a value that is not allowed; `errors` names each one."""

    status, slug, title = 422, "validation-failed", "Validation failed"


class UnknownParameter(GatewayError):
    """The request has a query parameter or a doubled JSON member that this call does not know."""

    status, slug, title = 400, "unknown-parameter", "Unknown parameter"


class MalformedNotification(GatewayError):
    """The notification cannot be read; it is stored for audit and nothing else happens."""

    status, slug, title = 400, "malformed-notification", "Malformed notification"


class SignatureInvalid(GatewayError):
    """The notification's hash is missing or wrong; it is stored for audit and nothing else happens."""

    status, slug, title = 401, "signature-invalid", "Signature invalid"


class OrderExists(GatewayError):
    """An order with this order_id exists already; GET it to see what it holds."""

    status, slug, title = 409, "order-exists", "The order exists already"


class StateConflict(GatewayError):
    """The object is in a state that does not allow this."""

    status, slug, title = 409, "state-conflict", "The state does not allow this"


class RateLimited(GatewayError):
    """Too many requests; wait for the time that Retry-After gives."""

    status, slug, title = 429, "rate-limited", "Too many requests"


class Overloaded(GatewayError):
    """The service cannot take this now; send it again after the time that Retry-After gives."""

    status, slug, title = 503, "overloaded", "Overloaded"


class PoolExhausted(Overloaded):
    """All database connections are busy; send it again after the time that Retry-After gives."""


class IdempotencyKeyMissing(GatewayError):
    """This operation requires an Idempotency-Key header."""

    status, slug, title = 400, "idempotency-key-missing", "Idempotency-Key is missing"


class IdempotencyKeyInvalid(GatewayError):
    """The Idempotency-Key must be one value of 1 to 255 printable ASCII characters without space, comma, quote and backslash."""

    status, slug, title = 400, "idempotency-key-invalid", "Idempotency-Key is invalid"


class IdempotencyKeyReused(GatewayError):
    """This Idempotency-Key was already used with a different request."""

    status, slug, title = 422, "idempotency-key-reused", "Idempotency-Key is already used"


class IdempotencyInProgress(GatewayError):
    """The first request with this key is still being worked on: send the same request with the same key again."""

    status, slug, title = 409, "idempotency-in-progress", "A request is outstanding for this Idempotency-Key"


class IdempotencyIndeterminate(GatewayError):
    """It is not known whether the foreign call of the first request happened; it is never repeated by itself."""

    status, slug, title = 409, "idempotency-indeterminate", "The outcome of the first request is unknown"


class IdempotencyUnavailable(GatewayError):
    """The key store cannot be reached, so nothing was executed; send the same request with the same key again."""

    status, slug, title = 503, "idempotency-unavailable", "The key store is unavailable"


class ConfigurationError(GatewayError):
    """The configuration is not usable; the message says what to change."""


class LeaseLost(GatewayError):
    """Another worker holds this row now; nothing was written."""


class CommitUnknown(GatewayError):
    """The connection was lost at COMMIT and the outcome could not be found out within the limit."""
