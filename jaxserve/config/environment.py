"""The environment variables that set settings, by name.

`JAXSERVE_SECTION__NAME` sets `section.name`, whatever the depth: `JAXSERVE_SERVE__HTTP__PORT`. Some settings have a
shorter name, which other programs set, too.
"""

import difflib
import re
from collections.abc import Collection, Mapping

from jaxserve.values.other_names import Place, answer

ENVIRONMENT: Mapping[str, str] = {  # the shorter names -> the settings
    "JAXSERVE_COMPILE_CACHE": "runtime.compile_cache",
    "JAXSERVE_LOG_LEVEL": "runtime.log_level",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "runtime.trace_endpoint",
    "OTEL_SERVICE_NAME": "runtime.trace_service",
    "JAXSERVE_COORDINATOR": "hosts.coordinator",
    "JAXSERVE_NUM_PROCESSES": "hosts.num_processes",
    "JAXSERVE_PROCESS_ID": "hosts.process_id",
    "JAXSERVE_HOSTS_SECRET_FILE": "hosts.secret_file",
}
_PREFIX = "JAXSERVE_"
_TESTS = "JAXSERVE_TEST_"  # read by the test suite alone
# Kubernetes and Docker tell a container of services beside it; one called `jaxserve` makes names with our prefix.
_LINK = re.compile(r"JAXSERVE(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*|PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)")
_LINKED_PORT = re.compile(r"JAXSERVE(_[A-Z0-9]+)*_PORT")
_LINKED_URL = re.compile(r"(tcp|udp|sctp)://")


def variable_of(name: str) -> str:
    """The variable of the setting with this dotted name."""
    return _PREFIX + name.upper().replace(".", "__")


def claimed_variables(environ: Mapping[str, str]) -> list[str]:
    """Those that can only be meant for this package, and are not empty, in alphabetical order."""
    return sorted(v for v, text in environ.items() if v.startswith(_PREFIX) and text and not _is_of_others(v, text))


def _is_of_others(variable: str, text: str) -> bool:
    if variable.startswith(_TESTS) or _LINK.fullmatch(variable):
        return True
    return _LINKED_PORT.fullmatch(variable) is not None and _LINKED_URL.match(text) is not None


def hint_of(variable: str, names: Collection[str]) -> str:
    """What may have been meant by a variable that sets none of the settings `names`. Values are not told: a variable
    may hold a secret."""
    words = variable.removeprefix(_PREFIX).lower()
    close = [name for name in names if name.replace(".", "_") == re.sub("_+", "_", words)]
    close += [name for name in names if name.rpartition(".")[2] == words.rpartition("__")[2]]
    if not close and (here := answer(words.rpartition("__")[2], Place.SETTING)) is not None:
        return here
    shorter = [short.removeprefix(_PREFIX) for short in ENVIRONMENT if short.startswith(_PREFIX)]
    known = [*shorter, *(variable_of(name).removeprefix(_PREFIX) for name in names)]
    near = difflib.get_close_matches(variable.removeprefix(_PREFIX), known, n=1)
    candidates = [*map(variable_of, close), *(f"{_PREFIX}{name}" for name in near)]
    return f"did you mean {candidates[0]!r}?" if candidates else "settings are 'JAXSERVE_SCHED__MAX_ROWS' and so on"
