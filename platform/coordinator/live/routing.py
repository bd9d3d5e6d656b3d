from django.urls import path

from coordinator.live.consumers import RunConsumer

websocket_urlpatterns = [path("ws/runs/<uuid:run>/", RunConsumer.as_asgi())]
