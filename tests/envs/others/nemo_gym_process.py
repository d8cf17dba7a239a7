# mypy: ignore-errors
"""Servers of NeMo Gym in one process, without Ray or a head server; run by a Python that has nemo-gym 0.4.0.

    python nemo_gym_process.py '[["resources_servers", "mcqa", "its name", 8001, {}], ...]'

Prints "ready" when all answer. The classes are NeMo Gym's own; they are told of each other by name. One that has null
in place of its options runs elsewhere.
"""

import asyncio
import importlib
import json
import random
import sys
import types
from pathlib import Path

import uvicorn
from nemo_gym import server_utils
from nemo_gym.config_types import BaseServerConfig
from omegaconf import OmegaConf

SERVERS = json.loads(sys.argv[1])
WORLD = {
    name: {kind: {package: {"host": "127.0.0.1", "port": port, "entrypoint": "app.py"}}}
    for kind, package, name, port, _ in SERVERS
}


def served(kind, package, name, port, extra):
    if package == "calendar":  # which imports a module of its own folder
        sys.path.insert(0, str(Path(importlib.util.find_spec(f"{kind}.{package}.app").origin).parent))
    module = importlib.import_module(f"{kind}.{package}.app")
    if package == "blackjack":
        module.random = types.SimpleNamespace(Random=lambda *_: random.Random(2))
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    made = [each for each in classes if issubclass(each, server_utils.SimpleServer)][-1]
    config = made.model_fields["config"].annotation.model_validate(
        {"name": name, "host": "127.0.0.1", "port": port, "entrypoint": "app.py", "domain": "other", **extra}
    )
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = server_utils.ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(WORLD))
    server = made(config=config, server_client=client)
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    return uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))


async def main():
    server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
    servers = [served(*each) for each in SERVERS if each[-1] is not None]
    serving = asyncio.gather(*(each.serve() for each in servers))
    while not all(each.started for each in servers):
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await serving


asyncio.run(main())
