# The compiled core. Its bindings document themselves; here they are untyped.
from typing import Any

def __getattr__(name: str) -> Any: ...
