"""Build an output directory so that an interrupted build can be resumed and a finished one is recognized.

Two files in the directory record its state:

    build.json      the settings of a build that has not finished yet
    manifest.json   written last, so it marks a finished directory: settings, sources, counts, versions, and the size
                    and sha256 of every file of the result

Neither contains a date or a path outside the directory, so the same settings give the same bytes.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from lln_fairseq.data.files import lock_file, sha256_of, write_bytes
from lln_fairseq.data.reporting import DataError, print_status

BUILD = "build.json"
MANIFEST = "manifest.json"

Input = TypeVar("Input")


def build_directory(
    out: Path,
    settings: Mapping[str, Any],
    files: Sequence[str],
    read: Callable[[], Input],
    write: Callable[[Input], Mapping[str, Any]],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build the result in `out`, unless it is finished already, and return its manifest.

    The directory is locked during the build. An interrupted build with the same settings is resumed.

    Args:
        out: the output directory; created if necessary.
        settings: everything that determines the bytes of the result; must be serializable as JSON.
        files: the files of the result relative to `out`, without the manifest.
        read: reads and checks the input. It must not change existing files in `out`, so that bad input leaves an
            earlier result intact.
        write: takes what `read` returned, writes `files`, and returns additional entries of the manifest. When a build
            is resumed, it must keep the files that are already complete.
        overwrite: delete an existing result, finished or not, once the input has been read, and build it again.

    Raises:
        DataError: if `out` cannot be written to, is locked by another program, holds a result with other settings, or
            holds damaged files or files that were not written by a build.
    """
    with output_directory(out):
        if not overwrite:
            content = load_finished_manifest(out, settings, files)
            if content is not None:
                return content
        resume = not overwrite and is_under_way(out)
        data = read()
        if not resume:
            begin_build(out, settings, files)
        return finish_build(out, settings, files, write(data))


@contextmanager
def output_directory(out: Path) -> Iterator[None]:
    """Create `out` and lock it for the `with` block; then remove the directories that were created but stayed empty.

    Raises:
        DataError: if `out` cannot be created or written to, or another program has locked it.
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
        if not lock_file(handle):
            raise DataError(f"another run is writing to {out}")
        yield
    finally:
        os.close(handle)
        _remove_empty(created)


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove nested directories, innermost first, up to the first one that is not empty or cannot be removed."""
    for path in directories:
        try:
            path.rmdir()
        except OSError:
            return


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); use --overwrite to build it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a manifest; use --overwrite to build it again")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _check_settings(path: Path, existing: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise DataError if the settings in `path` differ from the requested ones; a missing setting counts as None."""
    for key in [*requested, *existing]:
        if existing.get(key) != requested.get(key):
            raise DataError(
                f"{path.parent} was built with {key} = {existing.get(key)}, not {requested.get(key)}: "
                "choose another directory, or use --overwrite to build it again"
            )


def load_finished_manifest(out: Path, settings: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any] | None:
    """Return the manifest of a finished result with these settings, or None if the result must be built or resumed.

    None is also returned if `out` does not exist or holds only unrelated files. For a finished result, the SHA-256 of
    each of `files` is verified, a leftover build.json is removed, and a message says that there is nothing to do.

    Raises:
        DataError: if `out` holds a finished or unfinished result with other settings, a finished result with missing or
            changed files, or some of `files` without a record of the build that wrote them.
    """
    manifest = out / MANIFEST
    build = out / BUILD
    if manifest.is_file():
        content = _read_json(manifest)
        _check_settings(manifest, content.get("settings", {}), settings)
        recorded = content.get("files", {})
        for name in files:
            path = out / name
            if not path.is_file() or sha256_of(path) != recorded.get(name, {}).get("sha256"):
                raise DataError(
                    f"{path} is missing or not the file that {MANIFEST} lists; use --overwrite to build it again"
                )
        build.unlink(missing_ok=True)  # still there if the earlier build was killed just before its end
        print_status(f"{out} is finished; nothing to do")
        return content
    if build.is_file():
        _check_settings(build, _read_json(build), settings)
        return None
    for name in files:
        if (out / name).exists():
            raise DataError(
                f"{out / name} exists but was not built here; choose another directory, or use --overwrite to build it "
                "again"
            )
    return None


def is_under_way(out: Path) -> bool:
    """Return True if `out` holds an unfinished build. Its settings are not compared; see `load_finished_manifest`."""
    return (out / BUILD).is_file()


def begin_build(out: Path, settings: Mapping[str, Any], files: Sequence[str]) -> None:
    """Delete the manifest and the files of an earlier result, and record the settings of the new build.

    The manifest is deleted first and the settings are written last, so that a directory in between, if the program is
    killed, neither looks finished nor is resumed with other settings.
    """
    for name in [MANIFEST, BUILD, *files]:
        (out / name).unlink(missing_ok=True)
    _write_json(out / BUILD, settings)


def finish_build(
    out: Path, settings: Mapping[str, Any], files: Sequence[str], content: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the manifest, which marks the result as finished, and return it.

    It contains `settings`, the entries of `content`, and the size and sha256 of `files`, which must exist.
    """
    file_entries = {}
    for name in files:
        path = out / name
        file_entries[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest = {"settings": dict(settings), **content, "files": file_entries}
    _write_json(out / MANIFEST, manifest)
    (out / BUILD).unlink(missing_ok=True)
    return manifest


def versions(projects: Sequence[str]) -> dict[str, str]:
    """Return the version of every installed distribution among `projects`; leave out those that are not installed."""
    installed = {}
    for project in projects:
        try:
            installed[project] = metadata.version(project)
        except metadata.PackageNotFoundError:
            continue
    return installed
