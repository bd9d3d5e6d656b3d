from django.urls import path, re_path

from coordinator.live.consumers import nowhere, watch

websocket_urlpatterns = [path("ws/runs/<uuid:run>/", watch), re_path("", nowhere)]
