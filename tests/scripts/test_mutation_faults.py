"""The list of faults follows the code: a fault that no longer fits its file would check nothing."""

from pathlib import Path

import pytest
from mutation_faults import FAULTS, Fault
from mutations import is_there

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.area)
def test_a_fault_has_its_place_and_its_tests(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    assert fault.tests and [test for test in fault.tests if not is_there(test)] == []
