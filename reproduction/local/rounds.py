"""Synchronous training for real: worker processes that wait for each other in every round (DiLoCo itself)."""

import time
from contextlib import closing
from typing import Any, TypeVar

import torch

from lategrad.problems import LocalSteps
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule, apply_update, first_state, issue_ticket
from lategrad.serve.checkpoints.identity import identify
from lategrad.serve.compression import Compression
from lategrad.serve.engines.engine import TrainingError
from lategrad.serve.engines.processes import Processes
from lategrad.serve.engines.transport import Disconnected, Failed, Malformed, Ready, Result, Transport
from lategrad.serve.messages import Job
from lategrad.serve.observe.records import Records
from lategrad.serve.settings import Settings
from lategrad.support.threads import torch_threads
from lategrad.support.validation import require
from lategrad.trace import Trace, describe

_POLL_INTERVAL = 0.2  # seconds

Answer = TypeVar("Answer", Ready, Result)


def train_in_rounds(problem: LocalSteps, rule: AnyRule[Any], settings: Settings, seconds: float) -> Trace:
    """All workers take their local steps from the server's point; when the last one is done, the server makes one
    update with the mean of what they sent.

    The workers are the processes of :func:`lategrad.train`, with their streams of samples, their inner optimizers and
    their pauses; only the server waits. Points are evaluated after the last round. A worker that fails ends the
    training.

    Args:
        problem: with local steps.
        rule: gets the mean of each round; there is no delay.
        settings: of which the workers, their seed, their pauses (``slow``) and their device are used.
        seconds: no round begins later, counted from the first job.
    """
    require("compression", settings.compression, settings.compression == "none", "none: rounds send whole vectors")
    rule = fill_in(rule, getattr(problem, "blocks", None))
    state = first_state(rule, problem.start())
    outputs, ended = [rule.output(state).clone()], list[float]()
    workers, _ = settings.worker_range()
    compression = Compression(settings.compression, problem.dim, outputs[0].dtype)
    transport = Processes(problem, settings, compression, is_stopping=lambda: False)
    with closing(transport), torch_threads(settings.threads or 1), torch.no_grad():
        for worker in range(workers):
            transport.start(worker, worker)
        ready = _from_all(transport, Ready, workers)
        handles, rooms = [event.handle for event in ready], [event.queries[0] for event in ready]
        begin = time.monotonic()
        while not ended or ended[-1] < seconds:
            round_number, query = len(ended), rule.query(state)
            for handle, room in zip(handles, rooms, strict=True):
                assert room is not None  # memory that the worker shares
                handle.send(Job(handle.worker, round_number, round_number, room.copy_(query)))
            arrived = _from_all(transport, Result, workers)
            mean = torch.stack([event.grad for event in arrived]).mean(0)
            state = apply_update(rule, state, mean, 0, issue_ticket(rule, state))
            ended.append(time.monotonic() - begin)
            outputs.append(rule.output(state).clone())
    records = Records(problem, every=1)
    for version, output in enumerate(outputs):
        records.take(version, output)
    return Trace(
        **records.tensors(),
        delays=torch.zeros(len(ended), dtype=torch.int32),
        output=outputs[-1],
        query=rule.query(state).clone(),
        config={**identify(problem), "rule": describe(rule), "settings": settings.saved(), "stopped": None,
                "steps": len(ended)},
        time=torch.tensor(ended, dtype=torch.float64),
        local_steps=torch.full((len(ended),), workers * problem.local_steps),
    )  # fmt: skip


def _from_all(transport: Transport, kind: type[Answer], workers: int) -> list[Answer]:
    """Wait for the next message of every worker; in the order of their numbers."""
    messages: dict[int, Answer] = {}
    while len(messages) < workers:
        for event in transport.wait(_POLL_INTERVAL):
            if isinstance(event, Failed | Malformed | Disconnected):
                raise TrainingError(f"worker {event.handle.worker} has failed, and the others wait: {event.reason}")
            assert isinstance(event, kind)
            messages[event.handle.worker] = event
    return [messages[worker] for worker in range(workers)]
