"""Real asynchronous training: a server, workers that come and go, checkpoints, and traces that can be replayed."""

from lategrad.serve.server import Job, Server, Telemetry
from lategrad.serve.settings import Settings
from lategrad.serve.training import Training, TrainingError, resume, saved_config, train

__all__ = ["Job", "Server", "Settings", "Telemetry", "Training", "TrainingError", "resume", "saved_config", "train"]
