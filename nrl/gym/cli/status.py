"""``nrl gym status``: how the servers of a running gym are."""

import json
import time
from collections.abc import Sequence
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nrl.errors import ConfigError
from nrl.gym.config.resolving import ask, find
from nrl.log import duration

__all__ = ["USAGE", "status"]

USAGE = """usage: nrl gym status [CONFIG.yaml ...] [json=true]

Show the servers of a running gym: of the configuration, or the only one that runs here. The exit status is 1 if some
are not ready."""
_WIDE = 160  # columns of a file, whose reader may scroll
_COLOURS = {"ready": "green", "silent": "red", "restarting": "red"}


def status(args: Sequence[str]) -> int:
    """Print a table, or with ``json=true`` what the head answers.

    Args:
        args: ``CONFIG.yaml`` as it was given to ``nrl gym run``; nothing: the only gym that runs here.

    Returns:
        0 if all servers are ready, else 1.

    Raises:
        ConfigError: no such gym runs.
        EnvError: its head refuses.
    """
    as_json = [arg for arg in args if arg.startswith("json=")]
    if as_json and as_json[-1] not in ("json=true", "json=false"):
        raise ConfigError(f"{as_json[-1]}: write json=true or json=false")
    place = find([arg for arg in args if arg not in as_json])
    found = ask(place)
    if as_json and as_json[-1] == "json=true":
        print(json.dumps({"head": place.url, **found}, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDE)
        console.print(_table(found["servers"]))
        console.print(f"the head is {place.url}", highlight=False)
    return 0 if found["ready"] else 1


def _table(servers: Sequence[Any]) -> Table:
    table = Table("server", "kind", "state", "since", "restarts", "pid", "executable", box=ROUNDED)
    table.add_column("address", overflow="fold")
    for server in servers:
        several = len(server["replicas"]) > 1
        for each in server["replicas"]:
            name = f"{server['name']}/{each['number']}" if several else server["name"]
            state = Text(each["state"], style=_COLOURS.get(each["state"], "yellow"))
            if each["note"]:
                state.append(f": {each['note']}", style="dim")
            since = duration(max(0.0, time.time() - each["since"]))
            row = [
                name,
                server["serves"] or server["kind"],
                state,
                since,
                str(each["restarts"]),
                str(each["pid"] or "-"),
            ]
            table.add_row(*row, server["executable"] or "-", each["url"] or "-")
    return table
