"""Addresses of live data."""

from django.urls import path

from coordinator.live import views

urlpatterns = [
    path("live/<uuid:run>/", views.get_snapshot, name="run_snapshot"),
    path("live/<uuid:run>/machines/", views.get_worker_curves, name="worker_curves"),
    path("live/<uuid:run>/swarm/", views.get_swarm, name="swarm"),
]
