"""Executables: the Python environments of meshes, from a name to what a node needs to make one.

`registry` has them by name. `locks` says which lock applies and what it selects (`pins` reads it), `wheels` packs
what no index has, and `recipes` puts it all together; `nrl.runtime.node` builds from that. `maintenance` is what
`nrl venvs` does.
"""
