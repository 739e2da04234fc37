"""A policy in one file: `use: ./file.py:Class`.

The source is compiled from the bytes read, not imported: no __pycache__ beside the user's file, no
stale bytecode after two edits in one second, and a module name that holds the content's digest, so
that two versions of a file can be alive while one replaces the other.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
import types
from typing import Any

from headrace.errors import PluginError, did_you_mean


def is_script(use: str) -> bool:
    """Say whether `use` is a script reference rather than a registered name."""
    return ".py:" in use or use.endswith(".py") or "/" in use


def script_path(use: str, base_dir: pathlib.Path) -> pathlib.Path:
    """Return the file of a script reference, absolute; a relative one counts from `base_dir`."""
    return (base_dir / pathlib.Path(use.rpartition(":")[0]).expanduser()).resolve()


def load_class(use: str, base_dir: pathlib.Path) -> type[Any]:
    """Return the class that `path.py:Class` names, freshly loaded. PluginError says what is wrong."""
    location, colon, class_name = use.rpartition(":")
    if not colon or not location.endswith(".py") or not class_name:
        raise PluginError(f"'{use}': write a script as ./file.py:Class")
    path = script_path(use, base_dir)
    module = _load_module(path)
    cls = getattr(module, class_name, None)
    if isinstance(cls, type):
        return cls
    own = [
        name
        for name, member in vars(module).items()
        if isinstance(member, type) and member.__module__ == module.__name__
    ]
    raise PluginError(f"{path} has no class '{class_name}'. {did_you_mean(class_name, own)}")


def policy_classes(path: pathlib.Path) -> list[str]:
    """Return the classes of a script that have a `name`, as policies do, in the order they are written."""
    module = _load_module(path.expanduser().resolve())
    return [
        name
        for name, member in vars(module).items()
        if isinstance(member, type)
        and member.__module__ == module.__name__
        and isinstance(getattr(member, "name", None), str)
    ]


def _load_module(path: pathlib.Path) -> types.ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PluginError(f"{path}: cannot be read: {error.strerror}") from None
    digest = hashlib.blake2b(bytes(path) + b"\0" + source, digest_size=8).hexdigest()
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise PluginError(f"{where}: not valid Python: {getattr(error, 'msg', error)}") from None
    module = types.ModuleType(f"headrace_script_{path.stem}_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        line = _line_in(path, error)
        where = f"{path}, line {line}" if line else str(path)
        raise PluginError(
            f"{where}: failed while loading: {type(error).__name__}: {error}"
        ) from error
    return module


def _line_in(path: pathlib.Path, error: BaseException) -> int | None:
    """Return the deepest line of `path` in the error's traceback."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
