"""Every job makes its functions anew, mostly for the same model: what one test has compiled the others find."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def compiled_as_before(compiled_once: None, compiled_quickly: None) -> None:
    pass
