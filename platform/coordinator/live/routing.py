from django.urls import path, re_path

from coordinator.live.consumers import reject_unknown_path, watch_run

websocket_urlpatterns = [path("ws/runs/<uuid:run>/", watch_run), re_path("", reject_unknown_path)]
