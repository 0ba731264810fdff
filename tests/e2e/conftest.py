"""All engines of these tests are compiled quickly, so that what one test has compiled the others find."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_engines(compiled_quickly: None) -> None:
    """They compare tokens of engines that are compiled alike, or log-probabilities with a tolerance.

    A file whose tests compare more overrides this fixture.
    """
