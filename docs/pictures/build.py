#!/usr/bin/env python3
"""Draws the pictures of the documentation: python3 docs/pictures/build.py

Needs only the standard library. Every file contains the whole of style.css, because a page shows it
through <img>, which loads no other file. With --check, nothing is written, and the exit status is 1
if a picture is out of date.
"""

import html
import pathlib
import sys

HERE = pathlib.Path(__file__).parent


class Picture:
    """Collects shapes; coordinates are pixels from the top left."""

    def __init__(self, name, title, width, height):
        self.name, self.title, self.width, self.height = name, title, width, height
        self.parts = []

    def add(self, part):
        self.parts.append(part)

    def text(self, x, y, words, style=""):
        style = f' class="{style}"' if style else ""
        self.add(f'<text x="{x}" y="{y}"{style}>{html.escape(words, quote=False)}</text>')

    def rect(self, x, y, width, height, style, round=3):
        self.add(f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{round}"/>')

    def bar(self, x, to, y, words="", style="hold", height=26):
        """A span of time, with words inside."""
        self.rect(x, y, to - x, height, style)
        if words:
            inside = "mid" if "pale" in style or "wait" in style else "mid on"
            self.text((x + to) / 2, y + height / 2 + 5, words, inside)

    def path(self, d, style="line"):
        self.add(f'<path class="{style}" d="{d}"/>')

    def arrow(self, x1, y1, x2, y2, kind=""):
        """A straight arrow; kind is "", "yes" or "no"."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - 9 * ux, y2 - 9 * uy
        self.path(f"M{x1} {y1}L{bx:.1f} {by:.1f}", kind or "arrow")
        self.path(
            f"M{x2} {y2}L{bx - 4.5 * uy:.1f} {by + 4.5 * ux:.1f}L{bx + 4.5 * uy:.1f} {by - 4.5 * ux:.1f}Z",
            f"tip-{kind}" if kind else "tip",
        )

    def svg(self, style):
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pic" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n'
            f"<title>{html.escape(self.title, quote=False)}</title>\n<style>\n{style}</style>\n"
            f'<rect class="paper" width="{self.width}" height="{self.height}"/>\n{body}\n</svg>\n'
        )


def fencing():
    p = Picture(
        "fencing",
        "A paused holder resumes too late. Its write carries token 33; the database has already seen 34 and rejects it.",
        880, 330,
    )
    p.text(20, 30, "A fencing token stops a holder that was paused for too long", "title")
    for y, name in [(60, "client A"), (130, "client B"), (236, "database")]:
        p.rect(16, y, 848, 62 if name == "database" else 50, "lane")
        p.text(28, y + 30, name, "name")
    p.bar(150, 290, 72, "holds, token 33")
    p.bar(290, 620, 72, "paused (garbage collection, VM migration)", "hold pale")
    p.bar(620, 780, 72, "resumes and writes", "late")
    p.bar(230, 392, 148, "waits", "wait pale", 16)
    p.bar(392, 570, 142, "holds, token 34")
    p.path("M392 54V196", "mark dash")
    p.text(392, 212, "A’s lease expires", "mid note")
    p.text(28, 284, "highest token seen", "note")
    for x, token in [(210, "33"), (500, "34")]:
        p.text(x, 284, token, "name mid")
    p.path("M226 279H484", "line")
    p.path("M516 279H596", "line")
    p.arrow(210, 100, 210, 266, "yes")
    p.text(218, 226, "token 33 ✓", "good")
    p.arrow(500, 170, 500, 266, "yes")
    p.text(508, 226, "token 34 ✓", "good")
    p.arrow(710, 100, 710, 266, "no")
    p.text(718, 226, "token 33 ✗", "bad")
    p.text(710, 284, "rejected: 33 is lower than 34", "bad mid")
    p.text(20, 320, "The store gives each new holder a higher token. The database rejects a token lower than the highest it has seen.", "note")
    return p


def lease():
    p = Picture(
        "lease",
        "Timeline of a lease: granted, renewed every third of the lease, at risk after two thirds, then lost.",
        880, 322,
    )
    left, scale = 150, 28

    def x(seconds):
        return left + seconds * scale

    p.text(20, 30, "A lease of 15 s, and a store that becomes unreachable after 8 s", "title")
    for y, name in [(74, "leasehold run"), (134, "guard"), (208, "store")]:
        p.rect(16, y, 848, 50, "lane")
        p.text(28, y + 30, name, "name")
    p.rect(x(8), 208, 864 - x(8), 50, "down", 0)
    p.text(x(22.5), 238, "unreachable", "mid bad")
    p.bar(x(0), x(15), 86, "command runs")
    p.bar(x(15), x(18), 86, "SIGTERM", "late")
    p.path(f"M{x(18)} 78V116", "no")
    p.text(x(18), 70, "SIGKILL", "mid bad")
    p.bar(x(0), x(15), 146, "Held")
    p.bar(x(15), x(20), 146, "AtRisk", "late")
    p.bar(x(20), 856, 146, "Lost", "wait pale")
    for at, words, kind in [(0, "granted", "yes"), (5, "renewed", "yes"), (10, "no reply", "no"), (15, "no reply", "no")]:
        p.arrow(x(at), 174, x(at), 224, kind)
        p.text(x(at) + 8, 238, words, "good" if kind == "yes" else "bad")
    p.path(f"M{x(20)} 58V262", "mark dash")
    p.text(x(20), 52, "lease expires", "mid note")
    p.path(f"M{x(0)} 276H{x(25)}", "line")
    for second in range(0, 26, 5):
        p.path(f"M{x(second)} 272V280", "mark")
        p.text(x(second), 296, f"{second} s", "mid note")
    p.text(20, 314, "The holder renews every third of the lease. It is at risk two thirds after the last renewal, and lost when the lease expires.", "note")
    return p


def queue():
    p = Picture("queue", "A lock is a queue of claims. The first claims that fit hold the lock.", 880, 300)
    p.text(20, 30, "A lock is a queue of claims. The first claims that fit hold the lock.", "title")
    rows = [
        ("mutex", "one holder", [("A", "33"), ("B", ""), ("C", ""), ("D", "")], 1),
        ("read-write lock", "many readers or one writer", [("A reads", "57"), ("B reads", "58"), ("C writes", ""), ("D reads", "")], 2),
        ("semaphore of 3", "up to 3 permits", [("A", "81"), ("B", "82"), ("C", "83"), ("D", "")], 3),
    ]
    for row, (name, rule, claims, holds) in enumerate(rows):
        y = 52 + row * 74
        p.rect(16, y, 848, 62, "lane")
        p.text(28, y + 27, name, "name")
        p.text(28, y + 47, rule, "note")
        for at, (client, token) in enumerate(claims):
            x = 240 + at * 154
            if at < holds:
                p.rect(x, y + 8, 142, 46, "hold", 5)
                p.text(x + 71, y + 28, client, "mid on")
                p.text(x + 71, y + 46, f"token {token}", "mid on")
            else:
                p.rect(x, y + 8, 142, 46, "wait pale", 5)
                p.text(x + 71, y + 28, client, "mid")
                p.text(x + 71, y + 46, "waits", "mid note")
    p.rect(240, 280, 12, 12, "hold")
    p.text(258, 291, "holds", "note")
    p.rect(320, 280, 12, 12, "wait pale")
    p.text(338, 291, "waits", "note")
    p.text(856, 291, "new claims join at the end →", "end note")
    return p


def hand_over():
    p = Picture(
        "hand-over",
        "A released lock passes to the next waiter immediately. A crashed holder's lock passes on when its lease expires.",
        880, 404,
    )
    p.text(20, 30, "How a lock passes to the next waiter", "title")
    for half, (name, top) in enumerate([("The holder releases the lock", 44), ("The holder crashes", 222)]):
        p.text(28, top + 20, name, "name")
        for row, lane in enumerate(["client A", "store", "client B"]):
            y = top + 32 + row * 42
            p.rect(16, y, 848, 36, "lane")
            p.text(28, y + 23, lane)
    # Release
    p.bar(116, 420, 81, "holds, token 33")
    p.bar(200, 436, 170, "waits", "wait pale", 16)
    p.bar(452, 780, 165, "holds, token 34")
    p.arrow(420, 107, 430, 134)
    p.arrow(432, 136, 446, 164)
    p.text(442, 141, "release: the lock is granted to B, which is notified or polls", "note")
    p.text(132, 141, "queue: A, B", "note")
    # Crash
    p.bar(116, 330, 259, "holds, token 33")
    p.path("M334 264L348 280M348 264L334 280", "no")
    p.text(358, 277, "crashes: no renewals", "bad")
    p.bar(200, 606, 348, "waits", "wait pale", 16)
    p.bar(622, 856, 343, "holds, token 34")
    p.path("M290 291V309M600 291V309", "mark")
    p.path("M290 300H600", "mark")
    p.text(445, 317, "lease: up to 15 s after the last renewal", "mid note")
    p.arrow(604, 312, 618, 342)
    p.text(626, 319, "lease expired: grants it to B", "note")
    p.text(132, 319, "queue: A, B", "note")
    p.text(20, 394, "With file: there is no lease. The kernel reports that the process has ended, and the next waiter gets the lock immediately.", "note")
    return p


def stores():
    p = Picture("stores", "Decision tree for choosing a store.", 880, 560)
    p.text(20, 30, "Which store?", "title")
    y = 48
    questions = [
        ("Do all programs run in one process?", [("memory:", "nothing to install")]),
        ("On one machine?", [("file:", "no server, no lease"), ("sqlite:", "if your data is in SQLite")]),
        ("Is the data in PostgreSQL or MySQL?", [("postgres: mysql:", "lock, data and fence in one database")]),
        ("Do you run etcd or ZooKeeper?", [("etcd: zookeeper:", "a majority of servers keeps the lock")]),
        ("Do you run Redis or Valkey?", [("redis:", "fast; let the resource check tokens"), ("redlock:", "independent servers; mutexes only")]),
        ("Do you run NATS JetStream?", [("nats:", "let the resource check tokens")]),
        ("Do you have only a bucket?", [("s3: gs: az:", "for jobs and deployments, not for busy locks")]),
        ("Only memcached?", [("memcached:", "only where two holders would be harmless")]),
    ]
    for at, (question, answers) in enumerate(questions):
        height = 50
        p.rect(20, y, 310, height, "card", 6)
        p.text(36, y + 30, question)
        p.arrow(330, y + 25, 392, y + 25, "yes")
        p.text(361, y + 18, "yes", "mid good")
        p.rect(392, y, 468, height, "card", 6)
        for row, (url, why) in enumerate(answers):
            base = y + (30 if len(answers) == 1 else 21 + row * 20)
            p.text(408, base, url, "name")
            p.text(558, base, why, "note")
        if at + 1 < len(questions):
            p.arrow(175, y + height, 175, y + height + 14)
            p.text(184, y + height + 12, "no", "note")
        y += height + 14
    return p


def outage():
    p = Picture(
        "outage",
        "What happens during an outage: holders keep the lock until the lease expires, waiters keep waiting.",
        880, 384,
    )
    p.text(20, 30, "What happens while the store is unreachable", "title")
    for top, name in [(44, "Shorter than the lease"), (206, "Longer than the lease")]:
        p.text(28, top + 20, name, "name")
        for row, lane in enumerate(["store", "holder A", "waiter B"]):
            y = top + 30 + row * 42
            p.rect(16, y, 848, 36, "lane")
            p.text(28, y + 23, lane)
    p.rect(300, 74, 200, 36, "down", 0)
    p.text(400, 97, "unreachable", "mid bad")
    p.bar(116, 440, 121, "holds")
    p.bar(440, 510, 121, "at risk", "late")
    p.bar(510, 856, 121, "renews and still holds")
    p.bar(180, 856, 168, "waits and retries", "wait pale", 16)
    p.rect(300, 236, 400, 36, "down", 0)
    p.text(410, 259, "unreachable", "mid bad")
    p.bar(116, 440, 283, "holds")
    p.bar(440, 520, 283, "at risk", "late")
    p.bar(520, 700, 283, "lost, work canceled", "wait pale")
    p.path("M520 228V314", "mark dash")
    p.text(524, 229, "lease expires", "note")
    p.bar(180, 710, 330, "waits and retries", "wait pale", 16)
    p.bar(710, 856, 325, "holds")
    p.text(20, 374, "A waiter retries for 15 s, or for one lease if that is longer. Then its call returns an error. Elections retry without limit.", "note")
    return p


PICTURES = [fencing, lease, queue, hand_over, stores, outage]


def main():
    style = (HERE / "style.css").read_text()
    stale = []
    for draw in PICTURES:
        picture = draw()
        file, text = HERE / f"{picture.name}.svg", picture.svg(style)
        if "--check" not in sys.argv:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            stale.append(file.name)
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python3 docs/pictures/build.py")


if __name__ == "__main__":
    main()
