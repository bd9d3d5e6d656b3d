"""Lie to a real site and print what it believes, as one JSON object: part of `drill-strangers`."""

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from child_processes import ChildProcesses
from site_stack import Site


def main() -> None:
    """Run a site, and let honest people and liars report to it."""
    with ExitStack() as cleanup:
        temporary = tempfile.TemporaryDirectory(
            prefix="barnraise-liars-", ignore_cleanup_errors=True
        )
        folder = Path(cleanup.enter_context(temporary))
        site = Site(folder, 1, ChildProcesses(folder, cleanup))
        cleanup.callback(site.stop)
        try:
            site.start()
            # Its models can be imported only now that the site has set Django up.
            from site_liars import lie_to_site

            figures = lie_to_site(site)
        except Exception:
            for name in site.processes.children:
                print(f"--- {name}:\n{site.processes.log_tail(name)}", flush=True)
            raise
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
