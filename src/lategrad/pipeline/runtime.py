"""An asynchronous pipeline: each rank runs one stage and never waits for the pipeline to empty."""

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lategrad.delays.stages import by_stage
from lategrad.optim.delayed import Delayed
from lategrad.optim.output_mode import output_of
from lategrad.optim.rule_optimizer import RuleOptimizer, Tickets
from lategrad.pipeline.cutting import own_stage
from lategrad.pipeline.links import LinkError, Links, PipelineError, TensorSpec
from lategrad.pipeline.record import StageRecord, trace_of
from lategrad.pipeline.stash import WeightStash
from lategrad.rules.blocks import Block, Blocks
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
        one_each = Blocks(tuple(Block(f"{k}.stage", (1,), "other") for k in range(self.count)))
        self.delay = by_stage(one_each, self.count).delays[self.index]
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
        self._inside = self._waited = 0.0
        self._links = Links(self.index, self.count, timeout)
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
        rules = [group["rule"] for group in optimizer.param_groups if "rule" in group]
        self._tickets = any(needs_ticket(rule) for rule in rules)
        require("update_every", self.update_every, not self._tickets or self.update_every == 1,
                "1 with a rule that carries a ticket for each gradient")  # fmt: skip
        return optimizer

    def _agree(self) -> None:
        own = {"microbatches": self.microbatches, "update_every": self.update_every, "stashing": self.stashing}
        links = self._links
        if links.activations_in is not None:
            options = links.activations_in.receive_object()
            require("the options", own, own == options, f"those of stage {self.index - 1}, {options}")
        if links.activations_out is not None and links.gradients_in is not None:
            links.activations_out.send_object(own)
            links.gradients_in.receive_object()  # all later stages agree
        if links.gradients_out is not None:
            links.gradients_out.send_object("agreed")

    # ---- Training

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """Train on a batch; returns its mean loss at the last stage, None elsewhere.

        Args:
            inputs: a tensor or a tuple of tensors, used by the first stage alone.
            targets: used by the last stage alone.
        """
        begin, waited = time.perf_counter(), self._links.waited
        with self._guarded("step()"):
            if self._shows_output:
                raise RuntimeError("step() inside output(): the parameters do not hold the query now")
            all_inputs, all_targets = self._split("inputs", inputs, 0), self._split("targets", targets, self.count - 1)
            losses = []
            for i in range(self.microbatches):
                self._forward(all_inputs[i], all_targets[i], more=i + 1 < self.microbatches)
                if self.delay == 0:
                    losses.append(self._in_flight[-1].outputs[0].detach().reshape(()))
                if len(self._in_flight) > self.delay:
                    self._backward()
                if self._links.gradients_in is not None and len(self._in_flight) == self.delay:
                    self._links.gradients_in.post()
            self.losses += [float(loss) for loss in losses]
        self.steps += 1
        self._inside += time.perf_counter() - begin
        self._waited += self._links.waited - waited
        return torch.stack(losses).mean() if losses else None

    def drain(self) -> None:
        """Finish all microbatches in flight: the pipeline is then empty, and its next delays grow from 0 again."""
        with self._guarded("drain()"):
            while self._in_flight:
                self._backward()
            for link in self._links.all():
                link.finish()
            self._position = 0

    def _split(self, name: str, batch: Any, stage: int) -> list[Any]:
        """The microbatches of what the first or the last stage uses."""
        if self.index != stage:
            return [None] * self.microbatches
        parts = batch if isinstance(batch, tuple) else (batch,)
        for part in parts:
            require(name, type(part).__name__, isinstance(part, Tensor) and part.dim() > 0, "a tensor of rows")
            require(f"the number of rows of {name}", len(part), len(part) > 0 and len(part) % self.microbatches == 0,
                    f"a multiple of microbatches = {self.microbatches}")  # fmt: skip
        chunks = zip(*(part.to(self._device).chunk(self.microbatches) for part in parts), strict=True)
        return [chunk if isinstance(batch, tuple) else chunk[0] for chunk in chunks]

    def _forward(self, inputs: Any, targets: Any, more: bool) -> None:
        links = self._links
        source, sink = links.activations_in, links.activations_out
        number = self.steps * self.microbatches + self._position % self.microbatches
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        if source is not None:
            if source.specs is None:
                source.specs = source.receive_object()
            arguments = tuple(source.receive())
            if more:
                source.post()
            for spec, tensor in zip(source.specs, arguments, strict=True):
                tensor.requires_grad_(spec.differentiable)
        tickets = None
        if self._tickets and isinstance(self.optimizer, RuleOptimizer):
            tickets = self.optimizer.issue_tickets()
        weights = self._stash.take(self.updates)
        with self._span("forward", number), torch.enable_grad():
            try:
                result = functional_call(self.module, weights, arguments)
            except Exception as error:
                forms = ", ".join(str(TensorSpec.of(tensor)) for tensor in arguments)
                raise ValueError(f"forward pass on {forms}: {type(error).__name__}: {error}") from error
            outputs = [self._loss_of(result, targets)] if sink is None else self._activations(result)
            self._require_finite("the loss" if sink is None else "the activation", number, outputs)
        if sink is not None:
            specs = [TensorSpec.of(output) for output in outputs]
            if sink.specs is None and links.gradients_in is not None:
                sink.send_object(specs)
                sink.specs, links.gradients_in.specs = specs, [spec for spec in specs if spec.differentiable]
            assert sink.specs is not None
            first = ", ".join(map(str, sink.specs))
            require(f"the activations of microbatch {number}", ", ".join(map(str, specs)), specs == sink.specs,
                    f"as those of the first, {first} (drop_last=True of a DataLoader)")  # fmt: skip
            sink.send(outputs, unfinished=self.delay + 1)
        back = [tensor for tensor in arguments if tensor.requires_grad] if source is not None else []
        differentiable = [output for output in outputs if output.requires_grad]
        self._in_flight.append(_InFlight(number, self._position, self.updates, weights, back, differentiable, tickets))
        self._position += 1

    def _backward(self) -> None:
        one = self._in_flight.popleft()
        if self._links.gradients_in is None:
            received = [torch.full_like(one.outputs[0], 1 / self.update_every)]
        else:
            received = self._links.gradients_in.receive()
        with self._span("backward", one.number):
            torch.autograd.backward(one.outputs, received, inputs=[*one.inputs, *one.weights.values()])
        if self._links.gradients_out is not None:
            back = [torch.zeros_like(x) if x.grad is None else x.grad for x in one.inputs]
            self._links.gradients_out.send(back, unfinished=2)
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

    def _activations(self, result: Any) -> list[Tensor]:
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        usable = all(isinstance(one, Tensor) for one in outputs) and any(one.requires_grad for one in outputs)
        require("what the stage returns", type(result).__name__, usable,
                "a tensor or a tuple of tensors that depend on its parameters")  # fmt: skip
        return outputs

    def _loss_of(self, result: Any, targets: Any) -> Tensor:
        loss = self._loss(result, targets)
        is_number = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        form = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        require("the loss", form, is_number, "a differentiable tensor of one number, the mean over the microbatch")
        return loss

    def _require_finite(self, what: str, number: int, tensors: list[Tensor]) -> None:
        for tensor in (t.detach() for t in tensors if self._check_finite and t.is_floating_point()):
            total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))  # not finite if an entry is not
            require(f"{what} of microbatch {number}", total, torch.isfinite(total), "finite in all entries")

    # ---- Evaluation

    @contextmanager
    def output(self) -> Iterator[None]:
        """Within this context the parameters hold what the optimizers ship; the pipeline is drained first."""
        self.drain()
        self._shows_output = True
        try:
            with output_of(self.optimizer):
                yield
        finally:
            self._shows_output = False

    @torch.no_grad()
    def evaluate(self, inputs: Any = None, targets: Any = None) -> Any:
        """The loss of a batch of any size at the output, in evaluation mode; without targets the model's output.

        The last stage returns it, all others None. Arguments are those of :meth:`step`, and the batch is not split.
        """
        if not self._shows_output:
            with self.output():
                return self.evaluate(inputs, targets)
        training = self.module.training
        source, sink = self._links.activations_in, self._links.activations_out
        with self._guarded("evaluate()"):
            self.module.eval()
            if source is None:
                parts = inputs if isinstance(inputs, tuple) else (inputs,)
                arguments = tuple(part.to(self._device) for part in parts)
            else:
                train_specs, source.specs = source.specs, source.receive_object()
                arguments = tuple(source.receive())
                source.specs = train_specs
            result = self.module(*arguments)
            self.module.train(training)
            if sink is not None:
                outputs = list(result) if isinstance(result, tuple | list) else [result]
                sink.send_object([TensorSpec.of(output) for output in outputs])
                sink.send(outputs, unfinished=0)
                return None
            return result if targets is None else self._loss(result, targets.to(self._device))

    @property
    def busy(self) -> float:
        """The share of the time in :meth:`step` in which this stage computed, and did not wait for another."""
        return 1 - self._waited / self._inside if self._inside else 0.0

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
               "delays": list(self.delays), "losses": list(self.losses)}  # fmt: skip
        if self.scheduler is not None:
            own["scheduler"] = self.scheduler.state_dict()
        return {f"stage{self.index}": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same stage."""
        require("load_state_dict()", f"{len(self._in_flight)} microbatches in flight", not self._in_flight,
                "called before step(), or after drain()")  # fmt: skip
        name = f"stage{self.index}"
        require("state_dict", sorted(state_dict), name in state_dict, f"that of {name}, or of all stages")
        own = state_dict[name]
        self.module.load_state_dict(own["module"])
        if own["updates"]:
            self.optimizer.load_state_dict(own["optimizer"])
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
        self.drain()
        query = self._stash.vector()
        with self.output(), self._guarded("trace()"):
            record = StageRecord(query, self._stash.vector(), self.delay, len(self._stash.params), self.delays,
                                 self.losses, type(self.optimizer).__name__)  # fmt: skip
            options = {"stages": self.count, "microbatches": self.microbatches, "stashing": self.stashing}
            records = self._links.gather(record)
            return None if records is None else trace_of(records, options, problem, seed)

    def close(self) -> None:
        """Close the connections to the other stages; the module and the optimizer stay as they are."""
        self._failure = self._failure or "the pipeline was closed"
        self._links.close()

    # ---- Failures

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Whatever ends this block also ends the other stages, with one line that says what happened here."""
        if self._failure is not None:
            raise PipelineError(f"{what} after the end of the pipeline: {self._failure}")
        where = f"stage {self.index} of {self.count}"
        try:
            yield
        except LinkError as error:
            self._failure = self._links.report(f"{where}: {error}")
            self._links.close()
            raise PipelineError(self._failure) from None
        except BaseException as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._failure = self._links.report(f"{where}: {lines[0]}")
            self._links.close()
            if isinstance(error, Exception):
                raise PipelineError(self._failure) from error
            raise

    @contextmanager
    def _span(self, kind: str, microbatch: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.timeline is not None:
            self.timeline.append(Span(kind, microbatch, begin, time.perf_counter()))
