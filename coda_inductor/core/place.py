"""The user's line that a warning is about: the call of torch.compile, of what it compiled, or of backward.

Between that line and the warning stand frames of torch, of ours, of generated code, of installed packages and of
Python's own library. Python 3.11's warnings can skip a number of frames, not kinds of them.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

PASSED = ("torch", "coda_inductor")
"""Packages whose frames are never the user's, wherever they lie. What Inductor generates is in a module of torch's."""

ENTRY = ("torch._dynamo.eval_frame", "compile_wrapper")
"""What a call of a compiled function enters (torch 2.11 to 2.15). What it calls in turn is the compiled function, whose
lines are those of the model. Under another name such a line would be found, no worse."""

INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
STANDARD = os.path.dirname(os.__file__) + os.sep


def users(frame: FrameType | None) -> FrameType | None:
    """The first frame, from `frame` outwards, that the user wrote; of a program that is an installed package, that
    package's. None if there is neither."""
    found: FrameType | None = None
    package: FrameType | None = None
    entered = False
    while frame:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if not entered and (module, frame.f_code.co_name) == ENTRY:
            found, package, entered = None, None, True
        elif module.split(".")[0] in PASSED or (file.startswith("<") and module != "__main__"):
            pass
        elif any(part in file for part in INSTALLED):
            package = package or frame
        elif not file.startswith(STANDARD):
            found = found or frame
        frame = frame.f_back
    return found or package


def called_from() -> FrameType | None:
    """The user's frame that called us. On a thread that none began, as autograd's for a GPU, the one in which the main
    thread waits."""
    found = users(sys._getframe(1))
    if found is None and threading.current_thread() is not threading.main_thread():
        # Not in the main thread itself: there it would be this function's own frame, held by itself until a collection.
        found = users(sys._current_frames().get(threading.main_thread().ident or 0))
    return found
