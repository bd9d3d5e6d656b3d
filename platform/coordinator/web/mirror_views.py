"""The mirrors page: which sites there are, and whether they are in sync.

Staff also see each log and the last errors.
"""

from datetime import UTC, datetime

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from coordinator.eventlog.projection import state_hash
from coordinator.replication import comparison, mirror_list


@require_safe
def show_mirrors(request: HttpRequest) -> HttpResponse:
    """Show all mirrors."""
    is_staff = getattr(request.user, "acts_as_staff", False)
    rows = comparison.compare_mirrors()
    newest = mirror_list.newest_list()
    context = {
        "rows": rows,
        "live": [row for row in rows if not row.listed.expelled],
        "list": newest,
        "expires": datetime.fromtimestamp(newest.expires, UTC) if newest else None,
        "state": state_hash(),
        "heads": comparison.compare_logs(rows) if is_staff else (),
    }
    return render(request, "mirrors.html", context)
