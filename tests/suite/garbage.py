"""Python looks for garbage less often: none of what a run has imported and collected is any.

Tracing makes millions of small objects, and each look through all modules and tests found nothing: a twelfth of the
time of tests that compile. Objects in circles, such as engines that a test has left, are still found.
"""

import gc

import pytest

_NEW_OBJECTS = 50_000  # between two looks at the youngest; Python's own 700 is for small programs


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """In each worker."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
