"""Real asynchronous training: a server, workers that come and go, checkpoints, and traces that can be replayed."""

from lategrad.serve.messages import Job
from lategrad.serve.observe.records import Telemetry
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.serve.training import Training, TrainingError, resume, train

__all__ = ["Job", "Server", "Settings", "Telemetry", "Training", "TrainingError", "resume", "train"]
