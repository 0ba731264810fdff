"""Python looks for garbage less often than it would by itself.

Tracing makes millions of small objects, and nearly all of them are in use when the collector looks: a sixth of the time
of tests that compile. Objects in circles, such as engines that a test has left, are still found.
"""

import gc

_NEW_OBJECTS = 50_000  # between two looks at the youngest; Python's own 700 is for small programs


def pytest_configure() -> None:
    """In each worker."""
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
