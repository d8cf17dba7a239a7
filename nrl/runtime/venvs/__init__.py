"""Executables: the Python environments of meshes, from a name to an environment on a node.

`registry` has them by name. `locks` finds the lock that applies and selects from it (`pylock` reads it), `wheels` packs
packages without an index, and `recipes` combines them; `building` builds an environment from a recipe. `offline_bundle`
collects packages for hosts without a network. `cli` is the command `nrl venvs`.
"""
