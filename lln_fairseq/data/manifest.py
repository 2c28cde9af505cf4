"""The output directory: what is in it, whether it is finished, and whose settings it was built with.

    build.json      from the first to the last step: the settings of the build that is under way
    manifest.json   the last file written: its presence means finished; settings, sources, counts, versions, and the
                    size and sha256 of every file of the result

Neither holds a date or a path outside the directory, so the same settings give the same bytes.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from lln_fairseq.data.files import lock, sha256_of, write_bytes
from lln_fairseq.data.reporting import DataError, say

BUILD, MANIFEST = "build.json", "manifest.json"

Input = TypeVar("Input")


def build_directory(
    out: Path,
    settings: Mapping[str, Any],
    files: Sequence[str],
    read: Callable[[], Input],
    write: Callable[[Input], Mapping[str, Any]],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build the result in `out` and return its manifest; a finished one with the same settings is kept.

    Args:
        out: the output directory.
        settings: everything that the bytes of the result depend on.
        files: the files of the result, relative to `out`, without the manifest.
        read: reads the input and checks it. It changes nothing in `out`, so that bad input leaves a result as it was.
        write: writes the files from what `read` returned, skips those that an interrupted run has left, and returns
            what the manifest says beside the settings and the checksums of the files.
        overwrite: build anew, whatever is in `out`.

    Raises:
        DataError: if `out` cannot be used or holds a result of other settings.
    """
    with output_directory(out):
        if not overwrite and (content := finished(out, settings, files)):
            return content
        resume = not overwrite and is_under_way(out)
        data = read()
        if not resume:
            begin(out, settings, files)
        return finish(out, settings, files, write(data))


@contextmanager
def output_directory(out: Path) -> Iterator[None]:
    """Create `out` and keep other runs away from it until the end; directories that stay empty are removed again.

    Raises DataError where it cannot be created or written to, or another run has it.
    """
    created = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        _remove_empty(created)
        raise DataError(f"cannot write to the output directory {out}: {error.strerror}") from error
    try:
        if not lock(handle):
            raise DataError(f"another run is writing to {out}")
        yield
    finally:
        os.close(handle)
        _remove_empty(created)


def _remove_empty(directories: Sequence[Path]) -> None:
    for path in directories:  # innermost first
        try:
            path.rmdir()
        except OSError:
            return


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); --overwrite builds anew") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a manifest; --overwrite builds anew")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _check_settings(path: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in [*wanted, *there]:
        if there.get(key) != wanted.get(key):
            raise DataError(
                f"{path.parent} was built with {key} = {there.get(key)}, not {wanted.get(key)}: "
                "choose another directory or --overwrite"
            )


def finished(out: Path, settings: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any] | None:
    """Return the manifest of a finished result with these settings, or None if there is work to do.

    Raises:
        DataError: if `out` holds a result of other settings, finished or not; some of these files, but not from this
            program; or a finished result with damaged files.
    """
    manifest, build = out / MANIFEST, out / BUILD
    if manifest.is_file():
        content = _read_json(manifest)
        _check_settings(manifest, content.get("settings", {}), settings)
        for name in files:
            recorded, path = content.get("files", {}).get(name, {}), out / name
            if not path.is_file() or sha256_of(path) != recorded.get("sha256"):
                raise DataError(f"{path} is missing or not the file that {MANIFEST} lists; --overwrite builds anew")
        build.unlink(missing_ok=True)  # the earlier run was killed between its last two steps
        say(f"{out} is finished; nothing to do")
        return content
    if build.is_file():
        _check_settings(build, _read_json(build), settings)
        return None
    for name in files:
        if (out / name).exists():
            raise DataError(f"{out / name} is there but was not built here; choose another directory or --overwrite")
    return None


def is_under_way(out: Path) -> bool:
    """Return True if `out` holds an unfinished result; `finished` has made sure that its settings are the same."""
    return (out / BUILD).is_file()


def begin(out: Path, settings: Mapping[str, Any], files: Sequence[str]) -> None:
    """Remove what is there of the result and note the settings: from here on `files` may appear in `out`.

    The manifest goes first and the note comes last, so that a kill in between leaves nothing that seems finished or
    is continued with other settings.
    """
    for name in [MANIFEST, BUILD, *files]:
        (out / name).unlink(missing_ok=True)
    _write_json(out / BUILD, settings)


def finish(out: Path, settings: Mapping[str, Any], files: Sequence[str], content: Mapping[str, Any]) -> dict[str, Any]:
    """Write and return the manifest: `content`, the settings, and the size and sha256 of every file."""
    listed = {name: {"bytes": (out / name).stat().st_size, "sha256": sha256_of(out / name)} for name in files}
    manifest = {"settings": dict(settings), **content, "files": listed}
    _write_json(out / MANIFEST, manifest)
    (out / BUILD).unlink(missing_ok=True)
    return manifest


def versions(projects: Sequence[str]) -> dict[str, str]:
    """Installed versions by name of the distribution; one that is not installed is left out."""
    found = {}
    for project in projects:
        try:
            found[project] = metadata.version(project)
        except metadata.PackageNotFoundError:
            continue
    return found
