"""Run a command and end its whole process group once the process that asked for it is gone, however that ended.

A script for the standard library alone: `python guard.py PARENT_PID FOLDER COMMAND...`; FOLDER is removed then, too.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

POLL_S = 0.5
GRACE_S, LATER_S = 5.0, 2.0  # for the command to end, and for the rest of its group after it


def main(parent: int, folder: str, command: list[str]) -> int:
    child = subprocess.Popen(command)
    while os.getppid() == parent:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(POLL_S)
            return code if code >= 0 else 128 - code  # a signal's number as a shell gives it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    time.sleep(LATER_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
