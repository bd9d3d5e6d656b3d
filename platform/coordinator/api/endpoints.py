"""The API's endpoints."""

from ninja import NinjaAPI

from barnraise.wire import MirrorView
from coordinator import mirror

api = NinjaAPI(title="Barnraise", version="1", docs_url="/docs")


@api.get("/mirror", response=MirrorView)
def get_mirror(request):
    return mirror.view()
