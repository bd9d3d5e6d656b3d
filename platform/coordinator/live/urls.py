from django.urls import path

from coordinator.live import views

urlpatterns = [
    path("live/<uuid:run>/", views.run_snapshot, name="run_snapshot"),
    path("live/<uuid:run>/machines/", views.run_lines, name="run_lines"),
]
