"""The Celery application: `celery -A coordinator.celery:app worker -B`. What runs when is in the settings."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "coordinator.settings")
app = Celery("coordinator")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
