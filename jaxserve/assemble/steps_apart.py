"""The work of a process beside the one that serves: it compiles steps into the store, and loads no weights."""

from jaxserve.assemble import plan_stages
from jaxserve.assemble.devices import find_devices
from jaxserve.assemble.pictures import plan_pictures
from jaxserve.runtime.apart import Orders, use_settings
from jaxserve.runtime.build import OnBuilt, store_steps
from jaxserve.runtime.mesh import make_meshes


def carry_out(orders: Orders, tell: OnBuilt) -> None:
    """Builds the steps one after the other, and tells of each. Raises what the planning of a model raises."""
    use_settings(orders.settings)
    config = orders.config
    first = make_meshes(config.parallel, find_devices(config))[0]
    planned = plan_stages(config, first)
    tower = plan_pictures(config, planned[0].shapes.mesh, planned[0].shapes.dtype)
    store_steps(config, planned, tower=tower, orders=orders, tell=tell)
