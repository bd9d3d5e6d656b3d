from django.urls import path

from coordinator.live.consumers import watch

websocket_urlpatterns = [path("ws/runs/<uuid:run>/", watch)]
