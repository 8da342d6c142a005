"""The worker's side: ``python -m rm_abstract.worker <backend> --fd 3``, started by the core.

Loads the backend's plugin and serves the process that started it until that end closes. Imports
neither torch nor transformers; a vendor's plugin imports what its SDK needs.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rm_abstract.worker", description=__doc__)
    parser.add_argument("backend", help="name of the plugin, such as sim")
    parser.add_argument("--fd", type=int, required=True, help="the socket to serve")
    options = parser.parse_args(argv)
    os.environ.setdefault("RM_WORKER", "1")

    from rm_abstract import _core, device

    device.load_plugins(os.environ.get("RM_BACKEND_PATH", ""))
    _core.worker.serve(options.fd, options.backend)
    return 0


if __name__ == "__main__":
    sys.exit(main())
