"""Stands in for a Python interpreter: warm_python.py makes an executable of this file.

Training and Ray's workers are forked by its server, which has imported the large libraries. This process passes them
its files, and ends with them, whichever ends first. Everything else is for the interpreter itself. It imports little,
because it is started often.
"""

import array
import os
import re
import socket
import sys

FORKED = re.compile(r"-m (verl\.|gradloc_tools)|\S*/ray/\S+\.py|\S*/embedded/(prepare|run)\.py")


def main(interpreter: str, address: str) -> int:
    command = sys.argv[2:] if sys.argv[1:2] == ["-u"] else sys.argv[1:]
    if command[:2] == ["-X", "fork"]:  # which an interpreter ignores
        command = command[2:]
    elif not FORKED.match(" ".join(command[:2])):
        os.execv(interpreter, [interpreter, *sys.argv[1:]])
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    # The one that listed them is closed by then.
    files = [int(file) for file in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{file}")]
    files.remove(server.fileno())
    texts = [os.getcwd(), ",".join(map(str, files)), str(len(command)), *command]
    texts += [f"{name}={value}" for name, value in os.environ.items()]
    message = "\0".join(texts).encode(errors="surrogateescape")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    server.sendmsg([len(message).to_bytes(8, "little")], rights)
    server.sendall(message)
    for file in files:
        os.close(file)  # a reader must see the end of a pipe when the forked process closes it
    answer = server.recv(8, socket.MSG_WAITALL)
    return int.from_bytes(answer, "little") if answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1), sys.argv.pop(1)))
