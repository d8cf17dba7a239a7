"""Filling in templates, and writing what comes of it."""

import contextlib
import json
import shlex
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nrl.errors import ConfigError

__all__ = ["fill_template", "write"]


def fill_template(template: str, values: Mapping[str, Any]) -> str:
    """A template of this package with values; ``x | sh`` quotes for bash, ``x | yaml`` for YAML.

    Args:
        template: the name of the file.
        values: by the names that the template has for them.
    """
    import jinja2  # The import takes a moment, and --help does not need it.

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"sh": lambda value: shlex.quote(str(value)), "yaml": _yaml}
    return environment.get_template(template).render(values)


def write(files: Mapping[Path, str], *, force: bool, command: str) -> None:
    """Write files, all or none but where a rename fails; one that is there already and differs stays.

    Args:
        files: their texts.
        force: replace files that differ.
        command: for the error.

    Raises:
        ConfigError: a file that differs is there, or one cannot be written.
    """
    written = dict[Path, Path]()
    try:
        different = [path for path, text in files.items() if path.exists() and path.read_text(encoding="utf-8") != text]
        if different and not force:
            raise ConfigError(
                f"{command}: {' and '.join(map(str, different))} differs from what would be written; give force=true "
                "to replace it, or to= another name"
            )
        for path, text in files.items():
            target = path.resolve()  # a link stays one
            target.parent.mkdir(parents=True, exist_ok=True)
            written[target] = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
            written[target].write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, written[target])
        for target, temporary in written.items():
            temporary.replace(target)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{command}: a file cannot be written: {error}") from error
    finally:
        for temporary in written.values():
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _yaml(value: Any) -> str:
    """A value on one line; JSON is YAML as long as characters stand for themselves."""
    return json.dumps(value, ensure_ascii=False)
