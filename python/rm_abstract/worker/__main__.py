"""The worker's side: ``python -m rm_abstract.worker <backend> --fd 3``, started by the core.

Loads the backend's plugin and serves the process that started it until that end closes. Imports
neither torch nor transformers; a vendor's plugin imports what its SDK needs.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rm_abstract.worker", description=__doc__)
    parser.add_argument("backend", help="name of the plugin, such as sim")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--fd", type=int, help="the socket to serve")
    what.add_argument(
        "--fingerprint",
        action="store_true",
        help="print what a Python plugin's artefacts depend on",
    )
    options = parser.parse_args(argv)
    os.environ.setdefault("RM_WORKER", "1")
    if not options.fingerprint:
        # Asked for when a call hangs (src/worker/process.cpp), before the process is ended.
        faulthandler.register(signal.SIGUSR1)

    from rm_abstract import device
    from rm_abstract.worker import python_plugins

    search_path = os.environ.get("RM_BACKEND_PATH", "")
    found = python_plugins.plugin_named(options.backend, search_path, device.ENTRY_POINTS)
    if options.fingerprint:
        if found is None:
            print(f"no plugin {options.backend} in Python for {sys.executable}", file=sys.stderr)
            return 1
        print(python_plugins.fingerprint(found))
        return 0
    from rm_abstract import _core

    if found is not None:
        from rm_abstract.worker.python_backend import Service

        _core.worker.serve_python(options.fd, Service(found))
        return 0
    device.load_plugins(search_path)
    _core.worker.serve(options.fd, options.backend)
    return 0


if __name__ == "__main__":
    sys.exit(main())
