# SPDX-License-Identifier: GPL-3.0-or-later
"""Take a server out of sglang-router (0.3.2) and put it back, through the router's own list of workers.

GET /workers lists them, DELETE /workers/ID takes one out, POST /workers takes one in; each is done in the background
some milliseconds after its answer. A request that a removed worker is answering, streamed or not, goes on to its end;
new ones go to the others. The list is the router's alone: one that starts again has the servers of its command line.
"""

from __future__ import annotations

import time
import typing as t
from dataclasses import dataclass

from .http import Client, HttpError

PATH = "/workers"
POLL_S = 0.2
ABSENT, PRESENT = "absent", "present"


class RouterError(Exception):
    """The router does not do what is asked of it, or should not."""


@dataclass(frozen=True)
class Worker:
    """A server as the router has it. healthy: requests are given to it."""

    id: str
    url: str
    healthy: bool


@dataclass(frozen=True)
class Outcome:
    """What was changed, and the state in words."""

    changed: bool
    reason: str


def workers(client: Client) -> list[Worker]:
    """The router's workers. Raises HttpError, also for an answer of another shape."""
    answer = client.get_json(PATH)
    try:
        return [Worker(str(one["id"]), one["url"].rstrip("/"), one["is_healthy"] is True) for one in answer["workers"]]
    except (AttributeError, KeyError, TypeError):
        raise HttpError("body", "GET", client.base_url + PATH, "the answer lists no workers", 0.0, 200) from None


def set_worker(
    client: Client,
    url: str,
    state: str,
    others: t.Sequence[str] = (),
    key: str | None = None,
    check: bool = False,
    timeout: float = 30.0,
) -> Outcome:
    """Bring a server into or out of the router's list and return when the router has done so.

    others: servers that are meant to stand in for this one. When there are some and the router calls none of them
    healthy, a healthy server is left in. key: the server's, with which the router asks it what it serves, as it does
    at its own start. check: change nothing and say what would be. Raises RouterError and HttpError.
    """
    url = url.rstrip("/")
    try:
        listed = workers(client)
    except HttpError as error:
        if error.kind != "connect":
            raise
        return Outcome(False, "the router does not run; it starts with all servers of its command line")
    seen = next((one for one in listed if one.url == url), None)
    if state == ABSENT:
        if seen is None:
            return Outcome(False, f"{url} was out of the router already")
        _refuse_the_last(seen, listed, others)
        if not check:
            client.delete_json(f"{PATH}/{seen.id}")
            _await(client, lambda now: url not in {one.url for one in now}, f"{url} is still in its list", timeout)
        return Outcome(True, f"{url} is out of the router")
    if seen is None and not check:
        client.post_json(PATH, {"url": url, "api_key": key} if key else {"url": url})
    if not check:
        _await(client, lambda now: Worker(_id(now, url), url, True) in now, f"{url} is not healthy there", timeout)
    return Outcome(seen is None, f"{url} is in the router")


def _id(listed: t.Sequence[Worker], url: str) -> str:
    return next((one.id for one in listed if one.url == url), "")


def _refuse_the_last(seen: Worker, listed: t.Sequence[Worker], others: t.Sequence[str]) -> None:
    wanted = {one.rstrip("/") for one in others}
    if seen.healthy and wanted and not any(one.healthy and one.url in wanted for one in listed):
        raise RouterError(
            f"{seen.url} is the only server that the router has left, and is not taken out; wanted: a healthy one of "
            f"{', '.join(sorted(wanted))} beside it. Next: see why they are not (systemctl status 'sglang-*' on their "
            "hosts); a server whose unit is stopped already is taken out all the same"
        )


def _await(client: Client, done: t.Callable[[list[Worker]], bool], otherwise: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not done(workers(client)):
        if time.monotonic() > deadline:
            raise RouterError(f"the router was asked, and {otherwise} after {timeout:g} s")
        time.sleep(POLL_S)
