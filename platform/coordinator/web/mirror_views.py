"""The mirrors' page: which sites are one, and whether they know the same. Staff see each log and each fault."""

from datetime import UTC, datetime

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from coordinator.eventlog.projection import state_hash
from coordinator.replication import comparison, mirror_list


@require_safe
def show_mirrors(request: HttpRequest) -> HttpResponse:
    rows, found = comparison.compare_mirrors(), mirror_list.newest_list()
    context = {
        "rows": rows,
        "live": [row for row in rows if not row.listed.expelled],
        "list": found,
        "expires": found and datetime.fromtimestamp(found.expires, UTC),
        "state": state_hash(),
        "heads": comparison.compare_logs(rows) if request.user.is_staff else (),
    }
    return render(request, "mirrors.html", context)
