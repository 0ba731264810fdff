"""docs/observability.md: its table has every metric of ours, and no other."""

import re
from pathlib import Path

from jaxserve.config.schema import RouteConfig
from jaxserve.engine import Engine, ModelInfo
from jaxserve.routing import create_router
from jaxserve.sched import create_scheduler
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.metrics import PREFIX, make_registry
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.route_apart import Apart
from jaxserve.serve.route_metrics import RouteCollector
from jaxserve.serve.route_pool import Pool
from jaxserve.serve.route_service import MoveLimits, RouteService
from jaxserve.testing import FakeRunner, make_limits

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"


def test_the_table_lists_what_is_exported() -> None:
    limits = make_limits()
    engine = Engine(
        runner=FakeRunner(limits),
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=None,
        model=ModelInfo(name="m", vocab_size=256, max_model_len=64, eos_token_ids=()),
    )
    families = make_registry(engine, DoorCounts()).collect()
    config = RouteConfig(replicas=["127.0.0.1:1"])
    pool = Pool(config, create_router("least_load"))
    quarantine = Quarantine(1.0)
    service = RouteService(pool, MoveLimits(0, 0.0), Apart.of(config), quarantine)
    families = [*families, *RouteCollector(pool, service, quarantine, DoorCounts()).collect()]
    exported = {family.name: family.type for family in families if family.name.startswith(PREFIX)}
    rows = re.findall(r"^\| (`jaxserve:.*?) \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    listed = {name: kind for names, kind in rows for name in re.findall(r"`(jaxserve:[a-z0-9_]+)`", names)}
    assert listed == exported
