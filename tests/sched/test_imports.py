"""A notebook that wants a scheduler must not load a device library."""

import subprocess
import sys

HEAVY = ("jax", "jaxlib", "numpy", "flax", "pydantic", "yaml")


def test_sched_and_testing_load_only_the_standard_library():
    code = (
        "import sys, jaxserve.sched, jaxserve.testing\n"
        "from jaxserve.testing import *\n"
        "limits = make_limits()\n"
        "for name in ('fcfs', 'priority'):\n"
        "    scheduler = jaxserve.sched.create_scheduler(name, limits)\n"
        "    out = drive(scheduler, FakeRunner(limits), [make_request('a', [1, 2], 2)])\n"
        "    assert out['a', 0].token_ids == [3, 4]\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
