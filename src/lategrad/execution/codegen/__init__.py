"""Rules as generated C loops: for calls that must cost microseconds, and for vectors that lie in many tensors.

A rule stays one pure function in torch; :mod:`~lategrad.execution.codegen.emit` translates its trace to C,
:mod:`~lategrad.execution.codegen.run` compiles and calls it. Why not ``torch.compile`` alone: addresses and sizes are
data of the loops, so that four hundred tensors compile in the second that one takes, no tensor is copied to make them
one vector, and a call costs 10 microseconds instead of 50. The foreach functions of torch would need every rule written
a second time, and so would a Triton kernel with the addresses as data, which was hardly faster on an NVIDIA H200 (.86
and .75 of the time of fused SGD with momentum, these loops .90 and .80). All measurements: docs/cost.md.
"""
