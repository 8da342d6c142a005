"""`python -m rm_abstract [options] script.py | -m module | -c code | - [arguments]`.

Runs an unmodified script as Python itself would (`__main__`, sys.argv, sys.path, exit status), with
rm_abstract initialised first.
"""

from __future__ import annotations

import sys

from rm_abstract.cli.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
