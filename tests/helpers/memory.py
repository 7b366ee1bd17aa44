"""How much memory a function takes."""

import torch


def largest_allocation(run):
    """The most bytes held at once by tensors made while `run` runs."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    del kept
    return most
