"""The coordinator: a Django site that introduces machines, watches runs and shows them.

No weight passes through it.
"""

# Imported before any task, because every process that queues one must know the broker.
from coordinator.celery import app as celery_app

__all__ = ["celery_app"]
