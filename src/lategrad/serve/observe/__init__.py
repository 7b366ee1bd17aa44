"""Observes a run: records, telemetry, logs, the best output and early stopping."""
