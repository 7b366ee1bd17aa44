"""Rules as generated C loops: for calls that must cost microseconds, and for vectors that lie in many tensors.

A rule stays one pure function in torch; :mod:`~lategrad.execution.codegen.emit` translates its trace to C,
:mod:`~lategrad.execution.codegen.run` compiles and calls it. Why not ``torch.compile`` alone: addresses and sizes are
data of the loops, so that four hundred tensors compile in the second that one takes, no tensor is copied to make them
one vector, and a call costs 10 microseconds instead of 50. On one CPU core (``benchmarks/bench_backends.py``):

==================================================== ======= ============= ======= =======
measured                                             eager   torch.compile foreach C loops
==================================================== ======= ============= ======= =======
updates/s of ``lg.train``, softmax of 7,850 entries    3,012         3,328       -   4,695
updates/s of ``lg.train``, 10^6 entries                  417         1,441       -   1,233
ms of an ``Anytime`` step, one tensor of 10^7            136           6.1     6.3     5.0
ms of an ``Anytime`` step, 400 tensors of 25,000         171            61     7.3     5.4
ms of an ``Anytime`` step, 400 tensors of 256            2.4           2.2     .69     .82
seconds to the first step                                 .0      .3 to 6       .0      .1
==================================================== ======= ============= ======= =======

The foreach functions of torch would need every rule written a second time. On an NVIDIA H200, a step of ``AnytimeSGD``
on 2e8 float32 parameters as one tensor and as 400, relative to fused SGD with momentum
(``benchmarks/bench_optim_gpu.py``): these loops .90 and .80, at .94 and .90 of a copy's bandwidth, first step within
.3 s, no vector beyond the state; a Triton kernel with the addresses as data .86 and .75, which would need a second
translation of every operation; a flat buffer with gathered gradients and ``torch.compile`` 1.24 and 1.09, and one more
vector.
"""
