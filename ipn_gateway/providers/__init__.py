"""The provider adapters, found by looking: every module here with a `PROVIDER`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipn_gateway.providers.base import Provider


@cache
def discovered() -> dict[str, Provider]:
    """Every provider by its name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    providers = [module.PROVIDER for module in modules if hasattr(module, "PROVIDER")]
    return {provider.name: provider for provider in providers}
