"""Lie to a real site and print what it believes, as one JSON object: part of `drill-strangers`."""

import json
import signal
import sys
import tempfile
from pathlib import Path

from site_stack import Site


def main() -> None:
    """Run a site, and let honest people and liars report to it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the site is stopped
    with tempfile.TemporaryDirectory(prefix="barnraise-liars-") as folder:
        site = Site(Path(folder), web_processes=1)
        try:
            site.start()
            # Its models can be imported only now that the site has set Django up.
            from site_liars import lie_to_site

            figures = lie_to_site(site)
        except BaseException:
            for name in site.processes.children:
                print(f"--- {name}:\n{site.processes.log_tail(name)}", flush=True)
            raise
        finally:
            site.stop()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
