"""The coordinator: a Django site that introduces machines, watches runs and shows them. No weight passes through it."""

from coordinator.celery import (
    app as celery_app,
)  # before any task: whoever hands one out must know the broker

__all__ = ["celery_app"]
