"""The system calls that a sandbox denies, as a seccomp filter.

Namespaces contain what has a namespace. This is for what has none: virtual sockets to the machine's host, memory that
no process is charged for, keys, clocks; and for the calls by which kernels have been broken into.
"""

import platform
import struct

from nrl.errors import EnvError

__all__ = ["seccomp_filter"]

_SINCE_5 = {  # the same number everywhere
    "pidfd_getfd": 438, "process_madvise": 440, "move_mount": 429, "open_tree": 428, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "mount_setattr": 442, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "memfd_secret": 447, "quotactl_fd": 443,
}  # fmt: skip
_DENIED = {
    "x86_64": _SINCE_5 | {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "mount": 165, "umount2": 166,
        "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "open_by_handle_at": 304,
        "name_to_handle_at": 303, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250,
        "add_key": 248, "request_key": 249, "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64,
        "mq_open": 240, "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246,
        "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "syslog": 103,
        "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "quotactl": 179,
        "fanotify_init": 300, "lookup_dcookie": 212, "personality": 135, "vmsplice": 278, "iopl": 172, "ioperm": 173,
        "modify_ldt": 154, "uselib": 134,
    },
    "aarch64": _SINCE_5 | {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "mount": 40, "umount2": 39,
        "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "open_by_handle_at": 265,
        "name_to_handle_at": 264, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219,
        "add_key": 217, "request_key": 218, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190,
        "mq_open": 180, "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104,
        "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89, "syslog": 116,
        "settimeofday": 170, "clock_settime": 112, "clock_adjtime": 266, "adjtimex": 171, "quotactl": 60,
        "fanotify_init": 262, "lookup_dcookie": 18, "personality": 92, "vmsplice": 75,
    },
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, 56, 41), "aarch64": (0xC00000B7, 220, 198)}  # AUDIT_ARCH_*, clone, socket
_CLONE3 = 435
_NAMESPACES = 0x7E020080  # CLONE_NEW*
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: those that a network namespace contains

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # where they lie in struct seccomp_data; little-endian


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter, as an array of ``struct sock_filter``; it denies with EPERM what a sandbox has no use for.

    Args:
        machine: as `platform.machine` names it; None: this one.

    Raises:
        EnvError: no filter is known for the machine.

    >>> len(seccomp_filter("x86_64")) % 8
    0
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise EnvError(
            f"bubblewrap: there is no filter of system calls for {machine}, only for {' and '.join(_MACHINES)}; run "
            "programs on one of these, or give another sandbox"
        )
    architecture, clone, socket = _MACHINES[machine]

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    def deny(error: int) -> bytes:
        return op(_RETURN, _ERRNO | error)

    program = [op(_LOAD, _ARCHITECTURE), op(_EQUAL, architecture, 1), op(_RETURN, _KILL), op(_LOAD, _NUMBER)]
    program += [op(_AT_LEAST, 0x40000000, 0, 1), op(_RETURN, _KILL)]  # x32, whose numbers are others
    for number in sorted(_DENIED[machine].values()):
        program += [op(_EQUAL, number, 0, 1), deny(_EPERM)]
    program += [op(_EQUAL, _CLONE3, 0, 1), deny(_ENOSYS)]  # its flags lie behind a pointer; callers fall back to clone
    program += [op(_EQUAL, clone, 0, 4), op(_LOAD, _ARGUMENT), op(_ANY_BIT, _NAMESPACES, 0, 1), deny(_EPERM)]
    program += [op(_RETURN, _ALLOW)]
    program += [op(_EQUAL, socket, 1), op(_RETURN, _ALLOW), op(_LOAD, _ARGUMENT)]
    program += [op(_EQUAL, family, len(_FAMILIES) - place) for place, family in enumerate(_FAMILIES)]
    program += [deny(_EAFNOSUPPORT), op(_RETURN, _ALLOW)]
    return b"".join(program)
