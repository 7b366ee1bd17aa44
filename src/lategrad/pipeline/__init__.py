"""Asynchronous pipelines on ``torch.distributed``: every stage is always busy, and each has its own delay."""

from lategrad.pipeline.cutting import batches, cut
from lategrad.pipeline.links import PipelineError, connect
from lategrad.pipeline.runtime import Pipeline, Span

__all__ = ["Pipeline", "PipelineError", "Span", "batches", "connect", "cut"]
