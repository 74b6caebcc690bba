"""Runs a command without some of what a sandbox is made of, as a container's profile or an older kernel would.

python -m tests.rewards.restricted landlock,namespaces command ...
"""

import ctypes
import errno
import os
import platform
import struct
import sys

CALLS = {  # of x86_64 and aarch64
    "landlock": ((444, 444), (445, 445), (446, 446)),
    "namespaces": ((272, 97), (308, 268)),
    "seccomp": ((317, 277),),
}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SYS_PRCTL = 22, 38, (157, 167)


def forbid(names):
    """Have the calls fail from here on; seccomp itself by its number and as an option of prctl."""
    column = ("x86_64", "aarch64").index(platform.machine())
    refused, load, equal, give = 0x50000 | errno.EPERM, 0x20, 0x15, 0x06
    lines = [(load, 0, 0, 0)]
    for name in names:
        for call in CALLS[name]:
            lines += [(equal, 0, 1, call[column]), (give, 0, 0, refused)]
    if "seccomp" in names:
        lines += [
            (equal, 0, 3, SYS_PRCTL[column]),
            (load, 0, 0, 16),
            (equal, 0, 1, PR_SET_SECCOMP),
            (give, 0, 0, refused),
        ]
    lines.append((give, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, 2, struct.pack("@HP", len(lines), ctypes.addressof(program)), 0, 0) == 0


if __name__ == "__main__":
    forbid([name for name in sys.argv[1].split(",") if name])
    os.execv(sys.argv[2], sys.argv[2:])
