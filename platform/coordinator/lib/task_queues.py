"""Name the lists of Valkey in which Celery's broker keeps waiting tasks."""

TASK_QUEUE = "celery"
WEBHOOK_QUEUE = "webhooks"  # calls of addresses that people typed, which may be slow on purpose
