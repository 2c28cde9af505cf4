"""Published encoders: their files out of a package, and nothing else of it."""

import zipfile

import pytest

from data_prep import encoders


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A function that makes the wheel of sapiens with these members, as if it had been fetched."""

    def make(*members):
        path = tmp_path / "sapiens.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member in members:
                archive.writestr(member, f"content of {member}")
        monkeypatch.setattr(encoders, "obtain", lambda file: path)

    return make


def test_the_files_of_an_encoder_and_no_others(wheel, tmp_path, capsys):
    wheel("sapiens/models/v1/dict.txt", "sapiens/models/v1/checkpoint_vl.pt", "sapiens/__init__.py")
    out = tmp_path / "out"
    assert encoders.main(["sapiens-light", "--out", str(out)]) == 0
    assert f"python -m lln_fairseq convert {out}/checkpoint_vl.pt OUT" in capsys.readouterr().out
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        name: f"content of sapiens/models/v1/{name}" for name in ("dict.txt", "checkpoint_vl.pt")
    }
    (out / "dict.txt").write_text("mine")
    assert encoders.main(["sapiens-light", "--out", str(out)]) == 0
    assert (out / "dict.txt").read_text() == "mine"
