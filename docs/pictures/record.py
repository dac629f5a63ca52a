#!/usr/bin/env python3
"""Records terminal.svg from the real command:

    python3 docs/pictures/record.py target/debug/leasehold

Needs only the standard library. The script types STEPS into two shells, each in a pseudo-terminal,
records what appears and when, and writes an animated picture. A viewer that plays no animations, or
whose user prefers reduced motion, shows the end of the recording.
"""

import fcntl
import html
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time

HERE = pathlib.Path(__file__).parent

# The shell (0 or 1), what is typed, and what the recorder then waits for: a regular expression in the
# output of that shell. `{pid}` is the process id from the latest output of `leasehold show`.
STEPS = [
    (0, "leasehold run backup -- ./backup.sh", r"backup started"),
    (1, "leasehold run --try backup -- ./backup.sh", r"\$ $"),
    (1, "leasehold show backup", r"\$ $"),
    (1, "kill -9 {pid}   # the holder crashes", r"\$ $"),
    (1, "leasehold run backup -- ./backup.sh", r"backup finished\s+\$ $"),
]
TYPED = tuple({f"$ {command.split()[0]} " for _, command, _ in STEPS})
TITLES = ["terminal 1", "terminal 2"]
COLUMNS = 92
# The script that the lock protects. It takes a minute in the first shell and a second in the other.
BACKUP = '#!/bin/sh\necho "backup started, token $LEASEHOLD_TOKEN"\nsleep "$BACKUP_SECONDS"\necho "backup finished"\n'
SECONDS = ["60", "1.2"]

PATIENCE = 30  # seconds until the recorder gives up waiting
LONGEST_GAP = 1.2  # seconds: longer waits are shortened in the picture
KEEP_END = 5  # seconds for which the end is shown before the recording starts again

CHARACTER, LINE, MARGIN, SIZE = 8.43, 19, 16, 14


class Shell:
    """A shell in a pseudo-terminal, and what it wrote."""

    def __init__(self, directory, environment):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(directory)
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "--noediting"], environment)
        size = struct.pack("HHHH", 40, COLUMNS, 0, 0)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, size)
        self.text = ""

    def close(self):
        os.kill(self.pid, signal.SIGHUP)
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


class Recorder:
    def __init__(self, shells):
        self.shells = shells
        self.events = []  # (time, shell, text)

    def read(self, seconds):
        """Records for this many seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([s.terminal for s in self.shells], [], [], left)
            for terminal in ready:
                at = [s.terminal for s in self.shells].index(terminal)
                text = os.read(terminal, 65536).decode(errors="replace")
                self.shells[at].text += text
                self.events.append((time.monotonic(), at, text))

    def wait(self, shell, pattern, before=0):
        """Records until the pattern is in the output, from this position on."""
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, text := self.shells[shell].text[before:].replace("\r", "")):
            if time.monotonic() > end:
                sys.exit(f"no {pattern!r} in the output:\n{text}")
            self.read(0.05)

    def play(self, steps):
        for shell in range(len(self.shells)):
            self.wait(shell, r"\$ $")
        for shell, command, pattern in steps:
            if "{pid}" in command:
                found = re.findall(r"^held\s+\S+\s+(\d+)", self.shells[shell].text, re.MULTILINE)
                command = command.format(pid=found[-1])
            for word in re.findall(r"\S+\s*", command):
                os.write(self.shells[shell].terminal, word.encode())
                self.read(0.12)
            self.read(0.3)
            before = len(self.shells[shell].text)
            os.write(self.shells[shell].terminal, b"\n")
            self.wait(shell, pattern, before)
            self.read(0.9)


def pieces(events):
    """The text of each shell as (time, row, column, text), with long waits shortened."""
    shown, now, before = [[] for _ in TITLES], 0.0, None
    places = [[0, 0] for _ in TITLES]
    for at, shell, text in events:
        now += min(at - before, LONGEST_GAP) if before is not None else 0.0
        before = at
        place = places[shell]
        for part in re.split(r"(\n)", text.replace("\r", "")):
            if part == "\n":
                place[0], place[1] = place[0] + 1, 0
                continue
            while part:
                piece, part = part[: COLUMNS - place[1]], part[COLUMNS - place[1] :]
                shown[shell].append((now, place[0], place[1], piece))
                place[1] += len(piece)
                if part:
                    place[0], place[1] = place[0] + 1, 0
    return shown, now


def picture(events):
    shown, length = pieces(events)
    total = length + KEEP_END
    width = round(2 * MARGIN + COLUMNS * CHARACTER + 2 * MARGIN)
    body, frames, top, number = [], [], MARGIN, 0
    for shell, title in enumerate(TITLES):
        rows = max([row for _, row, _, text in shown[shell] if text.strip()], default=0) + 1
        height = 34 + rows * LINE + 10
        body.append(f'<rect class="card" x="{MARGIN}" y="{top}" width="{width - 2 * MARGIN}" height="{height}" rx="6"/>')
        body.append(f'<text class="note" x="{2 * MARGIN}" y="{top + 21}">{title}</text>')
        for at, row, column, text in shown[shell]:
            left, text = column + len(text) - len(text.lstrip()), text.strip()
            if not text:
                continue
            x, y = 2 * MARGIN + left * CHARACTER, top + 34 + row * LINE + 13
            line = "".join(t for _, r, _, t in shown[shell] if r == row)
            style = "t name" if line.startswith(TYPED) else "t"
            delay = ""
            if at > 0.05:
                number += 1
                frames.append(f"@keyframes k{number} {{ 0% {{ opacity: 0 }} {100 * at / total:.2f}% {{ opacity: 1 }} 100% {{ opacity: 1 }} }}")
                delay = f' style="animation-name: k{number}"'
            body.append(
                f'<text xml:space="preserve" class="{style}" x="{x:.1f}" y="{y}" textLength="{len(text) * CHARACTER:.1f}"{delay}>'
                f"{html.escape(text, quote=False)}</text>"
            )
        top += height + MARGIN // 2
    height = top + MARGIN // 2
    style = (HERE / "style.css").read_text()
    style += (
        f".pic .t {{ font: {SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre; "
        f"animation: {total:.1f}s step-end infinite }}\n.pic .name {{ font-weight: 600 }}\n"
        "@media (prefers-reduced-motion: reduce) { .pic .t { animation: none !important } }\n"
    )
    title = (
        "One shell runs a backup under a lock. A second shell cannot take the lock and shows its holder. "
        "When the holder crashes, the second shell gets the lock immediately."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pic" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        f"<title>{title}</title>\n<style>\n{style}" + "\n".join(frames) + "\n</style>\n"
        f'<rect class="paper" width="{width}" height="{height}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def main():
    program = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else shutil.which("leasehold") or "target/debug/leasehold").resolve()
    if not program.exists():
        sys.exit(f"no such program: {program}")
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        (place / "bin").mkdir()
        (place / "bin/leasehold").symlink_to(program)
        (place / "backup.sh").write_text(BACKUP)
        (place / "backup.sh").chmod(0o755)
        shells = []
        for seconds in SECONDS:
            environment = {
                "PATH": f"{place}/bin:{os.environ['PATH']}", "HOME": directory, "TERM": "dumb", "PS1": "$ ", "LANG": "C.UTF-8",
                "LEASEHOLD_STORE": f"file:{place}/locks", "BACKUP_SECONDS": seconds, "BASH_SILENCE_DEPRECATION_WARNING": "1",
            }
            shells.append(Shell(directory, environment))
        recorder = Recorder(shells)
        try:
            recorder.play(STEPS)
        finally:
            for shell in shells:
                shell.close()
        events = [(at, shell, text.replace(directory, "/tmp")) for at, shell, text in recorder.events]
        (HERE / "terminal.svg").write_text(picture(events))


if __name__ == "__main__":
    main()
