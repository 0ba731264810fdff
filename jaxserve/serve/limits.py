"""From the `serve` section of a config to the limits that a front door keeps: of calls, and of tenants."""

import dataclasses

from jaxserve.config.schema import ServeConfig, TenantConfig, TenantsConfig
from jaxserve.engine.streams import CallLimits
from jaxserve.engine.tenants import TenantLimits, Tenants


def call_limits(config: ServeConfig) -> CallLimits:
    """Those of each call; settings and limits have the same names."""
    return CallLimits(**{field.name: getattr(config, field.name) for field in dataclasses.fields(CallLimits)})


def make_tenants(config: TenantsConfig) -> Tenants | None:
    """None: no tenant has a limit."""
    if config == TenantsConfig():
        return None
    return Tenants(_limits(config.default), {name: _limits(one) for name, one in config.named.items()})


def _limits(config: TenantConfig) -> TenantLimits:
    return TenantLimits(**config.model_dump())
