"""Executables: the Python environments of meshes, from a name to what a node needs to make one.

`registry` has them by name. `locks` finds the lock that applies and selects from it (`pins` reads it), `wheels` packs
what no index has, and `recipes` puts it all together; `nrl.runtime.node` builds from a recipe. `maintenance` is the
command `nrl venvs`.
"""
