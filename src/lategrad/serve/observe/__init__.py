"""Watching a run: records, telemetry, logs."""
