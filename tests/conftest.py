import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every machine and every day: a failure can be run again. How long they take is not asked.
settings.register_profile(
    "lategrad",
    derandomize=True,
    deadline=None,
    max_examples=int(os.environ.get("EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("lategrad")

if "OMP_NUM_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """A test's random numbers do not depend on which tests ran before it in the same process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
