"""What the frames of a caught exception hold."""

from __future__ import annotations

import traceback


def release_frames(error: BaseException) -> None:
    """Clears the locals of the finished frames of an exception and of what it came from.

    torch's dynamo keeps an exception in a local of a frame of that exception's own traceback. The
    circle holds everything below it, the model and its weights among them, until Python's
    collector runs; large models would outlive their `del` by as long.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)  # frames that still run are left alone
        waiting += [one.__cause__, one.__context__]
