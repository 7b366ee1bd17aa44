import os

import torch
from hypothesis import settings

# The same examples on every machine and every day: a failure can be run again.
settings.register_profile("lategrad", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("lategrad")

if "OMP_NUM_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
