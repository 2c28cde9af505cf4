"""Build an output directory so that a finished build is recognized, and an interrupted one starts over.

Two files in the directory record its state:

    unfinished      exists during a build, and after a build that was interrupted: the files that it deletes or writes
    manifest.json   written last, so it marks a finished build: settings, sources, counts, versions, and the size and
                    sha256 of every file of the result

The manifest contains no date and no path outside the directory, so the same settings give the same bytes.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from lln_fairseq.errors import UserError
from lln_fairseq.files import lock_file, sha256_of, write_bytes
from lln_fairseq.terminal import print_status
from lln_fairseq.text.vocabulary import MANIFEST

UNFINISHED = "unfinished"
SHA256 = re.compile("[0-9a-f]{64}")

Input = TypeVar("Input")


def build_directory(
    out: Path,
    settings: Mapping[str, Any],
    files: Sequence[str],
    read: Callable[[], Input],
    write: Callable[[Input], Mapping[str, Any]],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build the result in `out`, unless it is already finished, and return its manifest.

    The directory is locked during the build. What an interrupted build has left is deleted.

    Args:
        out: the output directory; created if necessary.
        settings: everything that determines the bytes of the result; must be serializable as JSON.
        files: the files of the result relative to `out`, without the manifest.
        read: reads and checks the input, and returns it. `read` must not change existing files in `out`, so that bad
            input leaves an earlier result intact.
        write: called with the input, writes `files`, and returns additional entries for the manifest.
        overwrite: build the result again. An existing result, finished or not, is deleted after `read` has returned.

    Raises:
        UserError: if `out` cannot be written to, or another program has locked it. Without `overwrite`, also if `out`
            holds a result with other settings, a finished result with missing or changed files, or some of `files`
            without a record of the build that wrote them.
    """
    with output_directory(out):
        if not overwrite:
            content = load_finished_manifest(out, settings, files)
            if content is not None:
                return content
        data = read()
        begin_build(out, files)
        return finish_build(out, settings, files, write(data))


@contextmanager
def output_directory(out: Path) -> Iterator[None]:
    """Create `out` if necessary, and lock it during the `with` block.

    If `out` or its parents were created for the block and are still empty at its end, they are removed again. UserError
    is raised if `out` cannot be written to, or another program has locked it.
    """
    created = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        _remove_empty(created)
        raise UserError(f"cannot write to the output directory {out}: {error.strerror}") from error
    try:
        if not lock_file(handle):
            raise UserError(f"another run is writing to {out}")
        yield
    finally:
        os.close(handle)
        _remove_empty(created)


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove the directories in order, and stop silently at the first one that is not empty or cannot be removed."""
    for path in directories:
        try:
            path.rmdir()
        except OSError:
            return


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise UserError if the file cannot be read or contains something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); use --overwrite to build it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a manifest; use --overwrite to build it again")
    return content


def _check_settings(path: Path, existing: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise UserError if the existing settings, read from `path`, differ from the requested ones.

    A setting that is missing on one side counts as None.
    """
    for key in [*requested, *existing]:
        if existing.get(key) != requested.get(key):
            raise UserError(
                f"{path.parent} was built with {_describe_change(key, existing.get(key), requested.get(key))}: "
                "choose another directory, or use --overwrite to build it again"
            )


def _describe_change(key: str, existing: Any, requested: Any) -> str:
    """Return "KEY = EXISTING, not REQUESTED", but name only what differs in a dictionary, and show no checksums."""
    if isinstance(existing, dict) and isinstance(requested, dict):
        names = [name for name in {**requested, **existing} if existing.get(name) != requested.get(name)]
        if key == "source":
            return f"other files ({', '.join(names)})"
        return _describe_change(f"{key}.{names[0]}", existing.get(names[0]), requested.get(names[0]))
    if SHA256.fullmatch(str(existing)) or SHA256.fullmatch(str(requested)):
        return f"another {key}"
    return f"{key} = {existing}, not {requested}"


def load_finished_manifest(out: Path, settings: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any] | None:
    """Return the manifest of `out` if its result is finished and has these settings, or None if it must be built.

    It must be built if `out` does not exist, holds only unrelated files, or holds an unfinished build. The checksum of
    each of `files` is verified. For a finished result, a message says that there is nothing to do, and a file
    `unfinished` is deleted. UserError is raised if `out` holds a finished result with other settings or with missing or
    changed files, or some of `files` that no unfinished build has written.
    """
    manifest = out / MANIFEST
    if manifest.is_file():
        content = _read_json(manifest)
        _check_settings(manifest, content.get("settings", {}), settings)
        recorded = content.get("files", {})
        for name in files:
            path = out / name
            if not path.is_file() or sha256_of(path) != recorded.get(name, {}).get("sha256"):
                raise UserError(
                    f"{path} is missing or not the file that {MANIFEST} lists; use --overwrite to build it again"
                )
        (out / UNFINISHED).unlink(missing_ok=True)  # still there if the build was killed just before its end
        print_status(f"{out} is finished; nothing to do")
        return content
    if (out / UNFINISHED).is_file():
        return None
    for name in files:
        if (out / name).exists():
            raise UserError(
                f"{out / name} exists but was not built here; choose another directory, or use --overwrite to build it "
                "again"
            )
    return None


def begin_build(out: Path, files: Sequence[str]) -> None:
    """Mark the directory as unfinished, and delete the manifest and then the files of an earlier result.

    These are `files`, and the files that the manifest or an interrupted build has recorded. If the program is killed in
    between, the directory does not look finished, and the next build starts over.
    """
    names = sorted({*files, *_recorded_files(out)})
    write_bytes(out / UNFINISHED, json.dumps({"files": names}, indent=1).encode())
    for name in [MANIFEST, *names]:
        (out / name).unlink(missing_ok=True)


def _recorded_files(out: Path) -> list[str]:
    """Return the existing files in `out` that an earlier build has recorded, relative to `out`.

    A record that is missing or damaged has no files. Names of files outside `out` are left out.
    """
    names = []
    for record in (MANIFEST, UNFINISHED):
        try:
            names += list(_read_json(out / record).get("files", []))
        except (UserError, TypeError):
            continue
    return [name for name in names if _is_file_inside(out, name)]


def _is_file_inside(directory: Path, name: Any) -> bool:
    """Return True if `name` is the relative path of a file in the directory, and does not lead out of it."""
    if not isinstance(name, str):
        return False
    path = directory / name
    return path.is_file() and path.resolve().is_relative_to(directory.resolve())


def finish_build(
    out: Path, settings: Mapping[str, Any], files: Sequence[str], content: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the manifest, which marks the result as finished, remove the file `unfinished`, and return the manifest.

    All `files` must exist; their sizes and checksums are recorded. `content` has further entries of the manifest.
    """
    file_entries = {}
    for name in files:
        path = out / name
        file_entries[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest = {"settings": dict(settings), **content, "files": file_entries}
    write_bytes(out / MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
    (out / UNFINISHED).unlink()
    return manifest


def versions(projects: Sequence[str]) -> dict[str, str]:
    """Return {project: version} for the installed packages among `projects`."""
    installed = {}
    for project in projects:
        try:
            installed[project] = metadata.version(project)
        except metadata.PackageNotFoundError:
            continue
    return installed
