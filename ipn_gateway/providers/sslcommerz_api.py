"""How SSLCOMMERZ's API v4 is reached: a store's configuration, the addresses, and what every question and answer have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from ipn_gateway.providers import answers, configs
from ipn_gateway.providers.base import Answer, Ask, NoAnswer, ProviderConfig

SESSION: Final = "/gwprocess/v4/api.php"
VALIDATOR: Final = "/validator/api/validationserverAPI.php"
QUERY: Final = "/validator/api/merchantTransIDvalidationAPI.php"
"""The transaction query; a refund and the question about one have the same address (API v4)."""

MASKED_FIELDS: Final = ("card_no", "cus_*")

_HOSTS: Final = {"sandbox": "https://sandbox.sslcommerz.com", "live": "https://securepay.sslcommerz.com"}


class SslcommerzConfig(ProviderConfig, frozen=True):
    """A store. `store_id` and `store_passwd` are those of API v4, not of the merchant panel."""

    SECRETS: ClassVar[tuple[str, ...]] = ("store_passwd",)

    store_id: configs.CleanText
    store_passwd: configs.CleanSecret
    mode: Literal["sandbox", "live"]
    base_url: configs.Origin | None = None

    @property
    def account(self) -> str:
        """The store's id."""
        return self.store_id

    def url(self, path: str) -> str:
        """A path of theirs on `base_url`, by default on the host of the mode."""
        return (self.base_url or _HOSTS[self.mode]) + path

    def credentials(self) -> dict[str, str]:
        """What every call carries, by GET in its query: never to be logged or kept."""
        return {"store_id": self.store_id, "store_passwd": self.store_passwd.get_secret_value()}


async def get(ask: Ask, config: SslcommerzConfig, path: str, **params: str) -> Answer | NoAnswer:
    """One question by GET."""
    return await ask("GET", config.url(path), params={**params, **config.credentials(), "format": "json"})


def refusal(answer: Mapping[str, Any]) -> str | None:
    """The cause when `APIConnect` is not DONE: then the call was not taken, and the rest of the answer says nothing (API v4)."""
    connect = answers.text(answer, "APIConnect")
    return None if connect == "DONE" else answers.code("api_connect", connect)


def view(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer to keep, without card numbers, what is known of the customer, and credentials."""
    return answers.view(answer, (*MASKED_FIELDS, "store_passwd"))
