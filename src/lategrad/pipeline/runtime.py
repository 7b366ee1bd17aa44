"""An asynchronous pipeline: each rank runs one stage and never waits for the pipeline to empty."""

import copy
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from traceback import clear_frames
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lategrad.optim.delayed import Delayed
from lategrad.optim.output_mode import output_of
from lategrad.optim.rule_optimizer import RuleOptimizer, Tickets
from lategrad.pipeline.cutting import own_stage
from lategrad.pipeline.links import LinkError, Links, PipelineError, TensorSpec, forms
from lategrad.pipeline.passes import activations_of, loss_of, require_finite, rows_of, split
from lategrad.pipeline.record import StageRecord, trace_of
from lategrad.pipeline.stash import WeightStash
from lategrad.rules.rule import needs_ticket
from lategrad.support.validation import require, require_count, require_number
from lategrad.trace import Trace


class Span(NamedTuple):
    """A piece of work of one stage; times are those of ``time.perf_counter``."""

    kind: str  #: "forward", "backward" or "update"
    microbatch: int
    begin: float
    end: float


class _InFlight(NamedTuple):
    """A microbatch between its forward and its backward pass."""

    number: int
    position: int  # its number since the pipeline was last empty
    version: int  # updates of this stage before its forward pass
    weights: dict[str, Tensor]
    inputs: list[Tensor]  # those that a gradient is sent back for
    outputs: list[Tensor]
    tickets: Tickets | None


def _report_lost(links: Links, in_flight: deque[_InFlight]) -> None:
    """Tell this rank and the others, if its process ends or close() is called before drain()."""
    if in_flight:
        lost = f"{len(in_flight)} microbatches in flight, whose gradients are lost: call drain() after the last step()"
        warnings.warn(links.report(f"ended with {lost}"), stacklevel=4)


class Pipeline:
    r"""One stage of an asynchronous pipeline; every rank of a ``torchrun`` job makes one and runs the same loop.

    Stage k = 0, ..., P-1 alternates between the forward pass of microbatch m and the backward pass of microbatch
    :math:`m - \tau_k`, where :math:`\tau_k = P - 1 - k`, and updates its parameters after each backward pass. No stage
    ever waits for the pipeline to empty, as it does in the schedules of ``torch.distributed.pipelining``; so the
    gradient of stage k is always :math:`\tau_k` updates late, after the first :math:`\tau_k` microbatches. These are
    the delays of :func:`lategrad.delays.by_stage`. They are counted and compared in every run, and optimizers of this
    library are told.

    .. code-block:: python

        lg.pipeline.connect()
        stages = lg.pipeline.cut(model, torch.distributed.get_world_size())
        pipe = lg.pipeline.Pipeline(stages, loss, lambda stage: lg.optim.SteadyMuon(stage, lr=0.01))
        for inputs, targets in loader:
            value = pipe.step(inputs, targets)  # at the last stage the loss, elsewhere None
        with pipe.output():
            value = pipe.evaluate(inputs, targets)

    ``step``, ``drain``, ``output``, ``evaluate``, ``state_dict`` and ``trace`` are called by all ranks alike. If a
    rank fails, all others raise a :class:`PipelineError` with the same line.

    Args:
        stages: a list of modules, one for each rank; or what ``torch.distributed.pipelining`` makes: a
            ``PipelineStage``, or a ``Pipe``. A module returns a tensor or a tuple of tensors, which are the arguments
            of the next. Move it to its device first.
        loss: from the last module's output and the targets to the mean loss of a microbatch.
        optimizer: makes the optimizer of a stage from its module.
        microbatches: pieces of a batch, of equal size.
        update_every: update after this number of microbatches, with their mean gradient; divides ``microbatches``.
        stashing: compute backward passes with the weights of the forward pass, which takes :math:`\tau_k + 1` copies
            of a stage's parameters. False: with the newest weights, which takes none; gradients are then those of
            neither version.
        scheduler: makes a learning-rate scheduler from the optimizer; its ``step`` follows each update.
        check_finite: raise if an activation or the loss is not finite. On a GPU each check waits for the device.
        timeout: seconds without a message after which a neighbour is considered hung.
        record_timeline: keep the times of all passes in ``timeline``.

    Reference: Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training" (2018).
    """

    def __init__(
        self, stages: Any, loss: Callable[[Any, Any], Tensor], optimizer: Callable[[nn.Module], Optimizer], *,
        microbatches: int = 1, update_every: int = 1, stashing: bool = True,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None, check_finite: bool = True,
        timeout: float = 300.0, record_timeline: bool = False,
    ) -> None:  # fmt: skip
        require_count("microbatches", microbatches, low=1)
        require_count("update_every", update_every, low=1)
        require("update_every", update_every, microbatches % update_every == 0, f"a divisor of {microbatches=}")
        require_number("timeout", timeout, low=0, strict=True)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("a Pipeline needs torch.distributed: start the script with torchrun and call "
                               "lategrad.pipeline.connect() first")  # fmt: skip
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.delay = self.count - 1 - self.index
        r""":math:`\tau_k = P - 1 - k`: microbatches between a forward pass and the backward pass after it."""
        self.microbatches, self.update_every, self.stashing = microbatches, update_every, stashing
        self.steps = 0  #: batches so far
        self.updates = 0  #: updates of this stage so far
        self.delays: list[int] = []  #: the delay of each update, as counted; of several microbatches the longest
        self.losses: list[float] = []  #: at the last stage, the loss of each microbatch
        self.timeline: list[Span] | None = [] if record_timeline else None
        self._loss, self._check_finite, self._make_optimizer = loss, check_finite, optimizer
        self._in_flight: deque[_InFlight] = deque()
        self._position = self._longest = 0
        self._failure: str | None = None
        self._shows_output = False
        self._inside = self._busy = self._computed = 0.0  # seconds
        self._links = Links(self.index, self.count, timeout)
        self._finalizer = weakref.finalize(self, _report_lost, self._links, self._in_flight)
        with self._guarded("Pipeline()"):
            self.module = own_stage(stages, self.index, self.count)
            self._device = next(self.module.parameters()).device
            self._links.use_device(self._device)
            self._stash = WeightStash(self.module, copies=stashing and self.delay > 0)
            self.optimizer = self._checked(optimizer(self.module))
            self.scheduler = None if scheduler is None else scheduler(self.optimizer)
            self._agree()

    def _checked(self, optimizer: Optimizer) -> Optimizer:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, Delayed | torch.optim.LBFGS):
            raise TypeError(f"optimizer must make one update from one gradient: {type(optimizer).__name__} does not")
        given = {p for group in optimizer.param_groups for p in group["params"]}
        own = set(self._stash.params.values())
        require("optimizer", f"{len(own - given)} parameters of the stage left out, {len(given - own)} of others",
                own <= given, "one of all trained parameters of the stage's own module")  # fmt: skip
        carrying = any("rule" in group and needs_ticket(group["rule"]) for group in optimizer.param_groups)
        self._ticketed = cast(RuleOptimizer, optimizer) if carrying else None
        require("update_every", self.update_every, not carrying or self.update_every == 1,
                "1 with a rule that carries a ticket for each gradient")  # fmt: skip
        return optimizer

    def _agree(self) -> None:
        own = {"microbatches": self.microbatches, "update_every": self.update_every, "stashing": self.stashing}
        before, after = self._links.before, self._links.after
        if before is not None:
            options = before.activations.receive_object()
            require("the options", own, own == options, f"those of stage {self.index - 1}, {options}")
        if after is not None:
            after.activations.send_object(own)
            after.gradients.receive_object()  # all later stages agree
        if before is not None:
            before.gradients.send_object("agreed")

    # ---- Training

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """Train on a batch; returns its mean loss at the last stage, None elsewhere.

        Args:
            inputs: a tensor or a tuple of tensors, used by the first stage alone.
            targets: used by the last stage alone.
        """
        begin, computed = time.perf_counter(), self._computed
        with self._guarded("step()"):
            self._require_query("step()")
            pieces, unused = partial(split, self.microbatches, self._device), [None] * self.microbatches
            all_inputs = pieces("inputs", inputs) if self.index == 0 else unused
            all_targets = pieces("targets", targets) if self.delay == 0 else unused
            losses = []
            for i in range(self.microbatches):
                self._forward(all_inputs[i], all_targets[i], more=i + 1 < self.microbatches)
                if self.delay == 0:
                    losses.append(self._in_flight[-1].outputs[0].detach().reshape(()))
                if len(self._in_flight) > self.delay:
                    self._backward()
                if self._links.after is not None and len(self._in_flight) == self.delay:
                    self._links.after.gradients.post()
            self.losses += [float(loss) for loss in losses]
        self.steps += 1
        self._inside += time.perf_counter() - begin
        self._busy += self._computed - computed
        return torch.stack(losses).mean() if losses else None

    def drain(self) -> None:
        """Finish all microbatches in flight: the pipeline is then empty, and its next delays grow from 0 again."""
        with self._guarded("drain()"):
            while self._in_flight:
                self._backward()
            for link in self._links.all():
                link.finish()
            self._position = 0

    def _forward(self, inputs: Any, targets: Any, more: bool) -> None:
        before, after = self._links.before, self._links.after
        number = self.steps * self.microbatches + self._position % self.microbatches
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        if before is not None:
            source = before.activations
            if source.specs is None:
                source.specs = source.receive_object()
            arguments = tuple(source.receive())
            if more:
                source.post()
            for spec, tensor in zip(source.specs or (), arguments, strict=True):
                tensor.requires_grad_(spec.differentiable)
        tickets = None if self._ticketed is None else self._ticketed.issue_tickets()
        weights = self._stash.take(self.updates)
        with self._span("forward", number), torch.enable_grad():
            result = self._run(weights, arguments)
            outputs = activations_of(result) if after is not None else [loss_of(self._loss, result, targets)]
            if self._check_finite:
                require_finite(f"the {'loss' if after is None else 'activation'} of microbatch {number}", outputs)
        if after is not None:
            specs = [TensorSpec.of(output) for output in outputs]
            if after.activations.specs is None:
                after.activations.send_object(specs)
                after.activations.specs, after.gradients.specs = specs, [s for s in specs if s.differentiable]
            first = after.activations.specs
            require(f"the activations of microbatch {number}", forms(specs), specs == first,
                    f"as those of the first, {forms(first)} (drop_last=True of a DataLoader)")  # fmt: skip
            after.activations.send(outputs, unfinished=self.delay + 1)
        back = [tensor for tensor in arguments if tensor.requires_grad] if before is not None else []
        differentiable = [output for output in outputs if output.requires_grad]
        self._in_flight.append(_InFlight(number, self._position, self.updates, weights, back, differentiable, tickets))
        self._position += 1

    def _backward(self) -> None:
        one = self._in_flight.popleft()
        before, after = self._links.before, self._links.after
        received = after.gradients.receive() if after else [torch.full_like(one.outputs[0], 1 / self.update_every)]
        with self._span("backward", one.number):
            inputs = [*one.inputs, *one.weights.values()]
            self._stash.call_with(one.weights, partial(torch.autograd.backward, one.outputs, received, inputs=inputs))
        if before is not None:
            back = [torch.zeros_like(x) if x.grad is None else x.grad for x in one.inputs]
            before.gradients.send(back, unfinished=2)
        for p, weight in zip(self._stash.params.values(), one.weights.values(), strict=True):
            if weight.grad is not None:
                p.grad = weight.grad if p.grad is None else p.grad + weight.grad
        self._stash.release(one.version)
        delay = self.updates - one.version
        due = one.position // self.update_every - max(0, one.position - self.delay) // self.update_every
        if delay != due:
            raise RuntimeError(f"microbatch {one.number} was {delay} updates late, not {due}: please report this")
        self._longest = max(delay, self._longest)
        if (one.position + 1) % self.update_every == 0:
            self._update(one)

    def _update(self, one: _InFlight) -> None:
        with self._span("update", one.number):
            if isinstance(self.optimizer, RuleOptimizer):
                self.optimizer.step(delay=self._longest, tickets=one.tickets)
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        self.updates += 1
        self.delays.append(self._longest)
        self._longest = 0

    def _run(self, weights: dict[str, Tensor], arguments: tuple[Tensor, ...]) -> Any:
        try:
            return self._stash.call_with(weights, self.module, *arguments)
        except Exception as error:
            received = forms(map(TensorSpec.of, arguments))
            raise ValueError(f"forward pass on {received}: {type(error).__name__}: {error}") from error

    # ---- Evaluation

    @contextmanager
    def output(self) -> Iterator[None]:
        """Within this context the parameters hold what the optimizers ship; the pipeline is drained first."""
        self.drain()
        before, self._shows_output = self._shows_output, True
        try:
            with output_of(self.optimizer):
                yield
        finally:
            self._shows_output = before

    def _require_query(self, what: str) -> None:
        if self._shows_output:
            raise RuntimeError(f"{what} inside output(): the parameters do not hold the query now")

    @torch.no_grad()
    def evaluate(self, inputs: Any = None, targets: Any = None) -> Any:
        """The loss of a batch of any size at the output, in evaluation mode; without targets the model's output.

        The last stage returns it, all others None. Arguments are those of :meth:`step`, and the batch is not split.
        """
        if not self._shows_output:
            with self.output():
                return self.evaluate(inputs, targets)
        modes = {module: module.training for module in self.module.modules()}
        before, after = self._links.before, self._links.after
        with self._guarded("evaluate()"):
            self.module.eval()
            if before is None:
                batch = rows_of("inputs", inputs, self._device)
                arguments = batch if isinstance(batch, tuple) else (batch,)
            else:
                arguments = tuple(before.activations.receive(before.activations.receive_object()))
            result = self._run(self._stash.params, arguments)
            for module, training in modes.items():
                module.training = training
            if after is not None:
                outputs = activations_of(result, trained=False)
                after.activations.send_object([TensorSpec.of(output) for output in outputs])
                after.activations.send(outputs, unfinished=0)
                return None
            return result if targets is None else self._loss(result, rows_of("targets", targets, self._device))

    @property
    def busy(self) -> float:
        """The share of the time in :meth:`step` that passes and updates took; of a GPU, the host's part of them."""
        return self._busy / self._inside if self._inside else 0.0

    @property
    def stash_bytes(self) -> int:
        """Memory of the stashed weights."""
        return self._stash.nbytes

    # ---- Saving

    def state_dict(self) -> dict[str, Any]:
        """This stage's module and optimizer, drained; for ``torch.distributed.checkpoint`` or files of your own.

        The keys differ from stage to stage, so that a distributed checkpoint has all of them. Before the first update
        the optimizer's state has the form of later ones, into which a checkpoint can be loaded.
        """
        self.drain()
        optimizer = self.optimizer.state_dict() if self.updates else self._empty_state()
        own = {"module": self.module.state_dict(), "optimizer": optimizer, "steps": self.steps, "updates": self.updates,
               "delays": list(self.delays), "losses": list(self.losses),
               "scheduler": None if self.scheduler is None else self.scheduler.state_dict()}  # fmt: skip
        return {f"stage{self.index}": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same stage."""
        require("load_state_dict()", f"{len(self._in_flight)} microbatches in flight", not self._in_flight,
                "called before step(), or after drain()")  # fmt: skip
        name = f"stage{self.index}"
        require("state_dict", sorted(state_dict), name in state_dict, f"that of {name}, or of all stages")
        own = state_dict[name]
        require("scheduler", self.scheduler, (own["scheduler"] is None) == (self.scheduler is None),
                "given where the saved pipeline had one, and only there")  # fmt: skip
        self.module.load_state_dict(own["module"])
        started = own["updates"] > 0  # before that the saved state has only the form of later ones
        new = own["optimizer"] if started else self._make_optimizer(copy.deepcopy(self.module)).state_dict()
        self.optimizer.load_state_dict(new)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(own["scheduler"])
        self.steps, self.updates = own["steps"], own["updates"]
        self.delays, self.losses = list(own["delays"]), list(own["losses"])

    def _empty_state(self) -> dict[str, Any]:
        """The form of the optimizer's state after an update: that of a copy, made with gradients of zero."""
        scratch = copy.deepcopy(self.module)
        optimizer = self._make_optimizer(scratch)
        for p in scratch.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        optimizer.step()
        return optimizer.state_dict()

    def trace(self, problem: Any = None, seed: int = 0) -> Trace | None:
        """The run so far, for :func:`lategrad.replay`; on the first rank, None on the others. Drains.

        Args:
            problem: whose samples the microbatches were (:func:`lategrad.pipeline.batches`); a replay needs it.
            seed: of these samples.
        """
        self._require_query("trace()")
        require("trace()", f"{self.updates} updates so far", self.updates > 0, "called after step()")
        self.drain()
        query = self._stash.vector()
        with self.output(), self._guarded("trace()"):
            record = StageRecord(query, self._stash.vector(), self.delay, len(self._stash.params), self.delays,
                                 self.losses, type(self.optimizer).__name__)  # fmt: skip
            options = {"stages": self.count, "microbatches": self.microbatches, "stashing": self.stashing}
            records = self._links.gather(record)
            return None if records is None else trace_of(records, options, problem, seed)

    def close(self) -> None:
        """Close the connections to the other stages; the module and the optimizer stay as they are. Drain first."""
        self._finalizer()
        self._failure = self._failure or "the pipeline was closed"
        self._links.close()

    # ---- Failures

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Whatever ends this block also ends the other stages, with one line that says what happened here."""
        if self._failure is not None:
            raise PipelineError(f"{what} after the end of the pipeline: {self._failure}")
        try:
            yield
        except BaseException as error:
            self._failure = self._links.report((str(error).strip() or type(error).__name__).splitlines()[0])
            self._in_flight.clear()
            self._links.close()
            if isinstance(error, LinkError):
                for one in filter(None, (error, error.__cause__)):
                    clear_frames(one.__traceback__)  # they refer to the connection, which would stay open
                raise PipelineError(self._failure) from None
            if isinstance(error, Exception):
                raise PipelineError(self._failure) from error
            raise

    @contextmanager
    def _span(self, kind: str, microbatch: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        self._computed += end - begin
        if self.timeline is not None:
            self.timeline.append(Span(kind, microbatch, begin, end))
