"""From `serve.tenants` of a config to the limits that a front door keeps."""

from jaxserve.config.schema import TenantConfig, TenantsConfig
from jaxserve.engine.tenants import TenantLimits, Tenants


def make_tenants(config: TenantsConfig) -> Tenants | None:
    """None: no tenant has a limit."""
    if config == TenantsConfig():
        return None
    return Tenants(_limits(config.default), {name: _limits(one) for name, one in config.named.items()})


def _limits(config: TenantConfig) -> TenantLimits:
    return TenantLimits(**config.model_dump())
